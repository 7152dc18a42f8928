"""The benchmark's contestants do the same work: our steps' command lines, and one run beside Hugging Face's."""

import pathlib
import subprocess

import pytest

import benchmark
from benchmark import RUNS
from launch import ROOT, STEPS
from make_tiny_llama import make


@pytest.mark.parametrize("run", [run for run in RUNS if run.step], ids=lambda run: run.name)
def test_ours_do_not_clip_since_the_peers_do_not(run, tmp_path, monkeypatch):
    """An older checkout has no flag for it, and did not clip."""
    old = tmp_path / "old" / STEPS[str(run.step)].name
    old.mkdir(parents=True)
    (old / "train.py").write_text("parser.add_argument('--seq_len')")
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or pytest.skip.Exception)
    for checkout in (None, tmp_path / "old"):
        with pytest.raises(AttributeError):  # what it would have returned
            benchmark.execute(run, str(tmp_path), "tokens", checkout)
    now, then = commands
    assert now[now.index("--max_grad_norm") + 1] == "0" and "--max_grad_norm" not in then
    assert pathlib.Path(then[then.index("--nproc_per_node") + 2]) == old / "train.py"


def test_ours_and_a_peer_have_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "STEPS_A_RUN", 2)
    make(str(tmp_path / "model"), vocab_size=512, hidden_size=32, intermediate_size=64)
    tokens = benchmark.make_tokens(str(tmp_path))
    runs = [run for run in RUNS if run.name in (benchmark.BASELINE, "Hugging Face")]
    benchmark.check_losses([{run.name: benchmark.execute(run, str(tmp_path), tokens, None) for run in runs}])


def test_other_work_is_an_error():
    with pytest.raises(SystemExit, match="the losses of 'b' are off by 2.0e-05: not the same work"):
        benchmark.check_losses([{"a": {"losses": [6.0, 5.0]}, "b": {"losses": [6.0, 5.00002]}}])
