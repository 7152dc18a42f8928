"""plan.py --measure: what it writes of machines and links, and that the planner reads it."""

import json

from launch import fork, modules_of


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
