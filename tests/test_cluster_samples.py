"""Shares in samples: micro-batches of unlike sizes have the losses and gradients of one process, in float64."""

import argparse
import copy
import itertools
import json
import re
import socket

import pytest
import torch
from lab.launch import metrics, modules_of, start_fork
from support.checkpoint_runs import EXACT, SCRIPT, checkpoint, flags_of, write_answers, write_corpus, write_model
from support.clusters import MEASURED

with modules_of(9):
    import train_distributed
    from planning import plan_file
    from planning.machines import Setting
    from planning.shares import samples_by_speed
    from run import decide, layout

TOLERANCE = 1e-11
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
             head_dim=8)
ROWS = dict(dataset_name="answers.jsonl", validation_split=0.25, eval_every=2, seq_len=40)
LORA = dict(model_name="weights", lora_rank=4, learning_rate=0.01)
TWO = [([0], [4], 5), ([1], [4], 3)]  # machines, layers, samples
THREE = [([0], [4], 3), ([1, 2], [3, 1], 5)]
RUNS = {  # name -> the plan's pipelines, its changes, flags; None: one process with micro-batches of one sample
    "text": (None, {}, {}), "two": (TWO, {}, {}),
    "stages": (THREE, {"recompute": True}, dict(profile_batch=1)),
    "afab": (THREE, {"schedule": "afab", "micro_batch_size": 3}, {}),
    "rows": (None, {}, ROWS), "rows in stages": (THREE, {"micro_batch_size": 3}, ROWS),
    "adapters": (None, {}, {**ROWS, **LORA}), "adapters in stages": (THREE, {"lora_rank": 4}, {**ROWS, **LORA}),
}
EQUALS = {"two": "text", "stages": "text", "afab": "text", "rows in stages": "rows", "adapters in stages": "adapters"}

MADE = argparse.Namespace(model=argparse.Namespace(config=None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models without and with weights, text, and answers of 1 to 16 words."""
    folder = tmp_path_factory.mktemp("samples")
    write_model(folder / "model")
    torch.manual_seed(0)
    write_model(folder / "weights", "llama", "float64", vocab_size=1024, initializer_range=0.1, **SIZES)
    write_corpus(folder)
    write_answers(folder, 44)
    return folder


def write_plan(path, pipelines, **changes):
    """A plan in micro-batches of 2 samples for the models of these tests."""
    fields = [dict(zip(("machines", "layers", "samples"), pipeline)) for pipeline in pipelines]
    num_hosts = sum(len(machines) for machines, _, _ in pipelines)
    model = {"num_hidden_layers": 4, "hidden_size": 32}
    path.write_text(json.dumps({
        "model": model, "dtype": "float64", "schedule": "1f1b", "seq_len": 16, "global_batch": 8, "micro_batch_size": 2,
        "hosts": [socket.gethostname()] * num_hosts, "pipelines": fields, **changes}))
    return path


def start(folder, name: str, ranks: int, *more, **changes):
    flags = flags_of(folder, name, folder / changes.pop("model_name", "model"), **{
        "max_steps": 4, "save_every": 2, "learning_rate": 1e-3, "max_grad_norm": 0.1, **changes,
        "dataset_name": folder / changes.get("dataset_name", "corpus")})
    return start_fork(9, ranks, folder / f"out_{name}", SCRIPT, *flags, *more, modules=["peft"], script=EXACT)


@pytest.fixture(scope="module")
def runs(folder, selected):
    """name -> the future of its run."""
    jobs = {}
    for name in dict.fromkeys(each for name in selected("name") for each in (name, EQUALS[name])):
        pipelines, plan, flags = RUNS[name]
        if pipelines is None:
            jobs[name] = start(folder, name, 1, "--num_microbatches", 8, **flags)
        else:
            path = write_plan(folder / f"{name}.json", pipelines, seq_len=flags.get("seq_len", 16), **plan)
            jobs[name] = start(folder, name, sum(len(machines) for machines, _, _ in pipelines), "--plan", path,
                               batch_size=None, **flags)
    return jobs


def require_equal(folder, name: str, other: str) -> None:
    """The losses and norms of all steps, the losses on validation rows, and the gradients of the last step."""
    found, expected = (metrics(folder / "runs", each) for each in (name, other))
    assert len(found) == len(expected) > 2 and min(row["grad_norm"] for row in expected) > 0.15, "all are clipped"
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=TOLERANCE)
    paths = [folder / "runs" / each / "evaluation.jsonl" for each in (name, other)]
    if paths[1].exists():
        found, expected = ([json.loads(line)["evaluation_loss"] for line in path.open()] for path in paths)
        assert len(found) == 3 and found == pytest.approx(expected, rel=0, abs=TOLERANCE)
    whole = torch.load(folder / f"out_{other}" / "grads0.pt")
    parts = [torch.load(path) for path in sorted((folder / f"out_{name}").glob("grads*.pt"))]
    assert {key for part in parts for key in part} == whole.keys()
    assert all((part[key] - whole[key]).abs().max() <= TOLERANCE for part in parts for key in part)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "afab" else name
                                  for name in EQUALS])
def test_unlike_micro_batches_equal_one_process(runs, folder, name):
    runs[EQUALS[name]].result()
    printed = runs[name].result().stdout
    pipelines, plan, flags = RUNS[name]
    shares, size = [count for *_, count in pipelines], plan.get("micro_batch_size", 2)
    assert f"samples of a step, in micro-batches of up to {size}: {', '.join(map(str, shares))}\n" in printed
    require_equal(folder, name, EQUALS[name])
    config = json.loads((folder / "runs" / name / "config.json").read_text())
    assert config["samples"] == shares and config["num_microbatches"] == [[-(-share // size) for share in shares]]
    if "profile_batch" in flags:
        trace = json.loads((folder / "runs" / name / "timeline_batch1_all.json").read_text())
        computed = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event.get("cat") == "forward"]
        assert sorted(computed) == [(k, f"forward {i}") for k, count in enumerate((2, 3, 3)) for i in range(count)]


def test_from_two_ranks_onto_others(runs, folder):
    """Samples of a step that neither the ranks nor --batch_size divide."""
    runs["two"].result()
    for name, ranks, size, flags, printed in (
            ("onto tp", 2, 5, ["--tp_size", 2], "up to 5: 8"),
            ("onto stages", 3, 3, ["--pipelines", "4;1,3"], "up to 3: 4, 4")):
        done = start(folder, name, ranks, *flags, "--resume", checkpoint(folder, "two", 2), batch_size=size).result()
        assert f"samples of a step, in micro-batches of {printed}\n" in done.stdout
        found, expected = (metrics(folder / "runs", each) for each in (name, "text"))
        for key in "loss", "grad_norm":
            assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("total, size, seconds, expected", [
    (24, 4, [1, 2, 4], [14, 7, 3]), (84, 4, [1, 2, 4], [48, 24, 12]), (8, 2, [1, 1, 1], [3, 3, 2]),
    (96, 4, [1, 1.03, 0.98], [32, 32, 32]),  # one sample more for one of them would be a micro-batch more
    (96, 4, [1, 2, 4], [56, 28, 12]), (10, 8, [1, 1], [5, 5]), (13, 1, [1, 3], [10, 3])])
def test_samples_by_speed(total, size, seconds, expected):
    """No other shares end by more than 3 % earlier; where whole micro-batches do not end later either, they are."""
    shares = samples_by_speed(total, size, seconds)
    longest = max(share * each for share, each in zip(shares, seconds))
    others = [share for share in itertools.product(range(1, total), repeat=len(seconds) - 1) if sum(share) < total]
    best = min(max(share * each for share, each in zip([*other, total - sum(other)], seconds)) for other in others)
    assert shares == expected and sum(shares) == total and longest <= 1.03 * best


def test_a_routers_loss_needs_whole_micro_batches(world_of_one):
    """It is one of the tokens of a micro-batch, so with other micro-batches it would be another one."""
    assert samples_by_speed(24, 4, [1.0, 2.0, 4.0]) == [14, 7, 3]
    assert samples_by_speed(24, 4, [1.0, 2.0, 4.0], is_whole=True) == [16, 4, 4]
    args = train_distributed.make_parser().parse_args(["--dtype", "float32", "--device", "cpu"])
    with pytest.raises(ValueError, match="samples 5, 3 of a step are no whole micro-batches of 2, and the loss"):
        layout.Layout([], [5, 3], 2, Setting()).form(args, argparse.Namespace(output_router_logits=True))


def test_elastic_shares_of_told_micro_batches(monkeypatch):
    """On as many machines as numbers they are taken as they are; on others, the same samples are dealt."""
    monkeypatch.setattr(decide, "is_elastic", lambda: True)
    monkeypatch.setattr(decide.dist, "get_world_size", lambda: 3)
    args = argparse.Namespace(batch_size=4, equal_shares=True, local_steps=None, gradient_accumulation=8, tp_size=1)
    shares = {(count, total): decide.choose_shares(args, MADE, count, [4, 1], total, None, None)
              for count, total in ((2, None), (2, 20), (2, 18), (3, None), (3, 20))}
    assert shares == {(2, None): [16, 4], (2, 20): [16, 4], (2, 18): [9, 9], (3, None): [7, 7, 6], (3, 20): [7, 7, 6]}


def test_a_plan_for_those_that_are_left(tmp_path):
    """In an elastic run, of as many samples, though these are no whole micro-batches."""
    (tmp_path / "cluster.json").write_text(json.dumps({**MEASURED, "hosts": ["host0", "host1", "host2"]}))
    plan = {"global_batch": 9, "schedule": "1f1b", "micro_batch_size": 1}
    assert "samples" not in plan_file.plan_for(["host0"], plan, str(tmp_path / "cluster.json"))["pipelines"][0]
    for machine in (measured := {**copy.deepcopy(MEASURED), "hosts": ["host0", "host1", "host2"]})["machines"]:
        for kind in "forward", "backward":
            machine[kind] = {"2": machine[kind]["1"]}
    (tmp_path / "cluster.json").write_text(json.dumps(measured))
    made = plan_file.plan_for(["host0", "host2"], {**plan, "micro_batch_size": 2}, str(tmp_path / "cluster.json"))
    assert made["global_batch"] == sum(plan_file.samples_of(made)) == 9
    assert all(pipeline.keys() == {"machines", "layers", "samples"} for pipeline in made["pipelines"])


@pytest.mark.parametrize("change, expected", [
    ({"samples": 0}, "no positive numbers: [2, 16, 3, 0, "), ({"samples": 2.0}, "no positive numbers"),
    ({"num_microbatches": 3}, "each of its pipelines has to have either num_microbatches or samples"),
])
def test_bad_plans(tmp_path, change, expected):
    path = write_plan(tmp_path / "plan.json", THREE)
    plan = json.loads(path.read_text())
    assert plan_file.samples_of(plan_file.checked_plan(plan)) == [3, 5]
    plan["pipelines"][1].update(change)
    with pytest.raises(ValueError, match=re.escape(expected)):
        plan_file.checked_plan(plan)
