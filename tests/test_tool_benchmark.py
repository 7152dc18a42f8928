"""The contestants of the measurements do the same work: each peer beside one process of ours."""

import argparse
import functools
import json

import pytest
from lab.launch import ROOT
from maintain import measure_course
from maintain.contestants import BASELINE, RUNS
from maintain.make_tiny_llama import make


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """work(run): the result of two steps on a small model, where the baseline has run before."""
    folder = str(tmp_path_factory.mktemp("benchmark"))
    make(f"{folder}/model", vocab_size=512, hidden_size=32, intermediate_size=64)
    tokens = measure_course.make_tokens(folder, 2 * measure_course.TOKENS_A_STEP + 1)

    def work(run):
        measure_course.measure({run.name: run}, folder, tokens, argparse.Namespace(rounds=1))
        return measure_course.read_results(run, folder)

    return functools.cache(work)


@pytest.mark.parametrize("peer", [
    pytest.param(run, id=name, marks=() if name == "Hugging Face" else pytest.mark.slow(drawn=4))
    for name, run in RUNS.items() if run.step is None])
def test_a_peer_does_our_work(peer, work):
    """Its losses and its gradient norm."""
    results = {BASELINE: work(RUNS[BASELINE]), peer.name: work(peer)}
    assert [len(result["losses"]) for result in results.values()] == [2, 2]
    measure_course.check_losses(results)


def test_the_page_has_the_recorded_runs():
    """The page's table is that of the recorded seconds of each round."""
    record = json.loads((ROOT / "assets" / "benchmark.json").read_text())
    table = measure_course.table_of_speed({group: found["seconds"] for group, found in record.items()})
    assert table in (ROOT / "docs" / "BENCHMARKS.md").read_text()
