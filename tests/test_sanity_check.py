"""The sanity check's own judgement, on made-up runs: no training here."""

import json
import subprocess
import sys

import sanity_check
from launch import ROOT
from sanity_check import Result, failures, table


def write_run(folder, values):
    folder.mkdir()
    rows = [{"step": i, "loss": loss, "tokens_per_second": 100.0 * i} for i, loss in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_differences_are_judged_by_dtype(tmp_path):
    baseline = Result.read(write_run(tmp_path / "baseline", [5.0] * 30))
    close = Result.read(write_run(tmp_path / "close", [5.0] * 20 + [5.01] * 10))
    far = Result.read(write_run(tmp_path / "far", [5.0, 5.001] + [5.0] * 28))
    broken = Result("broken", [float("nan")] * 30, 1.0)
    assert failures([baseline, close], "float32") == []
    assert len(failures([baseline, close], "float64")) == 1, "float64 is judged over all steps"
    assert len(failures([baseline, close, far], "float32")) == 1
    assert len(failures([baseline, broken], "float32")) == 1
    assert baseline.tokens_per_second == 1600.0, "the median, without the first step"
    assert "| far | 30 | 5.0000 | 1.0e-03 | 1.0e-03 | 1,600 |" in table([baseline, far])


def test_plot_draws_existing_runs(tmp_path):
    runs = [write_run(tmp_path / name, [5.0, 4.0 + gap]) for name, gap in (("a", 0.0), ("b", 1e-9))]
    command = [sys.executable, ROOT / "tests" / "sanity_check.py", "--figure", tmp_path / "figure.png", "--plot", *runs]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    assert "| b | 2 | 4.0000 | 1.0e-09 | 1.0e-09 | 200 |" in done.stdout
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_fails_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sanity_check, "ROWS", sanity_check.ROWS[:1])
    words = ["sanity_check.py", "--log_dir", str(tmp_path), "--max_tokens", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    assert sanity_check.main() == 1
    printed = capsys.readouterr().out
    assert "Baseline did not run" in printed and "--max_tokens 1 is less than" in printed
