"""Pipelines that differ in their tensor-parallel size: gradients of one process, in float64, and what is refused."""

import json
import random

import pytest
import torch
from checkpoint_runs import SCRIPT, flags_of, write_corpus, write_model
from launch import MODELS, ROOT, fork, metrics, modules_of, start_fork

with modules_of(9):
    from training.unlike_tp import refine

HEADS = dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=12, head_dim=4)  # 2, 3 and 4 divide them
CASES = {  # ranks, --tp_size, --pipelines, micro-batches
    "2;1": (5, "2;1", "1,3;4", "3,2"), "2;3": (5, "2;3", "4;4", "2,3"), "4;2": (6, "4;2", "4;4", "4,1"),
    "1;2;3": (6, "1;2;3", "4;4;4", "2,2,1"), "1;2 of two stages": (5, "1;2", "4;2,2", "1,4")}


def test_parts_of_a_split_parameter():
    """The example of the module; at random, each stage holds each row in one part."""
    assert [*refine([[(0, 4), (1, 4), (2, 4)], [(3, 6), (4, 6)]])] == [
        ({0: 0, 3: 0}, 4), ({1: 0, 3: 4}, 2), ({1: 2, 4: 0}, 2), ({2: 0, 4: 2}, 4)]
    assert [*refine([[(0, 0), (1, 0)], [(2, 0)]])] == [({0: 0, 1: 0, 2: 0}, 0)], "whole everywhere"
    assert [*refine([[(0, 3), (1, 2)], [(2, 0)]])] == [({0: 0, 2: 0}, 3), ({1: 0, 2: 3}, 2)], "whole on one rank"
    rng = random.Random(0)
    for _ in range(200):
        total, stages, rank = rng.randint(1, 30), [], 0
        for _ in range(rng.randint(1, 4)):
            sizes = [len(part) for part in torch.arange(total).tensor_split(rng.randint(1, min(total, 5)))]
            stages.append([(rank := rank + 1, size) for size in sizes])
        seen = {rank: [] for stage in stages for rank, _ in stage}
        for firsts, rows in refine(stages):
            assert rows > 0 and all(sum(rank in firsts for rank, _ in stage) == 1 for stage in stages)
            for rank, first in firsts.items():
                seen[rank] += range(first, first + rows)
        assert all(seen[rank] == [*range(size)] for stage in stages for rank, size in stage)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, selected):
    """The folder of all runs, of five micro-batches a step, in which gradients are clipped."""
    folder = tmp_path_factory.mktemp("unlike_tp")
    models = {tied: write_model(folder / f"model_{tied}", tie_word_embeddings=tied, **HEADS) for tied in (True, False)}
    write_corpus(folder)
    jobs = []
    for name in ("one", *selected("case")):
        ranks, tp_size, pipelines, counts = CASES.get(name, (1, "1", "4", "5"))
        for tied, model in models.items():
            flags = flags_of(folder, f"{name} {tied}", model, max_steps=3, save_every=3, warmup_steps=0,
                             max_grad_norm=0.1)
            jobs.append(start_fork(9, ranks, folder / f"{name} {tied}", SCRIPT, *flags, "--tp_size", tp_size,
                                   "--pipelines", pipelines, "--num_microbatches", counts,
                                   script=ROOT / "tests" / "support" / "checkpoint_runs.py"))
    for job in jobs:
        job.result()
    return folder


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", [case if case in ("2;1", "2;3") else pytest.param(case, marks=pytest.mark.slow)
                                  for case in CASES])
def test_gradients_equal_one_process(runs, case, tied):
    """Of the last of three steps, as clipped; weights; and what several ranks hold has the same bits on all of them."""
    expected, found = (metrics(runs / "runs", f"{name} {tied}") for name in ("one", case))
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=1e-11), key
    assert min(row["grad_norm"] for row in found) > 0.1, "all are clipped"
    ranks, tp_sizes, pipelines, _ = CASES[case]
    stages = [int(tp) for tp, sizes in zip(tp_sizes.split(";"), pipelines.split(";")) for _ in sizes.split(",")]
    places = [(tp, tp_rank) for tp in stages for tp_rank in range(tp)]
    assert len(places) == ranks
    for kind in "grads", "rank":
        whole = torch.load(runs / f"one {tied}" / f"{kind}0.pt")
        copies: dict = {}
        for rank, (tp, tp_rank) in enumerate(places):
            for name, part in torch.load(runs / f"{case} {tied}" / f"{kind}{rank}.pt").items():
                key = "embedding.weight" if tied and name == "final_proj.weight" else name
                full = whole[key]
                dim = next((d for d in range(full.dim()) if full.size(d) != part.size(d)), None)
                full = full if dim is None else full.tensor_split(tp, dim)[tp_rank]
                assert (full - part).abs().max() <= 1e-11, (kind, rank, name)
                first = copies.setdefault((key, dim, dim is not None and (tp, tp_rank)), part)
                assert torch.equal(part, first), (kind, rank, name)


FAMILIES = {"2;1": ["gpt2-tied", "qwen3"], "1;2": ["gpt2", "mixtral", "opt-projected"],
            "4;2": ["gpt2-frozen", "gpt-neox", "opt-tied"]}


@pytest.mark.parametrize("tp_size", ["2;1", pytest.param("1;2", marks=pytest.mark.slow),
                                     pytest.param("4;2", marks=pytest.mark.slow)])
def test_families_equal_the_plain_model(tmp_path, tp_size):
    """Pipelines of two stages and of one; GPT-2's queries, keys and values lie in one matrix."""
    script, (first, second) = ROOT / "tests" / "support" / "families_in_pipelines.py", map(int, tp_size.split(";"))
    fork(9, 2 * first + second, tmp_path, tp_size, *FAMILIES[tp_size], script=script, modules=MODELS)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(results) == 2 * first + second
    off = {f"{case}, {what}": worst for result in results for case, all_worst in result.items()
           for what, worst in zip(("loss", "gradient", "norm"), all_worst, strict=True) if not worst <= 1e-9}
    assert not off, off


@pytest.mark.parametrize("ranks, flags, message", [
    (4, ["--tp_size", "3;1"], "num_attention_heads=4 cannot be split over tp_size=3: use a tp_size that divides 4"),
    (3, ["--tp_size", "2;1", "--pipelines", "4;4;4"], "--tp_size 2;1 for 3 pipelines: give one number for all, or one"),
    (3, ["--tp_size", "2;1", "--pipelines", "4;4|4"], "--tp_size 2;1 for 2 pipelines: give one number for all, or one"),
    (2, ["--tp_size", "2;1"], "pipelines of [1, 1] stages on [2, 1] tensor-parallel ranks each need 3 processes"),
    (2, ["--tp_size", "2", "--local_steps", "2"], "--tp_size 2 with --local_steps: ranks that take local steps hold"),
    (3, ["--tp_size", "2;1", "--lora_rank", "2"], "--tp_size 2;1 with --lora_rank: adapters are not split over"),
    (1, ["--tp_size", "2;0"], "--tp_size: "), (1, ["--tp_size", ";"], "--tp_size: ")])
def test_bad_input(tmp_path, ranks, flags, message):
    model = write_model(tmp_path / "model")
    write_corpus(tmp_path)
    done = fork(9, ranks, *flags_of(tmp_path, "run", model, max_steps=None if "--local_steps" in flags else 2,
                                    save_every=None), *flags, script=SCRIPT, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
