"""same_numbers on the published faults that its trainers switch on: none is missed, and no right version is accused."""

import inspect
import re

import pytest
import torch
from lab.launch import ROOT
from museum import published_faults
from museum.published_faults import CASES, EXPECTED, TRAINERS, record, verdict
from same_numbers import trainers
from same_numbers.trainers_base import faults
from support.trainers_of_libraries import LIBRARIES

PAGE = (ROOT / "docs" / "SAME_NUMBERS.md").read_text(encoding="utf-8")


def test_each_fault_is_a_switch_with_a_source_and_in_the_page():
    assert len(EXPECTED) >= 32 and {*EXPECTED} == {f"{kind} {fault}" for kind, fault in CASES if fault}
    for kind, trainer in {**trainers.TRAINERS, **LIBRARIES}.items():
        source = inspect.getsource(inspect.getmodule(trainer))
        for fault, (words, reported) in faults(trainer).items():
            assert f'"{fault}"' in source and re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv \d{4}\.\d{5}", reported), fault
            assert f"{kind}, {fault}: {words} ({reported})" in PAGE or kind not in TRAINERS


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_trainer_is_right_and_its_faults_are_found(kind, tmp_path):
    check(tmp_path, 2, torch.float64, [case for case in CASES if case[0] == kind])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_fault_is_missed_and_no_right_version_accused(ranks, dtype, tmp_path):
    check(tmp_path, ranks, dtype, CASES)


def check(folder, ranks: int, dtype: torch.dtype, cases: list[tuple[str, str]]) -> None:
    record(folder, 1, dtype, [(kind, fault) for kind, fault in cases if not fault])
    record(folder, ranks, dtype, cases)
    for kind, fault in cases:
        found = verdict(folder, kind, fault, ranks, dtype)
        assert bool(found.lines) == bool(fault), (kind, fault, found)
        assert not fault or found.placed and found.named, (kind, fault, found)


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["published_faults.py", "local", "--steps", "4"])
    assert published_faults.main() == 0
    shown = capsys.readouterr().out
    assert "| local, sign: the outer step goes back instead of on (pytorch/torchtitan#1507) | +" in shown
    assert "Of 1 faults 1 are found, 1 placed" in shown
    assert "; 0 right versions are accused (2 ranks, float64)." in shown
