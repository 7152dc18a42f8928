"""The museum of faults: each is published, small, and found by the checks that its record names, and by no other; a
healthy step is no alarm."""

import re

import break_it
import pytest
from break_it import FAULTS
from lab.launch import ROOT
from lab.program import Edit, Program
from museum import checks, guess
from museum.checks import CHECKS, TOPOLOGIES, Finding
from museum.faults import LISTS

PAGE = (ROOT / "docs" / "DEBUGGING.md").read_text(encoding="utf-8")
OWN = {(name, next(iter(fault.seen))) for name, fault in FAULTS.items() if fault.is_step}


def test_each_record_is_small_and_published():
    assert len(FAULTS) == sum(len(each.FAULTS) for each in LISTS) >= 100 and break_it.CHECKS == (*CHECKS,)
    assert {check for fault in FAULTS.values() for check in fault.seen} == CHECKS.keys()
    for name, fault in FAULTS.items():
        assert fault.reported, name
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|arXiv:[\d.]+", each) for each in fault.reported), name
        assert len(fault.sentence) < 110 and fault.seen and fault.axis in guess.AXES, name
        assert sum(new.count("\n") for _, _, new in fault.edits) <= 15, name  # a programmer's mistake, not a program


@pytest.mark.drawn(15)
@pytest.mark.parametrize("name, check", sorted(OWN))
def test_its_own_check_finds_a_fault(name, check):
    assert_that_it_says_what_the_record_says(name, check)


@pytest.mark.slow(drawn=20)
@pytest.mark.parametrize("name, check", sorted({(name, check) for name, fault in FAULTS.items() for check in CHECKS
                                                if fault.is_step and not checks.cannot(fault, check)} - OWN))
def test_the_checks_that_see_a_fault_are_those_of_its_record(name, check):
    """Types of all of them in seconds: test_all_steps_types.py."""
    assert_that_it_says_what_the_record_says(name, check)


def assert_that_it_says_what_the_record_says(name: str, check: str) -> None:
    fault = FAULTS[name]
    healthy, broken = checks.find(fault, check, healthy=True), checks.find(fault, check)
    assert not healthy.alarm, healthy
    assert broken.alarm == (check in fault.seen), broken
    assert check not in fault.seen or checks.says(fault, check, broken.saw) == (True, True), broken


@pytest.mark.parametrize("old, times", [("no such line", 0), ("import", "[0-9]+")])
def test_an_edit_whose_text_is_gone_is_an_error(old, times):
    with pytest.raises(ValueError, match=f"^step4_tensor_parallel/train.py contains this text {times} times, not"):
        Program(4, edits=[Edit("train.py", old, "new")])
    with pytest.raises(ValueError, match="^there is no nothing.py in step4_tensor_parallel"):
        Program(4, edits=[Edit("nothing.py", old, "new")])
    assert "-import time" in Program(4, edits=[Edit("train.py", "import time", "import this")]).diff()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("where", TOPOLOGIES)
def test_no_alarm_on_a_healthy_topology(where):
    assert checks.healthy_alarms(where) == []


def test_one_process_keeps_what_is_not_about_ranks():
    program = Program("16", "--tp_size 2 --sequence_parallel --zero 1 --dp_size 3 --cp_size 2 --warmup_steps 5 "
                      "--gradient_accumulation_steps 4".split())
    assert program.size == 12 and program.one_process().size == 1
    assert Program("9", ["--pipelines", "1,3;2,1,1", "--tp_size", "2"]).size == 10
    assert program.one_process().flags == ("--warmup_steps 5 --dp_size 1 --pp_size 1 --tp_size 1 "
                                           "--gradient_accumulation_steps 12").split()


def test_find(monkeypatch, capsys):
    saw, all_of_them = "deadlock:\n  rank 0 waits", f"of {len(FAULTS)} caught"
    monkeypatch.setattr(checks, "find", lambda fault, check, healthy=False: Finding(not healthy, saw))
    assert break_it.main(["stale", "--find"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "without stale: numbers: no alarm: deadlock:", "  rank 0 waits", "with stale: numbers: ALARM: deadlock:",
        "  rank 0 waits"]
    assert break_it.main(["stale", "--find", "--check", "types"]) == 1
    assert "with stale: types: ALARM" in capsys.readouterr().out
    assert break_it.main(["stale", "--find", "--healthy"]) == break_it.main(["--find"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{len(FAULTS)} {all_of_them}, no alarms without a fault\n")
    monkeypatch.setattr(checks, "find", lambda fault, check, healthy=False: Finding(False, "no pipeline", tried=False))
    assert break_it.main(["--find", "--check", "schedule"]) == 0  # it is not the check that shows them
    assert f"0 {all_of_them}, {len(FAULTS)} not tried, no alarms" in capsys.readouterr().out
    monkeypatch.setattr(checks, "find", lambda fault, check, healthy=False: Finding(healthy, ""))
    monkeypatch.setattr(checks, "healthy_alarms", lambda where, names: ["numbers: x"] * (where == "3"))
    assert break_it.main(["--find"]) == break_it.main(["--find", "--healthy", "--check", "numbers"]) == 1
    shown = capsys.readouterr().out
    assert f"0 {all_of_them}, {len(FAULTS)} alarms" in shown
    assert "step  3, 1 rank, no flags: numbers: x\n" in shown
    assert shown.endswith(f"1 alarms: numbers on {len(TOPOLOGIES)} healthy topologies\n")


def test_guess(monkeypatch, capsys):
    """What is typed decides, and the end of the input ends it, as Ctrl-C does."""
    def typed(*words: str, end: type[BaseException] = EOFError) -> tuple[int, str]:
        replies = iter(words)
        monkeypatch.setattr("builtins.input", lambda _: next(replies, None) or raises(end))
        return break_it.main(["--guess", "cp", "--seed", "1"]), capsys.readouterr().out

    def raises(error):
        raise error

    monkeypatch.setattr(checks, "find", lambda fault, check="": Finding(True, f"{fault.name} seen"))
    code, shown = typed()
    name = re.search(r"\nIt is (\w+): ", shown)[1]
    names = re.findall(r"^    (\w+) ", shown, re.M)
    assert code == 1 and name in names and re.search(r"is in (\S+/step15_\S+):\n", shown)
    assert names == [each for each, fault in FAULTS.items() if fault.is_step and fault.axis == "cp"]
    assert typed(end=KeyboardInterrupt)[0] == 130
    wrong = next(each for each in names if each != name)
    code, shown = typed("bytes", "hm", wrong, name)
    assert code == 0
    for words in (f"\nALARM: {name} seen\n", "\ntype a check (numbers, bytes, ",
                  f"\nNo, it is not {wrong}. Of the checks, numbers would show it soonest.\n",
                  f"\nYes: {FAULTS[name].sentence}\nnumbers shows it soonest: {name} "):
        assert words in shown, words
    code, shown = typed("diff")
    assert code == 1 and f"\n+++ step15_context_parallel/{FAULTS[name].edits[0][0]}, in a copy" in shown
    code, shown = typed("loss")
    assert "\nstep 1: loss 7." in shown and " in one process\n" in shown
    assert break_it.main(["--guess", "xp"]) == 2
    assert capsys.readouterr().err.startswith("break_it.py: there is no axis 'xp': choose one of dp, zero, tp, ")
