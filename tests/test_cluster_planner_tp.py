"""Plans with tensor parallelism: hosts of unlike numbers of ranks, on made-up machines and on measured ones."""

import json

import pytest

from clusters import made_up_cluster
from launch import modules_of

with modules_of(9):
    from planning.machines import Candidate, Cluster, Pipeline, Setting
    from planning.report import as_plan, make_plan, report
    from planning.search import Search, find_plans
    from planning.simulate import peak_memory, simulate
    from planning.units import find_tensor_parallel_plans, of_ranks, of_units, with_parts
    from training.plan_file import read_plan


def test_measuring_tp_groups(run_code, tmp_path):
    """Two ranks of a host are timed as a tp group: halves of all but the norms, with at least the sums' time. One
    head, which two ranks can't share, is no error."""
    path = tmp_path / "cluster.json"
    flags = ["--measure", path, "--measure_seconds", 4, "--seq_len", 32, "--micro_batch_size", "1,2"]
    run_code("cluster", 2, "", *flags, then="plan.py")
    data = json.loads(path.read_text())
    (part,), plain = data["tensor_parallel"].values(), data["modules"]
    norms = [0, *[2 * 128] * 8, 128]
    assert data["tensor_parallel"].keys() == {"2"}
    for module, whole, norm in zip(part["modules"], plain, norms, strict=True):
        assert module["name"] == whole["name"]
        assert module["parameters"] - norm == (whole["parameters"] - norm) / 2
        assert not norm or module["saved_bytes"] < whole["saved_bytes"]
    cluster = with_parts(Cluster(data))
    unit = of_units(cluster, [(0, 1)]).machines[0]
    assert unit.tp_size == 2 and 1 in unit.passed["R"] and unit.passed["F"][1][-1] > 0
    assert unit.free_memory == min(machine.free_memory for machine in cluster.machines)
    for more, message in ([["--num_attention_heads", 1, "--num_key_value_heads", 1], "no plans with tp_size 2: num_att"],
                          [["--tp_size", 1], ""]):
        done = run_code("cluster", 2, "", *flags, *more, then="plan.py")
        assert message in done.stdout and json.loads(path.read_text())["tensor_parallel"] == {}


def split_cluster(hosts: str, tp_sizes=(2, 4), efficiency=0.9, **options) -> dict:
    """cluster.json of one rank for each letter of `hosts`. A rank of a tp group takes 1 / (tp_size x efficiency) of the
    time, and holds 1 / tp_size of each module."""
    data = made_up_cluster([1] * len(hosts), **options)
    data["hosts"] = list(hosts)

    def part(tp_size: int) -> dict:
        modules = [{**module, "parameters": module["parameters"] // tp_size,
                    "saved_bytes": module["saved_bytes"] / tp_size} for module in data["modules"]]
        faster = [{**machine, **{kind: {size: [t / tp_size / efficiency for t in seconds]
                                        for size, seconds in machine[kind].items()} for kind in ("forward", "backward")}}
                  for machine in data["machines"]]
        return {"modules": modules, "machines": faster}

    return {**data, "tensor_parallel": {str(tp_size): part(tp_size) for tp_size in tp_sizes}}


def planned(data: dict, global_batch: int = 12, **arguments) -> list[tuple]:
    plans = find_tensor_parallel_plans(Cluster(data), global_batch, Setting(), **arguments)
    return sorted((p.tp_size, p.machines, p.layers, p.num_microbatches) for p in plans.best[0].candidate.pipelines)


def network(hosts: str, near: float, far: float) -> list[list[float]]:
    return [[near if a == b else far for b in hosts] for a in hosts]


def test_a_host_of_four_beside_one_of_two():
    """Memory for a quarter of the model on each rank of one host, and for half on those of the other; the network is
    too slow for hidden states. So each host is one stage, and takes as many micro-batches as it has ranks."""
    options = {"parameters": 4000, "saved_bytes": 100.0, "bandwidth": network("aaaabb", 1e12, 3e7),
               "hidden_bytes": 262144.0, "memory": [2e5] * 4 + [4e5] * 2}
    assert planned(split_cluster("aaaabb", **options)) == [(2, (4, 5), (8,), 4), (4, (0, 1, 2, 3), (8,), 8)]
    cluster = Cluster(split_cluster("aaaabb", **options))
    plans = find_tensor_parallel_plans(cluster, 12, Setting())
    text, written = report(cluster, plans, 1), as_plan(cluster, plans.best[0], plans.setting)
    assert '--pipelines "8;8" --num_microbatches "' in text and "without tensor parallelism: not possible, not" in text
    sizes = {tuple(p["machines"]): p["tp_size"] for p in written["pipelines"]}
    assert sizes == {(0, 1, 2, 3): 4, (4, 5): 2}
    assert f'--tp_size "{written["pipelines"][0]["tp_size"]};{written["pipelines"][1]["tp_size"]}"' in text
    assert set(written["predicted"]["peak_memory"]) == set("012345")
    assert make_plan(split_cluster("aaaabb", **options), 12, Setting()) == written


def test_what_a_plan_of_units_takes():
    """One stage: a micro-batch's layers at the unit's speed, the slowest of its ranks; gradients are not sent."""
    data = split_cluster("aa", efficiency=1.0)
    for kind in "forward", "backward":
        data["tensor_parallel"]["2"]["machines"][1][kind]["1"] = [
            1.5 * t for t in data["tensor_parallel"]["2"]["machines"][1][kind]["1"]]
    units = of_units(with_parts(Cluster(data)), [(0, 1)])
    candidate = Candidate((Pipeline((0,), (8,), 5),), 1)
    assert simulate(units, candidate, Setting()).step_seconds == pytest.approx(5 * 8 * 3e-3 / 2 * 1.5)
    whole = peak_memory(Cluster(data), candidate.pipelines[0], 1, Setting())[0]
    assert peak_memory(units, candidate.pipelines[0], 1, Setting())[0] == pytest.approx(whole / 2)


def test_what_travels_between_units():
    """A stage sends as many copies of its hidden states as it has ranks over the one link between two hosts, and over
    links of their own within a host. Each number's gradient goes there once."""
    def seconds(units, kind, *pipelines):
        data = split_cluster("aaaabbbb", bandwidth=1e6)
        cluster = of_units(with_parts(Cluster(data)), units)
        transfers = simulate(cluster, Candidate(pipelines, 1), Setting()).transfers
        return sum(t.end - t.start for t in transfers if t.kind == kind)

    two_stages = Pipeline((0, 1), (4, 4), 1)
    assert seconds([(0,), (4,)], "F", two_stages) == pytest.approx(4096 / 1e6)
    assert seconds([(0, 1), (4, 5)], "F", two_stages) == pytest.approx(2 * 4096 / 1e6)
    assert seconds([(0, 1), (2, 3)], "F", two_stages) == pytest.approx(4096 / 1e6)
    replicas = [Pipeline((k,), (8,), 1) for k in range(2)]
    for units in [(0,), (4,)], [(0, 1), (4, 5)], [(0, 1, 2, 3), (4, 5)]:
        assert seconds(units, "all-reduce", *replicas) == pytest.approx(10 * 1000 * 4 / 1e6), units
    assert seconds([(0, 1), (2, 3)], "all-reduce", *replicas) == pytest.approx(10 * 1000 * 4 / 2e6)


def test_stages_of_a_pipeline_have_one_size(monkeypatch):
    """Whatever the search looks at."""
    seen = []
    score = Search.score
    monkeypatch.setattr(Search, "score", lambda self, candidate: seen.append(
        [{self.cluster.machines[unit].tp_size for unit in p.machines} for p in candidate.pipelines]) or score(
            self, candidate))
    data = split_cluster("aaaabbc", bandwidth=network("aaaabbc", 1e12, 1e8), memory=5e4, saved_bytes=100.0)
    assert sum(len(layers) > 0 for *_, layers, _ in planned(data)) > 0
    assert {2} in sum(seen, []) and all(len(sizes) == 1 for sizes in sum(seen, []))


def test_sizes_that_were_not_measured():
    """The heads allow two ranks only, so the host of four is two units."""
    options = {"parameters": 4000, "saved_bytes": 100.0, "bandwidth": network("aaaabb", 1e12, 3e7), "memory": 4e5,
               "hidden_bytes": 262144.0}
    assert [size for size, *_ in planned(split_cluster("aaaabb", tp_sizes=(2,), **options))] == [2, 2, 2]


@pytest.mark.parametrize("data", [made_up_cluster([4, 2, 1], bandwidth=1e9), split_cluster("abc", bandwidth=1e6),
                                  split_cluster("aabb", efficiency=0.8, bandwidth=1e9)],
                         ids=["not measured", "single ranks", "slower"])
def test_where_it_brings_nothing(data):
    """Exactly the plans of a planner that does not know of it."""
    cluster = Cluster(data)
    found, expected = find_tensor_parallel_plans(cluster, 12, Setting()), find_plans(cluster, 12, Setting())
    assert found == expected and all(p["tp_size"] == 1 for p in as_plan(cluster, found.best[0], Setting())["pipelines"])


def test_what_is_worth_it():
    """A step of one micro-batch is shorter with tensor parallelism alone, and has to be by 1 %."""
    assert [size for size, *_ in planned(split_cluster("aa", efficiency=0.5025), 1)] == [1]
    assert [size for size, *_ in planned(split_cluster("aa", efficiency=0.51), 1)] == [2]


def test_nothing_fits():
    with pytest.raises(ValueError, match="not enough memory for any plan"):
        planned(split_cluster("aabb", memory=1e3))


@pytest.mark.parametrize("parts", [[], {"x": {}}, {"1": {}}, {"2": []}, {"2": {"modules": []}}])
def test_a_broken_cluster_json(parts):
    with pytest.raises(ValueError, match="cluster.json.*: measure again"):
        find_tensor_parallel_plans(Cluster({**made_up_cluster([1, 1]), "tensor_parallel": parts}), 4, Setting())


def test_a_plan_whose_machines_do_not_match(tmp_path):
    options = {"parameters": 4000, "saved_bytes": 100.0, "memory": 4e5, "bandwidth": network("aabb", 1e12, 3e7),
               "hidden_bytes": 262144.0}
    plan = make_plan(split_cluster("aabb", **options), 12, Setting())
    path = tmp_path / "plan.json"

    def read(**changes) -> dict:
        path.write_text(json.dumps({**plan, "pipelines": [{**plan["pipelines"][0], **changes}, plan["pipelines"][1]]}))
        return read_plan(str(path))

    assert [p["tp_size"] for p in plan["pipelines"]] == [2, 2] and read() == plan
    own = plan["pipelines"][0]["machines"]
    for changes in {"tp_size": 1}, {"layers": [4, 4]}, {"machines": own[:1]}, {"machines": own[:1], "tp_size": 1,
                                                                              "layers": [4, 4]}:
        assert "machines" in read(**changes)["error"], changes
    for tp_size in 0, -2, "2", 2.0, None:
        assert "positive numbers" in read(tp_size=tp_size)["error"]
    other = plan["pipelines"][1]["machines"]
    path.write_text(json.dumps({**plan, "pipelines": [{**p, "machines": [a, b]} for p, a, b in zip(
        plan["pipelines"], own, other)]}))
    assert "tp_size of them, on one host" in read_plan(str(path))["error"]
