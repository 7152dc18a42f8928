"""The planner finds what trying everything finds, on machines of all kinds, and says why where it finds nothing."""

import copy
import itertools
import json
import subprocess
import sys

import pytest
from lab.launch import modules_of
from support.clusters import made_up_cluster, with_odd_values

with modules_of(9):
    import plan
    from planning.machines import Candidate, Cluster, Pipeline, Setting, load_cluster
    from planning.plan_file import as_plan, report
    from planning.search import find_plans
    from planning.simulate import peak_memory, simulate
    from utils import UserError


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as a sum of `parts` numbers from 1 on."""
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total))) for cut in cuts]


def everything(cluster: Cluster, global_batch: int, setting: Setting, memory: list[float]) -> float:
    """The shortest step of all candidates there are: every order of every subset, cut in every way."""
    best, n, runs = float("inf"), len(cluster.machines), {}
    rows = {row for used in range(1, n + 1) for row in itertools.permutations(range(n), used)}
    for row, size in itertools.product(rows, cluster.sizes):
        for number in range(1, len(row) + 1):
            for cut in compositions(len(row), number):
                ends = list(itertools.accumulate(cut, initial=0))
                groups = [row[a:b] for a, b in zip(ends, ends[1:])]
                if groups != sorted(groups):  # the order of the pipelines changes nothing
                    continue
                layers = [compositions(cluster.num_layers, len(group)) for group in groups]
                for shares in compositions(global_batch // size, number):
                    for split in itertools.product(*layers):
                        pipelines = tuple(map(Pipeline, groups, split, shares))
                        if all(peak <= memory[rank] for p in pipelines
                               for rank, peak in zip(p.machines, peak_memory(cluster, p, size, setting))):
                            result = simulate(cluster, Candidate(pipelines, size), setting, runs)
                            best = min(best, result.step_seconds)
    return best


def plans_for(options: dict, global_batch: int, **arguments):
    return find_plans(Cluster(made_up_cluster(**options)), global_batch, Setting(), **arguments)


SLOW_TO_2 = [[1e6, 1e6, 2e4], [1e6, 1e6, 2e4], [2e4, 2e4, 2e4]]


@pytest.mark.parametrize("options", [
    {"speeds": [4, 2, 1]},
    {"speeds": [4, 2, 1], "bandwidth": 1e6, "parameters": 3000, "ends": 2e-3},
    {"speeds": [1, 1, 1], "bandwidth": 1e6, "parameters": 30000, "latency": 1e-4},
    {"speeds": [3, 1, 2], "bandwidth": SLOW_TO_2, "tied": True, "overhead": 2e-4},
    {"speeds": [4, 4, 0.01], "bandwidth": 1e9},
    {"speeds": [1, 5, 3], "memory": [3e5, 8e4, 1.5e5], "bandwidth": 1e7},
    {"speeds": [2, 3, 2], "bandwidth": 4e6, "latency": 2e-3, "sizes": (1, 2), "optimizer_seconds": 1e-7},
    {"speeds": [1, 3.3, 2.7], "layers": 5, "bandwidth": 3.7e5, "parameters": 7669, "hidden_bytes": 65536.0,
     "tied": True, "memory": [1.35e6, 8.2e5, 1.25e6]},
    {"speeds": [1, 2.875, 4], "layers": 5, "bandwidth": 4.679e6, "parameters": 5392, "ends": 4e-3,
     "optimizer_seconds": 1e-7},
], ids=["fast links", "slow links", "gradients too large", "one slow link", "one idles", "little memory", "latency",
        "unlike memory", "unlike ends"])
def test_as_good_as_trying_everything(options):
    for setting in Setting("1f1b", recompute=options["speeds"][0] == 1), Setting("afab"):
        cluster = Cluster(made_up_cluster(**{"layers": 4, **options}))
        memory = [0.9 * machine.free_memory for machine in cluster.machines]
        best = everything(cluster, 6, setting, memory)
        if best == float("inf"):  # AFAB with little memory
            with pytest.raises(ValueError, match="not enough memory for any plan"):
                find_plans(cluster, 6, setting)
            continue
        plans = find_plans(cluster, 6, setting)
        assert best * (1 - 1e-9) <= plans.best[0].step_seconds <= 1.01 * best
        groupings = {frozenset(frozenset(p.machines) for p in found.candidate.pipelines) for found in plans.best}
        assert len(groupings) == len(plans.best)
        for found in plans.best:  # as simulated alone, and within memory
            assert simulate(cluster, found.candidate, setting).step_seconds == found.step_seconds
            assert all(peak <= memory[rank] for rank, peak in found.peak_memory.items())


def test_a_layer_moved_from_a_plan_by_speed_may_be_better():
    """While a message travels, the faster of two machines has time for a layer more."""
    cluster, setting = Cluster(made_up_cluster([1.2, 4.1], bandwidth=1e6, sizes=(1, 2))), Setting("1f1b-2")
    best = everything(cluster, 32, setting, [1e15] * 2)
    assert find_plans(cluster, 32, setting).best[0].step_seconds <= 1.02 * best


def test_memory():
    """Machines that hold a few layers each are one pipeline; with less memory there is no plan, and it says why."""
    options = {"speeds": [4, 2, 1], "parameters": 1000, "saved_bytes": 100.0}
    plans = plans_for({**options, "memory": 9.5e4}, 12)
    assert [sorted(p.machines) for p in plans.best[0].candidate.pipelines] == [[0, 1, 2]]
    assert plans.uniform["data parallel, even shares"] is None
    with pytest.raises(ValueError, match=r"need 0.1611 MB .*: machine 0 \(host0\) 0.036, machine 1 \(host1\) 0.0495"):
        plans_for({**options, "memory": [4e4, 5.5e4, 3e4]}, 12)
    with pytest.raises(ValueError, match="not enough memory"):
        plans_for({**options, "memory": 9.5e4}, 12, memory_fraction=0.5)


def test_recomputing_makes_room():
    """A plan for machines that are too small without it. The error names it, unless it is used already."""
    cluster = Cluster(made_up_cluster([2, 1], parameters=1000, saved_bytes=1e5, hidden_bytes=256.0, memory=4.1e5))
    plans = find_plans(cluster, 8, Setting(recompute=True))
    assert "--micro_batch_size 1 --recompute | machines" in report(cluster, plans, top=1)
    for setting, fraction, message in (Setting(), 0.9, "use --recompute, free"), (plans.best[0].setting, 0.5, "free"):
        with pytest.raises(ValueError, match=f"not enough memory for any plan.* To fit, {message} memory"):
            find_plans(cluster, 8, setting, memory_fraction=fraction)


def test_micro_batch_sizes():
    options = {"speeds": [2, 1], "sizes": (1, 2, 4), "overhead": 1e-3}
    plans = plans_for(options, 24)
    assert plans.best[0].candidate.micro_batch_size == 4  # of equal speed, with the fewest overheads
    assert plans_for(options, 6).best[0].candidate.micro_batch_size == 2
    assert plans_for(options, 24, sizes=[1]).best[0].candidate.micro_batch_size == 1
    with pytest.raises(ValueError, match="--micro_batch_size 3 was not measured"):
        plans_for(options, 24, sizes=[3])
    with pytest.raises(ValueError, match=r"--global_batch 3 is no multiple of a micro-batch size \(2\)"):
        plans_for(options, 3, sizes=[2])


@pytest.mark.parametrize("change, message", [
    (lambda data: data.pop("links"), "cluster.json can't be read .KeyError: 'links'.: write it with plan.py --measure"),
    (lambda data: data["machines"][0]["forward"]["1"].pop(), "machine 0: 'forward' of micro-batch size '1' should"),
    (lambda data: data["links"][0][1].update(bandwidth=0), "link from machine 0 to machine 1: bandwidth 0"),
    (lambda data: data["links"].pop(), "2 hosts, 2 machines and 1 rows of links"),
    (lambda data: data["modules"][2].update(parameters=-1), "module 2: 'parameters' should be a number, zero or more"),
    (lambda data: data.update(modules=data["modules"][:1]), "no row of numbered layers"),
])
def test_a_broken_cluster_json(tmp_path, change, message):
    change(data := made_up_cluster([1, 2]))
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        load_cluster(tmp_path / "cluster.json")


def test_an_odd_value_anywhere_in_cluster_json(tmp_path):
    """It is used, or one line says what is wrong; of what was measured no number is negative."""
    path = tmp_path / "cluster.json"
    for where, value, odd, data in with_odd_values(made_up_cluster([1, 2], layers=2)):
        path.write_text(json.dumps(data))
        is_refused = False
        try:
            load_cluster(path)
        except UserError as error:
            is_refused = "cluster.json" in str(error) and "\n" not in str(error)
        is_number = isinstance(value, (int, float)) and where[0] in ("machines", "links", "modules", "seq_len")
        assert is_refused or odd != -1 or not is_number, (where, value)


def run_plan(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, flags)])
    plan.main()


def test_the_command(tmp_path, monkeypatch, capsys):
    data, out = made_up_cluster([4, 2, 1], bandwidth=1e9), tmp_path / "plan.json"
    data["flags"] = {"num_hidden_layers": 8, "num_attention_heads": 8, "device": "cpu"}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    run_plan(monkeypatch, path, "--global_batch", 28, "--out", out, "--top", 2)
    printed = capsys.readouterr().out
    assert '--pipelines "8;8;8" --num_microbatches "16,8,4" --micro_batch_size 1 | machines 0; 1; 2' in printed
    assert "data parallel, even shares: 2.25 times the best plan's step, 0.216 s" in printed
    run_plan(monkeypatch, path, "--global_batch", 28, "--out", out, "--wire_dtype", "int8", "--schedule", "afab",
             "--recompute")
    written = json.loads(out.read_text())
    cluster = Cluster(copy.deepcopy(data))
    assert written == as_plan(cluster, find_plans(cluster, 28, Setting("afab", "int8", recompute=True)).best[0])
    assert written["recompute"] and not as_plan(cluster, find_plans(cluster, 28, Setting()).best[0])["recompute"]
    assert written["wire_dtype"] is None and written["model"] == data["model"]
    printed = capsys.readouterr().out
    assert f"plan: {out}" in printed and f"train_distributed.py --plan {out} --model_name toy" in printed
    assert "2 on host2" in printed
    (tmp_path / "full.json.unfinished").symlink_to("/dev/full")
    measured_with = "--num_hidden_layers 8 --num_attention_heads 8 --device cpu"
    assert f"--seq_len 16 --dtype float32 {measured_with}" in printed
    for flags, message in (
        ([], "say what to do"),
        ([path, "--measure", "x.json"], "one of the two"),
        ([path, "--seq_len", 99], "--seq_len 99, but .* was measured with 16"),
        ([tmp_path / "none.json"], "none.json can't be read .*No such file.*: write it with plan.py --measure"),
        ([path, "--out", path / "plan.json"], "--out '.*' can't be written: choose another path"),
        ([path, "--out", tmp_path / "full.json"], "--out '.*full.json' can't be written .No space left.*: make room, or"),
        ([path, "--memory_fraction", 2], "more than 0 and at most 1"),
        ([out], "plan.json can't be read .KeyError: 'flags'."),
        ([__file__], "can't be read .JSONDecodeError"),
        (["--measure", "x.json"], "start it with torchrun"),
    ):
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(ValueError, match=message):
            run_plan(monkeypatch, *flags)


def test_a_full_disk_under_what_is_printed(tmp_path):
    """The plan is there, and one line says what is missing."""
    path, out = tmp_path / "cluster.json", tmp_path / "plan.json"
    path.write_text(json.dumps(made_up_cluster([2, 1])))
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, plan.__file__, path, "--global_batch", "4", "--out", out], stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, (
        "error: can't write a file, or what is printed (No space left on device): make room, or write elsewhere\n"))
    assert json.loads(out.read_text())["global_batch"] == 4


def test_a_reader_that_stops_early(tmp_path):
    """`plan.py ... | head` writes the plan, and ends without a word about the pipe."""
    path, out = tmp_path / "cluster.json", tmp_path / "plan.json"
    path.write_text(json.dumps(made_up_cluster([2, 1])))
    process = subprocess.Popen([sys.executable, plan.__file__, path, "--global_batch", "4", "--out", out],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() and json.loads(out.read_text())["global_batch"] == 4


def test_more_micro_batches_in_flight_where_links_are_slow():
    """Where a message takes about as long as a stage computes, 1F1B's stages would wait for it; and where the first
    machine has the memory for the activations of three micro-batches, not only of the two of 1F1B."""
    slow = {"speeds": [1, 1], "layers": 4, "parameters": 1e4, "bandwidth": 2e6}
    little = {**slow, "saved_bytes": 1e5, "memory": 1.12e6 / 0.9}
    for options, expected in ({**slow, "bandwidth": 1e9}, "1f1b"), (slow, "1f1b-2"), (little, "1f1b"):
        cluster = Cluster(made_up_cluster(**options))
        plans, usual = (find_plans(cluster, 16, Setting(schedule)) for schedule in ("auto", "1f1b"))
        assert plans.best[0].step_seconds <= usual.best[0].step_seconds
        assert as_plan(cluster, plans.best[0])["schedule"] == plans.best[0].setting.schedule == expected
    with pytest.raises(ValueError, match="not enough memory"):
        find_plans(cluster, 16, Setting("1f1b-2"))


def test_how_many_local_steps_a_link_needs():
    """40 kB of gradients over 40 kB/s take a second, which is 5 % of the time where 19 s are computed in between."""
    cluster = Cluster(made_up_cluster([1, 1], bandwidth=4e4))
    words = report(cluster, find_plans(cluster, 4, Setting()), top=1).splitlines()[-1]
    assert words.startswith("local steps: 1 s to exchange, 0.048 s to compute a step: --local_steps 396 keeps")
