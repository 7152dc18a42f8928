"""train.py --plan: the plan's machines in the plan's order train what one process trains; plans that fit nothing."""

import json

import pytest

from launch import fork, losses, modules_of

MODEL = ["--num_hidden_layers", 4, "--seq_len", 32, "--max_tokens", 1536]  # 4 steps of 12 samples
TOLERANCE = 1e-11


def write_plan(path, *pipelines, **changes):
    """A plan of (machines, layers, num_microbatches) each, for MODEL in micro-batches of 2 samples."""
    fields = [dict(zip(("machines", "layers", "num_microbatches"), pipeline)) for pipeline in pipelines]
    plan = {"model_name": "tiny", "seq_len": 32, "global_batch": 12, "micro_batch_size": 2, "pipelines": fields}
    path.write_text(json.dumps({**plan, **changes}))
    return path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    fork(9, 1, *MODEL, "--micro_batch_size", 2, "--gradient_accumulation_steps", 6, "--dtype", "float64", "--log_dir",
         folder)
    return losses(folder)


@pytest.mark.parametrize("pipelines, printed", [
    ([([3], [4], 4), ([2, 0], [1, 3], 2)], "ranks in the plan's order: [3, 2, 0], idle: [1]"),
    ([([1, 2, 3], [2, 1, 1], 6)], "ranks in the plan's order: [1, 2, 3], idle: [0]"),
    ([([0, 1], [3, 1], 5), ([2, 3], [2, 2], 1)], "4 ranks = 2 pipelines of 2 + 2 stages"),
])
def test_the_plans_order_of_machines(tmp_path, one_process, pipelines, printed):
    plan = write_plan(tmp_path / "plan.json", *pipelines)
    done = fork(9, 4, *MODEL, "--plan", plan, "--dtype", "float64", "--log_dir", tmp_path)
    assert printed in done.stdout
    found = losses(tmp_path)
    assert len(found) == 4 and max(abs(a - b) for a, b in zip(one_process, found)) <= TOLERANCE
    config = json.loads((tmp_path / "default_run" / "config.json").read_text())
    assert config["num_microbatches"] == ",".join(str(count) for _, _, count in pipelines)


def test_measure_plan_and_train_at_once(tmp_path):
    """--plan auto on three ranks: whatever is planned, a step takes the samples that the flags say."""
    flags = ["--micro_batch_size", 3, "--gradient_accumulation_steps", 5, "--max_tokens", 960, "--log_dir", tmp_path]
    fork(9, 3, *MODEL, *flags, "--plan", "auto", "--wire_dtype", "int8")
    rows = (tmp_path / "default_run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["trained_tokens"] for row in rows] == [480, 960]


def test_what_measuring_writes(tmp_path):
    """The planner reads it, layers are alike, times are positive, the parameters are those of the model."""
    path = tmp_path / "cluster.json"
    with modules_of(9):
        import plan

        done = fork(9, 2, "--measure", path, "--num_hidden_layers", 10, "--seq_len", 32, "--micro_batch_size", "1,2",
                    script=plan.__file__)
        from planning.machines import load_cluster
        from planning.planner import find_plans

        assert "rank 1 on" in done.stdout and "Mbit/s" in done.stdout
        cluster, data = load_cluster(path), json.loads(path.read_text())
        assert cluster.num_layers == 10 and cluster.sizes == [1, 2]  # of which eight layers were timed
        assert sum(module["parameters"] for module in data["modules"]) == 10 * 184_576 + 2 * 1024 * 128 + 128
        assert data["hidden_bytes"] == 32 * 128 * 4
        for machine in data["machines"]:
            for kind in ("forward", "backward"):
                assert all(0 < seconds < 1 for size in "12" for seconds in machine[kind][size])
            assert machine["free_memory"] > 1e7 and 0 < machine["optimizer_seconds"] < 1e-6
        assert all((link is None) == (i == j) for i, row in enumerate(data["links"]) for j, link in enumerate(row))
        assert find_plans(cluster, 8, plan.Setting()).best


@pytest.mark.parametrize("pipelines, changes, flags, expected", [
    ([([0, 5], [2, 2], 6)], {}, [], "the plan is for the ranks [0, 5], each once, but 2 run"),
    ([([0], [4], 3), ([0], [4], 3)], {}, [], "the plan is for the ranks [0, 0], each once"),
    ([([0, 1], [2, 3], 6)], {}, [], "the model has 4: make a plan for this model"),
    ([([0, 1], [2, 2], 6)], {"seq_len": 64}, [], "the plan is for --seq_len 64, not 32"),
    ([([0, 1], [2, 2], 6)], {}, ["--pp_size", 2], "leave out --pipelines"),
    (None, {}, [], "can't be read"),
])
def test_plans_that_do_not_fit(tmp_path, pipelines, changes, flags, expected):
    path = tmp_path / "plan.json"
    if pipelines:
        write_plan(path, *pipelines, **changes)
    done = fork(9, 2, *MODEL, "--plan", path, *flags, "--log_dir", tmp_path / "runs", check=False, timeout=30)
    assert done.returncode > 0 and done.stderr.count("error: ") == 1 and expected in done.stderr, done.stderr
