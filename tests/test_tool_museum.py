"""The museum of faults: each is published, small, and found by the check that it names; a healthy step is no alarm."""

import contextlib
import itertools
import re

import break_it
import pytest
from break_it import FAULTS
from lab.launch import ROOT
from lab.program import Edit, Program
from museum import find_faults
from museum.find_faults import CHECKS, TOPOLOGIES, Finding

PAGE = (ROOT / "docs" / "DEBUGGING.md").read_text(encoding="utf-8")
FIRST = {step: next(each for each in TOPOLOGIES if each[0] == step) for step in ("4", "5", "8", "14")}  # by default


def test_at_least_twenty_published_faults_by_four_kinds_of_check():
    assert len(FAULTS) >= 27
    assert {fault.check for fault in FAULTS.values()} == CHECKS.keys()
    for name, fault in FAULTS.items():
        assert fault.reported and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|https://\S+", each) for each in fault.reported)
        assert len(name) <= 9 and len(fault.sentence) < 110, name
        assert sum(edit.new.count("\n") for edit in fault.edits) <= 15, name  # a programmer's mistake, not a program


UNLIKE = "unlike on ranks that should hold the same"
SEEN = {
    "deadlock": "stage 0: before B0 it waits for B0 of stage 1",
    "hang": "rank 1 --> rank 0     all_reduce of the ranks [0, 1]", "seed": "seed of its own",
    "drift": "whose mean is right",
    "early": "all 39 parameters: unlike on ranks that should hold the same, whose mean is right",
    "scale": "4 times too large = the number of micro-batches: is the loss divided", "each": ": 4 times as many",
    "twice": ": 2 times as many", "mean": "2 times too large = the number of replicas",
    "samples": "rank 1 reads rank 0's",
    "order": "they are mixed up with each other", "frozen": "the optimizer does not hold 39 of them",
    "buffer": "rank 0 changed a tensor while it was being sent",
    "partial": "final_norm.weight: " + UNLIKE + ", whose sum",
    "double": "mlp.down_proj.weight: 2 times too large = the number of shards",
    "counted": "counted once for each of them?",
    "rate": "the learning rate was [0.0015], not [0.001]",
    "clip": "take the norm of its own gradients for that of all?",
    "sizes": "collectives of the ranks [0, 1] do not match", "postponed": "stage 1 never does W1",
    "few": "stage 0 does F1, but the micro-batches are 0 to 0", "router": "mlp.router.weight: " + UNLIKE,
    "shards": "take the norm of its own gradients for that of all?", "tied": "summed between first and last stage?",
    "norms": "post_attention_layernorm.weight, final_norm.weight: " + UNLIKE + ", whose sum is right",
    "targets": "the loss is wrong already, 7.03812 instead of 7.1951", "positions": "the loss is wrong already",
    "stale": "the loss is right: look at backward", "experts": "experts.*.down_proj.weight: 2 times too large",
    "crossed": "step4_tensor_parallel/tensor_parallel.py, changed, line 49: dist.send(tensor",
}


@pytest.mark.parametrize("name", FAULTS)
def test_its_check_finds_the_fault_and_nothing_without_it(name):
    fault = FAULTS[name]
    healthy, broken = find_faults.find(fault, healthy=True), find_faults.find(fault)
    assert broken.alarm and SEEN.get(name, name) in broken.saw, broken
    assert not healthy.alarm, healthy


@pytest.mark.parametrize("old, times", [("no such line", 0), ("import", "[0-9]+")])
def test_an_edit_whose_text_is_gone_is_an_error(old, times):
    with pytest.raises(ValueError, match=f"^step4_tensor_parallel/train.py contains this text {times} times, not once:"):
        Program(4, edits=[Edit("train.py", old, "new")])
    with pytest.raises(ValueError, match="^there is no nothing.py in step4_tensor_parallel"):
        Program(4, edits=[Edit("nothing.py", old, "new")])
    assert "-import time" in Program(4, edits=[Edit("train.py", "import time", "import this")]).diff()


@pytest.mark.parametrize("step, ranks, flags", [
    pytest.param(*each, marks=() if each == FIRST.get(each[0]) else pytest.mark.slow) for each in TOPOLOGIES])
def test_no_alarm_on_a_healthy_topology(step, ranks, flags):
    assert find_faults.healthy_alarms(step, flags) == []


@pytest.mark.slow
def test_how_many_faults_each_check_finds():
    counts = dict.fromkeys(CHECKS, 0)
    for fault, name in itertools.product(FAULTS.values(), CHECKS):
        with contextlib.suppress(find_faults.Violation, KeyError):  # it stops before there is anything to compare
            counts[name] += find_faults.find(fault, check=name).alarm
    first, *others, last = (f"{name} {count}" for name, count in counts.items())
    words = f"{first.replace(' ', ' finds ')} of these {len(FAULTS)}, {', '.join(others)} and {last}"
    assert words in PAGE, words


def test_one_process_keeps_what_is_not_about_ranks():
    program = Program("16", "--tp_size 2 --sequence_parallel --zero 1 --dp_size 3 --cp_size 2 --warmup_steps 5 "
                      "--gradient_accumulation_steps 4".split())
    assert program.size == 12 and program.one_process().size == 1
    assert Program("9", ["--pipelines", "1,3;2,1,1", "--tp_size", "2"]).size == 10
    assert program.one_process().flags == ("--warmup_steps 5 --dp_size 1 --pp_size 1 --tp_size 1 "
                                           "--gradient_accumulation_steps 12").split()


def test_the_command(monkeypatch, capsys):
    saw = "deadlock:\n  rank 0 waits"
    monkeypatch.setattr(find_faults, "find", lambda fault, healthy=False: Finding(not healthy, saw))
    assert break_it.main(["stale", "--find"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "without stale: same: no alarm: deadlock:", "  rank 0 waits", "with stale: same: ALARM: deadlock:",
        "  rank 0 waits"]
    assert break_it.main(["stale", "--find", "--healthy"]) == break_it.main(["--find"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{len(FAULTS)} of {len(FAULTS)} caught, no alarms without a fault\n")
    monkeypatch.setattr(find_faults, "find", lambda fault, healthy=False: Finding(healthy, ""))
    monkeypatch.setattr(find_faults, "healthy_alarms", lambda step, flags: ["norm: x"] * (step == "3"))
    assert break_it.main(["--find"]) == break_it.main(["--find", "--healthy"]) == 1
    shown = capsys.readouterr().out
    assert f"0 of {len(FAULTS)} caught, {len(FAULTS)} alarms" in shown
    assert "step  3, 1 rank, no flags: norm: x\n" in shown


def test_the_page_names_each_fault_its_check_and_its_report():
    for name, fault in FAULTS.items():
        item = re.search(rf"^- `{name}` \({fault.check}\): (?:.+\n)(?:  .+\n)*", PAGE, re.M)
        assert item and fault.reported[0] in item[0], name
