"""The contestants of the measurements do the same work: each peer beside one process of ours."""

import functools
import json
import types

import pytest

import measure_course
from contestants import BASELINE, RUNS
from launch import ROOT
from make_tiny_llama import make


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """work(run): the result of two steps on a small model, where the baseline has run before."""
    folder = str(tmp_path_factory.mktemp("benchmark"))
    make(f"{folder}/model", vocab_size=512, hidden_size=32, intermediate_size=64)
    tokens = measure_course.make_tokens(folder, 2 * measure_course.TOKENS_A_STEP + 1)

    def work(run):
        measure_course.measure({run.name: run}, folder, tokens, types.SimpleNamespace(rounds=1, old=None))
        return measure_course.read_results(run, folder)

    return functools.cache(work)


@pytest.mark.parametrize("peer", [
    pytest.param(run, id=name, marks=() if name == "Hugging Face" else pytest.mark.slow)
    for name, run in RUNS.items() if run.step is None])
def test_a_peer_does_our_work(peer, work):
    """Its losses and its gradient norm."""
    results = {BASELINE: work(RUNS[BASELINE]), peer.name: work(peer)}
    assert [len(result["losses"]) for result in results.values()] == [2, 2]
    measure_course.check_losses(results)


@pytest.mark.parametrize("losses, norm, message", [
    ([6.0, 5.00002], 0.7, "the losses of 'b' are off by 2.0e-05: not the same work"),
    ([6.0, 5.0], 0.7002, "the gradient norm of 'b' is 0.700200 and not 0.700000: not the same work"),
    ([6.0, 5.0], float("nan"), "the gradient norm of 'b' is nan and not 0.700000: not the same work"),
], ids=["losses", "gradients", "not a number"])
def test_other_work_is_an_error(losses, norm, message):
    ours, peer = {"losses": [6.0, 5.0], "grad_norm": 0.7}, {"losses": losses, "grad_norm": norm}
    with pytest.raises(SystemExit, match=message):
        measure_course.check_losses({"a": ours, "b": peer})
    if norm == 0.7002:
        measure_course.check_losses({"a": ours, "b, --compile": peer})


def test_the_page_has_the_recorded_runs():
    """The page's table is that of the recorded seconds of each round."""
    record = json.loads((ROOT / "assets" / "benchmark.json").read_text())
    table = measure_course.table_of_speed({group: found["seconds"] for group, found in record.items()})
    assert table in (ROOT / "docs" / "BENCHMARKS.md").read_text()
