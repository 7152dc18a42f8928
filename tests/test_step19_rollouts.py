"""Step 19's trainers and generators, of any layout, against one process that plays both parts."""

import re

import pytest
import torch
from lab.launch import STEPS, fork, launch, metrics
from lab.program import Program
from lab.ranks import run, threads
from lab.watch.numbers import WholeNumbers
from support.recordings import TOLERANCE, Run, assemble, compare

NUM_STEPS, PROMPTS, GROUP, SEQ_LEN = 3, 4, 3, 7
ALL = ["--dp_size", 2, "--pp_size", 2, "--tp_size", 2]


def flags_of(models, variant: str, *flags) -> list:
    dp_size = Program(19, flags).sizes.dp_size
    return ["--model_name", models / f"model_{variant}", "--seq_len", SEQ_LEN, "--group_size", GROUP,
            "--gradient_accumulation_steps", PROMPTS // dp_size, "--max_tokens", NUM_STEPS * PROMPTS * GROUP * SEQ_LEN,
            *flags]


def play(models, variant: str, *flags):
    """A run on ranks in this process, and what its trainers have recorded."""
    program = Program(19, flags_of(models, variant, *flags))
    result = run(program, threads(program.size), [whole := WholeNumbers()])
    return result, Run(result.rows, [whole.of[rank] for rank in sorted(whole.of)])


@pytest.fixture(scope="module")
def one(models):
    """one(variant, lag): one process, which generates and trains."""
    known = {}

    def one(variant: str, lag: int) -> Run:
        if (variant, lag) not in known:
            known[variant, lag] = play(models, variant, "--generators", 0, "--lag", lag)[1]
        return known[variant, lag]

    return one


TRAINERS = (("plain", ["--dp_size", 2]), ("tied", ["--pp_size", 2]), ("vocab1022", ["--tp_size", 2]), ("plain", ALL),
            ("tied", ["--tp_size", 4, "--pp_size", 3]))
GENERATORS = (0,), (1,), (2,), (2, "--generator_tp_size", 2)


@pytest.mark.parametrize("variant, trainers, generators, lag", [
    pytest.param(*each, generators, lag, marks=[pytest.mark.slow(drawn=6)] * (
        (g - t) % 4 != 2 - lag or t > 3 and not lag))
    for t, each in enumerate(TRAINERS) for g, generators in enumerate(GENERATORS) for lag in (0, 1)], ids=str)
def test_any_layout_is_one_process(one, models, variant, trainers, generators, lag):
    expected = one(variant, lag)
    _, found = play(models, variant, *trainers, "--generators", *generators, "--lag", lag)
    compare(expected, found, NUM_STEPS)
    for name in ("reward", "log_ratio"):
        assert [row[name] for row in found.rows] == [pytest.approx(row[name], abs=TOLERANCE) for row in expected.rows]
    final = assemble(found.ranks, "final")
    for name, weight in expected.ranks[0]["final"].items():
        assert (final[name] - weight).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("generators", [(1,), pytest.param((2,), marks=pytest.mark.slow), GENERATORS[-1]], ids=str)
def test_generators_compute_the_trainers_log_probabilities(models, generators):
    """Without lag they have the same weights, and with it older ones from the second step on."""
    for lag in (0, 1):
        rows = play(models, "plain", "--tp_size", 2, "--generators", *generators, "--lag", lag)[1].rows
        assert [row["log_ratio"] <= 1e-12 for row in rows] == [True] + [lag == 0] * (NUM_STEPS - 1)


@pytest.mark.parametrize("trainers, generators, copies", [
    (["--dp_size", 2], (1,), 1), (["--tp_size", 4], (2,), 2), (ALL, (2, "--generator_tp_size", 2), 1)], ids=str)
def test_each_byte_of_weights_travels_once(models, trainers, generators, copies):
    """To each generator that needs it; tp ranks of a generator have a copy each of what is not divided. A message is
    no larger than a tensor."""
    result, found = play(models, "tied", *trainers, "--generators", *generators)
    weights = assemble(found.ranks, "initial")
    weights.pop("final_proj.weight", None)  # tied
    first, tp_size = len(found.ranks), generators[-1] if len(generators) > 1 else 1
    sent = [event.num_bytes for event in result.world.events
            if event.kind == "send" and event.rank < first <= event.peer]
    expected = sum(each.nbytes * (tp_size if each.dim() == 1 else 1) for each in weights.values())
    assert sum(sent) == (NUM_STEPS - 1) * copies * expected
    assert max(sent) <= max(each.nbytes for each in weights.values())


def test_the_plan_says_what_is_sent(models):
    result, found = play(models, "plain", *ALL, "--generators", 2)
    modules = result.modules[0]
    plan = modules.rollouts.plan_transfers(modules.utils.load_config(
        str(models / "model_plain"), num_hidden_layers=4, num_attention_heads=None, num_key_value_heads=None))
    text = modules.rollouts.describe(plan, torch.float64)
    sent = [event for event in result.world.events if event.kind == "send" and event.rank < 8 <= event.peer]
    assert sum(event.num_bytes for event in sent) == (NUM_STEPS - 1) * 8 * sum(each.numel for each in plan)
    links = {(event.rank, event.peer) for event in sent}
    assert f"over {len(links)} links" in text and all(f"{a} -> {b} " in text for a, b in links)


def test_noise_draws_as_softmax_does():
    rollouts = Program(19).load().rollouts
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    drawn = torch.stack([logits + rollouts.gumbel_noise(i, size=4) for i in range(4000)]).argmax(dim=1)
    assert drawn.bincount(minlength=4) / 4000 == pytest.approx(logits.softmax(0), abs=0.025)


def test_reward_is_a_function_of_the_text():
    reward = Program(19).load().dataloader.reward
    assert reward([" s"] * 4, [" state", "S", "is", " ", ""]) == 2 / 5
    assert reward([" s"] * 4, ["so", "st"]) == 1


@pytest.mark.parametrize("advantages", ["grpo", "dr_grpo"])
def test_loss_is_that_of_the_papers(world_of_one, advantages):
    """Token by token, in plain Python, where some ratios are clipped and some are not."""
    modules = Program(19).load()
    modules.process_group_manager.setup_process_group_manager(1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, SEQ_LEN, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(5, (6, SEQ_LEN), generator=generator)
    rewards, answer = [0.0, 0.5, 1.0, 0.25, 0.25, 0.25], range(modules.dataloader.PROMPT_TOKENS - 1, SEQ_LEN)
    log_p = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)[:, answer[0] :]
    log_q = log_p.detach() + 0.3 * torch.randn(log_p.shape, dtype=torch.float64, generator=generator)
    terms = []
    for i, row in enumerate(rewards):
        group = torch.tensor(rewards[i // 3 * 3 :][:3], dtype=torch.float64)
        advantage = row - group.mean()
        if advantages == "grpo":
            advantage = advantage / (group.var(correction=0).sqrt() + 1e-4)
        for t in range(len(answer)):
            ratio = (log_p[i, t] - log_q[i, t]).exp()
            terms.append(min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    expected = -sum(terms) / len(terms)
    rollouts = modules.rollouts.Rollouts.__new__(modules.rollouts.Rollouts)
    rollouts.args = type("Args", (), {"group_size": 3, "advantages": advantages})
    rollouts.rewards, rollouts.mismatch = [], torch.zeros((), dtype=torch.float64)
    batch = {"target_ids": targets, "numbers": torch.cat([log_q, torch.tensor(rewards).double().unsqueeze(1)], 1)}
    found = rollouts.loss(logits, batch, 5)
    assert found.item() == pytest.approx(expected.item(), abs=1e-14)
    ours, theirs = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (found, expected))
    assert (ours - theirs).abs().max() < 1e-14
    assert rollouts.mismatch.item() == pytest.approx((log_p - log_q).abs().max().item())


def test_reward_rises(models):
    """A narrow model, on a short run: from chance to more than half of the maximum."""
    program = Program(19, ["--model_name", models / "model_plain", "--generators", 1, "--num_hidden_layers", 2,
                           "--dtype", "float32", "--learning_rate", 1e-2, "--micro_batch_size", 32, "--seq_len", 5,
                           "--gradient_accumulation_steps", 1, "--max_tokens", 60 * 32 * 8 * 5])
    rows = run(program, threads(2)).rows
    assert rows[0]["reward"] < 0.1 and rows[-1]["reward"] > 0.5


def test_processes(tmp_path):
    """Over gloo, in bfloat16: rounding differs between the trainers' two ranks and a generator's one."""
    flags = ["--num_hidden_layers", 2, "--gradient_accumulation_steps", 2, "--micro_batch_size", 2, "--max_tokens", 768,
             "--dtype", "bfloat16", "--tp_size", 2, "--generators", 1, "--lag", 0, "--log_dir", tmp_path]
    done = fork(19, 3, *flags)
    rows = metrics(tmp_path, "default_run")
    assert len(rows) == 3 and all(1e-6 < row["log_ratio"] < 0.5 and 0 <= row["reward"] < 0.3 for row in rows)
    sent, links, parts = re.search(r"weights for generators: (\S+) a step in \d+ messages over (\d+) links: (.*)",
                                   done.stdout).groups()
    assert sent.endswith("MB") and links == "2" and parts.count("->") == 2


@pytest.mark.slow(drawn=1)
@pytest.mark.parametrize("lost, lag", [(0, 0), (1, 1), (2, 0)])
def test_a_lost_rank_ends_all(tmp_path, lost, lag):
    """Two trainers and a generator under torchrun: whichever dies is named, none waits, and the others say nothing."""
    (script := tmp_path / "lost.py").write_text(f"""import os, signal, sys
sys.path.insert(0, {str(STEPS["19"])!r})
import rollouts, train
if os.environ["RANK"] == "{lost}":
    rollouts.transfer_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with train.one_clear_error():
    train.main()
""")
    flags = ["--dp_size", 2, "--generators", 1, "--lag", lag, "--num_hidden_layers", 2, "--log_dir", tmp_path]
    done = launch(19, 3, *flags, script=script, check=False, timeout=100)
    assert done.returncode == 1 and "[rank" not in done.stderr, done.stderr  # as their tracebacks begin
    assert re.search(rf"rank +: {lost} .*\n +exitcode +: -9", done.stderr), done.stderr
