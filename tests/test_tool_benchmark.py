"""The benchmark's contestants do the same work: our steps' command lines, and each peer beside one process of ours."""

import functools
import json
import types

import pytest

import benchmark
from benchmark import RUNS
from launch import ROOT, STEPS
from make_tiny_llama import make

ONE_ROUND = types.SimpleNamespace(rounds=1, old=None)


@pytest.mark.parametrize("run", [run for run in RUNS if run.step], ids=lambda run: run.name)
def test_ours_do_not_clip_since_the_peers_do_not(run, tmp_path, monkeypatch):
    """An older checkout has no flag for it, and did not clip."""
    old = tmp_path / "old" / STEPS[str(run.step)].relative_to(ROOT)
    old.mkdir(parents=True)
    (old / "train.py").write_text("parser.add_argument('--seq_len')")
    monkeypatch.setattr(benchmark, "Program", lambda name, num_ranks, script, *arguments, threads: (script, arguments))
    script, now = benchmark.start(run, str(tmp_path), "tokens", ONE_ROUND)
    assert script == STEPS[str(run.step)] / "train.py" and now[now.index("--max_grad_norm") + 1] == "0"
    script, then = benchmark.start(run, str(tmp_path), "tokens", types.SimpleNamespace(rounds=1, old=tmp_path / "old"))
    assert script == old / "train.py" and "--max_grad_norm" not in then


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """work(run): the result of two steps on a small model, where the baseline has run before."""
    folder = str(tmp_path_factory.mktemp("benchmark"))
    make(f"{folder}/model", vocab_size=512, hidden_size=32, intermediate_size=64)
    tokens = benchmark.make_tokens(folder, rounds=1)

    def work(run):
        benchmark.take_turns([run], folder, tokens, ONE_ROUND)
        return benchmark.read_results(run, folder)

    return functools.cache(work)


QUICK = ("Hugging Face", "torch zero bubble V")  # the latter's last stage is on rank 0


@pytest.mark.parametrize("peer", [
    pytest.param(run, id=run.name, marks=() if run.name in QUICK else pytest.mark.slow)
    for run in RUNS if run.step is None])
def test_a_peer_does_our_work(peer, work):
    """Its losses and its gradient norm."""
    results = {benchmark.BASELINE: work(RUNS[0]), peer.name: work(peer)}
    assert [len(result["losses"]) for result in results.values()] == [2, 2]
    assert None not in [result["grad_norm"] for result in results.values()]
    benchmark.check_losses(results)


@pytest.mark.parametrize("losses, norm, message", [
    ([6.0, 5.00002], 0.7, "the losses of 'b' are off by 2.0e-05: not the same work"),
    ([6.0, 5.0], 0.7002, "the gradient norm of 'b' is 0.700200 and not 0.700000: not the same work"),
    ([6.0, 5.0], float("nan"), "the gradient norm of 'b' is nan and not 0.700000: not the same work"),
], ids=["losses", "gradients", "not a number"])
def test_other_work_is_an_error(losses, norm, message):
    ours, peer = {"losses": [6.0, 5.0], "grad_norm": 0.7}, {"losses": losses, "grad_norm": norm}
    with pytest.raises(SystemExit, match=message):
        benchmark.check_losses({"a": ours, "b": peer})
    if norm == 0.7002:
        benchmark.check_losses({"a": ours, "b, --compile": peer, "an older checkout": {**ours, "grad_norm": None}})


def test_the_page_has_the_recorded_runs(capsys):
    """The table, the rows from which the picture is drawn, and the recorded seconds of each round are of one run."""
    record = json.loads((ROOT / "assets" / "benchmark.json").read_text())
    rows = [row for group, members in benchmark.GROUPS.items()
            for row in benchmark.summarise(group, members, record["seconds"][group])]
    assert json.loads(json.dumps(rows)) == record["rows"]
    benchmark.print_table([row for row in rows if row["ours"]])
    page = (ROOT / "docs" / "BENCHMARKS.md").read_text().splitlines()
    assert not [line for line in capsys.readouterr().out.splitlines() if line not in page and "**" not in line]


def test_runs_are_compared_with_runs_of_the_table():
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    assert {other for run in RUNS for other, _ in run.against} <= set(names)


def test_the_table_has_a_heading_a_group(capsys):
    """A ratio is the median of the rounds' ratios: here 2, 1 and 4, whose quartiles are 1.5 and 3."""
    baseline, peer, ddp = (next(run for run in RUNS if run.name == name)
                           for name in (benchmark.BASELINE, "Hugging Face", "torch DDP"))
    seconds = {baseline.name: [2.0, 4.0, 1.0], peer.name: [4.0, 4.0, 4.0], ddp.name: [1.0, 2.0, 0.5]}
    rows = benchmark.summarise("One process", [baseline, peer], seconds)
    benchmark.print_table(rows + benchmark.summarise("Data parallel", [ddp], seconds))
    assert capsys.readouterr().out.splitlines()[3:] == [
        "| **One process** | | | | | |",
        "| step 3, one process | 2048 | Hugging Face | 2.00 | 1.50 to 3.00 | 1.00 |",
        "| Hugging Face | 1024 | | | | |",
        "| **Data parallel** | | | | | |",
        "| torch DDP | 4096 | step 3, one process | 2.00 | 2.00 to 2.00 |  |"]
