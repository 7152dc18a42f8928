"""The museum's page: its rows are what the checks say, and it has all faults and all reports."""

import re

import pytest
from lab.launch import ROOT
from museum import checks, page
from museum.checks import Finding
from museum.faults import FAULTS


def test_rows_say_what_the_checks_say(monkeypatch):
    """By the checks that take seconds, and the loss of step 2."""
    monkeypatch.setattr(page, "STEPS", 2)
    monkeypatch.setattr(page, "HEADS", [*page.HEADS[:6], "bytes", "schedule", "types"])
    monkeypatch.setattr(checks, "CHECKS", {name: checks.CHECKS[name] for name in page.HEADS[6:]})
    for made in page.rows_of(["samples", "each"]):
        fault, shown = FAULTS[made.name], dict(zip(page.HEADS, page.cells(made), strict=True))
        assert shown["axis"] == "dp" and shown["where"] == "step 5 `--dp_size 2`" and made.off is not None
        for check in checks.CHECKS:
            words = "…" if made.said[check].alarm else "–" if checks.cannot(fault, check) else "no"
            assert words in shown[check] and len(shown[check].replace("\\", "")) <= 60, shown
            assert made.said[check] == checks.find(fault, check)
        assert made.said["bytes"].alarm == (made.name == "each")


@pytest.mark.parametrize("raised, shown", [
    (KeyError("there is nothing"), "stops: 'there is nothing'"), (SystemExit("error: no\nmore"), "stops: error: no"),
    (RuntimeError("rank 1\nTraceback:\nValueError: 3 | 4"), r"stops: ValueError: 3 \| 4")])
def test_a_run_that_stops_is_a_cell(monkeypatch, raised, shown):
    monkeypatch.setattr(checks, "find", lambda *_: (_ for _ in ()).throw(raised))
    found = page.find(FAULTS["each"], "numbers")
    made = page.Row("each", None, {check: found for check in checks.CHECKS})
    assert page.cells(made)[5:7] == ["-", shown] and page.cells(made)[9] == "–"
    assert "Seen by numbers: 0, bytes: 0" in page.counts([made]) and "not there at all: 1" in page.counts([made])


def test_what_is_said_late_is_kept():
    said = f"step 1: gradients, {'x' * 70}: *2* times too large"
    assert page.short(said, "2. times") == r"… 2\* times too large"
    assert page.short("step 1: samples: 4 of 8 are read by nobody", "4 of") == "samples: 4 of 8 are read by nobody"
    assert [page.percent(each) for each in (None, float("nan"), 5e-6, -0.00483, 1.234)] == [
        "-", "NaN", "0 %", "-0.48 %", "+120 %"]
    assert not Finding(False, "").alarm


def test_faults_of_released_libraries_are_those_that_were_found():
    text = (ROOT / "docs" / "FOUND.md").read_text(encoding="utf-8")
    rows = page.found_rows(text)
    assert [row[0] for row in rows] == [f"[{number}](FOUND.md#fault-{number})" for number in re.findall(
        r"^## Fault (\d+)", text, re.M)]
    assert rows[0][-1] == "no report found (28 November 2026)"
    assert rows[6][-1].startswith("[pytorch/torchtitan#4245](https://github.com/pytorch/torchtitan/issues/4245), [")


def test_the_page_has_every_fault_and_its_reports():
    """Make it again after a fault is added: python tools/museum/page.py."""
    rows = [line.strip("| ").split(" | ") for line in page.PAGE.read_text(encoding="utf-8").splitlines()
            if line.count(" | ") == len(page.HEADS) - 1][2:]
    assert {row[0]: row[4] for row in rows} == {
        page.plain(name): ", ".join(map(page.link, fault.reported)) for name, fault in FAULTS.items()}
