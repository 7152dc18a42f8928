"""recompute_memory.py: what it runs, its table and figure, from made-up measurements."""

import sys

import pytest
import recompute_memory
from launch import ROOT, STEPS
from recompute_memory import Case, Measured, cases, per_live_microbatch, table

FOUND = {case: Measured(0.3 + case.live * (0.002 if case.recompute else 0.01), 900 if case.recompute else 1200)
         for case in cases([4, 8, 16])}


def test_pairs_to_be_compared_run_one_after_the_other():
    found = cases([4, 8])
    assert len(set(found)) == len(found) == 8
    assert all(a._replace(recompute=True) == b for a, b in zip(found[::2], found[1::2]))


def test_flags_are_those_of_train():
    text = (STEPS["8"] / "train.py").read_text()
    words = Case("afab", True, 8).flags()
    assert all(f'"{word}"' in text for word in words if word.startswith("--")) and words[-1] == "--recompute"
    assert "--recompute" not in Case("afab", False, 8).flags()


def test_table_and_slope():
    assert [per_live_microbatch(FOUND, recompute) for recompute in (False, True)] == pytest.approx([10, 2])
    lines = table(FOUND).splitlines()
    assert lines[2] == "| AFAB | 0.34 GB | 0.38 GB | 0.46 GB | 1,200 | 1 |"
    assert lines[5] == "| 1F1B, recomputed | 0.31 GB | 0.31 GB | 0.31 GB | 900 | 1.33 (1.33 to 1.33) |"


def test_one_number_of_micro_batches_makes_no_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recompute_memory.py", "--micro_batches", "8", "8"])
    with pytest.raises(SystemExit):
        recompute_memory.main()
    assert "give two numbers at least" in capsys.readouterr().err


def test_without_a_flag_the_figure_is_not_the_chapter_s(monkeypatch, capsys):
    pictures = []
    monkeypatch.setattr(recompute_memory, "measure", lambda micro_batches: FOUND)
    monkeypatch.setattr(recompute_memory, "draw", lambda found, picture: pictures.append(picture))
    monkeypatch.setattr(sys, "argv", ["recompute_memory.py"])
    recompute_memory.main()
    assert "AFAB: 10.0 MB a live micro-batch, 2.0 MB recomputed" in capsys.readouterr().out
    assert pictures == [ROOT / "runs" / "recompute_memory.png"]
