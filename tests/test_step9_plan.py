"""train.py --plan: the plan's machines in the plan's order train what one process trains; plans that fit nothing."""

import json

import pytest

from launch import fork, losses, start_fork

MODEL = ["--num_hidden_layers", 4, "--seq_len", 32, "--max_tokens", 1536]  # 4 steps of 12 samples
TOLERANCE = 1e-11


def write_plan(path, *pipelines, **changes):
    """A plan of (machines, layers, num_microbatches) each, for MODEL in micro-batches of 2 samples."""
    fields = [dict(zip(("machines", "layers", "num_microbatches"), pipeline)) for pipeline in pipelines]
    plan = {"model_name": "tiny", "seq_len": 32, "global_batch": 12, "micro_batch_size": 2, "pipelines": fields}
    path.write_text(json.dumps({**plan, **changes}))
    return path


ORDERS = {  # name -> the plan's pipelines, what train.py prints of them
    "unlike": ([([3], [4], 4), ([2, 0], [1, 3], 2)], "pipeline 1: stage 0 on [1], stage 1 on [2]"),
    "one": ([([1, 2, 3], [2, 1, 1], 6)], "pipeline 0: stage 0 on [0], stage 1 on [1], stage 2 on [2]"),
    "like": ([([0, 1], [3, 1], 5), ([2, 3], [2, 2], 1)], "pipeline 1: stage 0 on [2], stage 1 on [3]"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, selected):
    """The folder of all runs, and name -> the future of its run; "one_process" is one without a plan."""
    folder = tmp_path_factory.mktemp("plans")
    common = [*MODEL, "--dtype", "float64", "--log_dir", folder, "--run_name"]
    flags = ["--micro_batch_size", 2, "--gradient_accumulation_steps", 6]
    futures = {"one_process": start_fork(9, 1, *common, "one_process", *flags)}
    for name in selected("name"):
        plan = write_plan(folder / f"{name}.json", *ORDERS[name][0])
        futures[name] = start_fork(9, 4, *common, name, "--plan", plan)
    return folder, futures


@pytest.mark.parametrize("name", ["unlike", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "like"))])
def test_the_plans_order_of_machines(name, runs):
    folder, futures = runs
    pipelines, printed = ORDERS[name]
    futures["one_process"].result()
    assert printed in futures[name].result().stdout
    expected, found = losses(folder, "one_process"), losses(folder, name)
    assert len(found) == 4 and max(abs(a - b) for a, b in zip(expected, found)) <= TOLERANCE
    config = json.loads((folder / name / "config.json").read_text())
    assert config["num_microbatches"] == [count for _, _, count in pipelines]
    assert config["topology"]["world_size"] == sum(len(machines) for machines, _, _ in pipelines)


@pytest.mark.parametrize("pipelines, changes, flags, expected", [
    ([([0, 5], [2, 2], 6)], {}, [], "the plan is for the ranks [0, 5], each once, but 2 run"),
    ([([0], [4], 3), ([0], [4], 3)], {}, [], "the plan is for the ranks [0, 0], each once"),
    ([([0, 1], [2, 3], 6)], {}, [], "the model has 4, and each machine needs a number: make a plan for it"),
    ([([0, 1], [2, 2], 6)], {"seq_len": 64}, [], "the plan is for --seq_len 64, not 32"),
    ([([0, 1], [2, 2], 6)], {}, ["--pp_size", 2, "--micro_batch_size", 8], "leave out --pp_size, --micro_batch_size"),
    (None, {}, [], "can't be read"),
])
def test_plans_that_do_not_fit(tmp_path, pipelines, changes, flags, expected):
    path = tmp_path / "plan.json"
    if pipelines:
        write_plan(path, *pipelines, **changes)
    done = fork(9, 2, *MODEL, "--plan", path, *flags, "--log_dir", tmp_path / "runs", check=False)
    assert done.returncode > 0 and done.stderr.count("error: ") == 1 and expected in done.stderr, done.stderr
