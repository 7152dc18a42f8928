"""train_distributed.py --plan: in the plan's order of machines it trains what one process trains; bad plans."""

import json
import re
import socket

import pytest
from lab.launch import ROOT, fork, losses, modules_of, start_fork
from support.clusters import with_odd_values

with modules_of(9):
    from planning import plan_file
    from ranks.files import read_json
    from ranks.placement import host_names

SCRIPT = ROOT / "cluster" / "train_distributed.py"
CONFIG = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
FACTS = {name: CONFIG[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")}
MODEL = ["--num_hidden_layers", 4, "--seq_len", 32, "--max_steps", 4]
TOLERANCE = 1e-11


def write_plan(path, *pipelines, num_hosts=2, **changes):
    """A plan of (machines, layers, num_microbatches) for MODEL in micro-batches of 2 samples."""
    fields = [dict(zip(("machines", "layers", "num_microbatches"), pipeline)) for pipeline in pipelines]
    plan = {"model": {**FACTS, "num_hidden_layers": 4}, "dtype": "float32", "schedule": "1f1b", "seq_len": 32,
            "hosts": [socket.gethostname()] * num_hosts, "global_batch": 12, "micro_batch_size": 2, "pipelines": fields}
    path.write_text(json.dumps({**plan, **changes}))
    return path


def test_what_else_a_plan_decides(tmp_path):
    """Messages in fewer bytes and recomputation: the run says so, and its losses are near those without, not equal."""
    pipelines = ([0, 1], [2, 2], 4), ([2], [4], 2)
    found, futures = {}, {}
    for name, changes in {"exact": {}, "rounded": dict(wire_dtype="bfloat16", gradient_wire_dtype="int8",
                                                       recompute=True)}.items():
        plan = write_plan(tmp_path / f"{name}.json", *pipelines, num_hosts=3, **changes)
        words = ["--dtype", "float32", "--log_dir", tmp_path, "--checkpoint_dir", tmp_path / "checkpoints"]
        futures[name] = changes, start_fork(9, 3, *MODEL, *words, "--run_name", name, "--plan", plan, script=SCRIPT)
    for name, (changes, future) in futures.items():
        future.result()
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert {key: config[key] for key in changes} == changes
        found[name] = losses(tmp_path, name)
    assert 1e-6 < max(abs(a - b) for a, b in zip(*found.values())) < 0.03


HERE = socket.gethostname()
HALVES = ([0, 1], [2, 2], 6)


@pytest.mark.parametrize("pipelines, changes, flags, expected", [
    ([([0, 1], [2, 3], 6)], {}, [], "stages of 2,3 decoder layers have 5 together, but the model has 4"),
    ([HALVES], {"seq_len": 64, "lora_rank": 4}, [], "the plan is for seq_len 64 (here 32), lora_rank 4 (here None)"),
    ([HALVES], {"hosts": ["pi", HERE]}, [], f"the plan is for processes on pi, {HERE}, but they run on {HERE}, {HERE}"),
    ([HALVES], {}, ["--batch_size", 4, "--pipelines", "2,2", "--pp_engine", "1f1b"], "leave out --pipelines"),
    (None, {}, [], "can't be read"),
])
def test_plans_that_do_not_fit(tmp_path, pipelines, changes, flags, expected):
    path = tmp_path / "plan.json"
    if pipelines is not None:
        write_plan(path, *pipelines, **changes)
    done = fork(9, 2, *MODEL, "--plan", path, *flags, "--log_dir", tmp_path / "runs",
                "--checkpoint_dir", tmp_path / "checkpoints", script=SCRIPT, check=False)
    assert done.returncode > 0 and done.stderr.count("error: ") == 1 and expected in done.stderr, done.stderr


@pytest.mark.parametrize("pipelines, changes, expected", [
    ([([0, 5], [2, 2], 6)], {}, "machines [0, 5] of 2 hosts, each once"),
    ([([0], [4], 3), ([0], [4], 3)], {}, "machines [0, 0] of 2 hosts"),
    ([([0, 1], [4], 6)], {}, "machines [0, 1] of 2 hosts, each once, with its layers"),
    ([], {"schedule": "1f1b"}, "machines [] of 2 hosts"),
    ([HALVES], {"schedule": "1f1b-5"}, "schedule '1f1b-5' is none of afab, 1f1b, 1f1b-2"),
])
def test_plans_that_make_no_sense(tmp_path, pipelines, changes, expected):
    plan = json.loads(write_plan(tmp_path / "plan.json", *pipelines, **changes).read_text())
    with pytest.raises(ValueError, match=re.escape(expected)):
        plan_file.checked_plan(plan)


def test_a_plan_with_a_byte_order_mark(tmp_path):
    """Some editors put one first when a plan, or cluster.json, is changed by hand."""
    path = write_plan(tmp_path / "plan.json", ([0], [4], 6))
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    assert read_json(str(path), plan_file.checked_plan)["pipelines"][0]["layers"] == [4]


def test_an_odd_value_anywhere_in_a_plan(tmp_path):
    """It is taken, or one line says what is wrong."""
    path = write_plan(tmp_path / "plan.json", *[([0, 1], [2, 2], 6)])
    for where, _, odd, plan in with_odd_values(json.loads(path.read_text())):
        path.write_text(json.dumps(plan))
        try:
            plan_file.read_json(str(path), plan_file.checked_plan, "use cluster/plan.py")
        except plan_file.UserError as error:
            assert "\n" not in str(error), (where, odd)


def test_the_same_hosts_in_another_order():
    pipelines = [{"machines": [0, 2], "layers": [1, 3], "num_microbatches": 2}]
    moved = plan_file.in_order({"hosts": ["a", "b", "c"], "pipelines": pipelines}, ["c", "a", "b"])
    assert plan_file.machines_of(moved) == [1, 0] and moved["hosts"] == ["c", "a", "b"]


@pytest.mark.parametrize("here, known, names", [
    ([("a", "10.0.0.1"), ("a", "10.0.0.1"), ("b", "10.0.0.2")], [], ["a", "a", "b"]),
    ([("pi", "10.0.0.1"), ("pi", "10.0.0.2"), ("b", "10.0.0.3")], [], ["10.0.0.1", "10.0.0.2", "b"]),
    ([("pi", "10.0.0.2"), ("b", "10.0.0.3")], ["10.0.0.1", "10.0.0.2", "b"], ["10.0.0.2", "b"]),  # one clone is lost
])
def test_what_hosts_are_called(here, known, names):
    assert host_names(here, known) == names
