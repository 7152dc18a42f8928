"""What the laboratory shows of one optimizer step, and where an edited step differs from the unchanged one."""

import itertools
import linecache
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lab import Edit, Program, look
from lab.__main__ import main
from lab.launch import STEPS

SVG = "{http://www.w3.org/2000/svg}"
PP4 = "--pp_size 4 --gradient_accumulation_steps 8"
TWO = "--gradient_accumulation_steps 2 "
CASES = {  # step -> flags that use its idea, ranks
    2: ("--tp_size 2 --pp_size 2", 4), 3: (TWO, 1), 4: (TWO + "--tp_size 2", 2), 5: (TWO + "--dp_size 2", 2),
    6: (TWO + "--dp_size 2", 2), 7: (TWO + "--pp_size 2", 2), 8: (TWO + "--dp_size 2 --pp_size 2 --tp_size 2", 8),
    9: ("--pipelines 1,3;2,1,1 --num_microbatches 3,1", 5), 10: (TWO + "--pp_size 2 --pp_engine zb", 2),
    11: (TWO + "--pp_size 2 --virtual_stages 2 --pp_engine interleaved_zb", 2), 12: (TWO + "--dp_size 2 --zero 2", 2),
    13: (TWO + "--dp_size 2 --zero 3", 2), 14: (TWO + "--tp_size 2 --sequence_parallel", 2),
    15: (TWO + "--cp_size 2", 2), 16: (TWO + "--dp_size 2 --num_experts 4 --ep_size 2", 2),
    17: (TWO + "--dp_size 2 --local_steps 2", 2), 18: (TWO + "--dp_size 2 --optimizer muon --zero 1", 2),
    19: (TWO + "--tp_size 2 --generators 1 --group_size 2", 3)}
assert {*map(str, CASES), "1"} == {*STEPS}


def titles(svg: str, tag: str) -> list[str]:
    return [each.find(f"{SVG}title").text for each in ElementTree.fromstring(svg).iter(SVG + tag)
            if each.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("step", [pytest.param(step, marks=[pytest.mark.slow(drawn=4)] * (step not in (2, 5, 9, 11, 16)))
                                  for step in CASES])
def test_each_step_answers(step):
    flags, size = CASES[step]
    result = look(step, flags, watch=["messages", "schedule", "numbers"], say=(said := []).append)
    assert result.world.size == size and said[0].startswith(f"{size} rank")
    assert len(result.rows) == (2 if step in (17, 19) else 1) and f"loss {result.rows[0]['loss']:.6f}" in str(result)
    kinds = {action.kind for action in result.watch("Schedule").actions}
    assert {"F", "B"} <= kinds and ("W" in kinds) == (step in (10, 11))
    html = result._repr_html_()
    assert html.count("<svg") == 1 and ("<details>" in html) == (size > 1)


def test_picture_of_one_forward_one_backward(tmp_path):
    results = [look(8, PP4) for _ in range(2)]
    for k, result in enumerate(results):
        result.picture(tmp_path / f"{k}.svg")
    first, second = ((tmp_path / f"{k}.svg").read_text() for k in range(2))
    assert first == second and str(results[0]) == str(results[1])
    bars = [title for title in titles(first, "rect") if re.fullmatch(r"rank \d: [FB]\d", title)]
    assert sorted(bars) == sorted(f"rank {rank}: {kind}{i}" for rank in range(4) for kind in "FB" for i in range(8))
    arrows = [title.partition(": ")[2] for title in titles(first, "path") if " to " in title]
    pairs = [pair for k in range(3) for pair in (f"rank {k} to {k + 1}", f"rank {k + 1} to {k}")]
    assert sorted(arrows) == sorted(pairs * 8)
    widths = {each.find(f"{SVG}title").text: float(each.get("width"))
              for each in ElementTree.fromstring(first).iter(SVG + "rect")}
    assert widths["rank 0 waits"] == 3 * (8 + 3) * (widths["rank 0: F0"] + 1)  # 3 (m + p - 1), as 1F1B takes
    results[0].picture(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_bytes_below_the_picture(tmp_path):
    result = look(7, TWO + "--pp_size 2", watch=["schedule", "memory"])
    result.picture(tmp_path / "a.svg")
    found = [title for title in titles((tmp_path / "a.svg").read_text(), "rect") if title.endswith("of weights")]
    held = result.watch("Memory").held
    assert len(found) == 2 * (1 + 4 + 1) and f"rank 1: {held[1][0][1]['weights']:,} bytes of weights" in found
    assert "at most, in" in str(result)


def test_messages_in_words(capsys):
    assert main(["8", *PP4.split()]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks, one optimizer step: 4 layers of tiny_llama, micro-batches: 8 of 1 x 16 tokens" in printed
    line = r"^ +\d+  rank (\d) -> rank (\d)  send 1 x 16 x 128 float64, (forward|backward) (\d)$"
    sends = re.findall(line, printed, re.M)
    assert sorted(sends) == sorted(
        (str(rank + k), str(rank + 1 - k), kind, str(i))
        for rank, (k, kind), i in itertools.product(range(3), enumerate(("forward", "backward")), range(8)))
    assert len(re.findall(r"all ranks  all_reduce scalar float64, gradient norm$", printed, re.M)) == 1


WARM_UP = "min(num_stages - stage - 1, num_microbatches)"


@pytest.mark.parametrize("new, code, words", [
    ("min(num_stages - stage, num_microbatches)", 0, [
        "no difference in losses", "first difference of messages:\n    changed    message 12: rank 0 -> rank 1",
        "first difference of actions:\n    changed    rank 0: forward 4\n    unchanged  rank 0: backward 0"]),
    ("min(stage, num_microbatches)", 1, ["deadlock: no rank can go on.", "They wait in a circle: rank 0 -> rank 1"])])
def test_edit_of_the_warm_up(new, code, words, capsys):
    assert main(["8", *PP4.split(), "--edit", "pipeline_parallel.py", WARM_UP, new]) == code
    printed = capsys.readouterr().out
    assert f"-    warm_up = {WARM_UP}\n+    warm_up = {new}" in printed
    assert printed.index("loss 7.2946") < printed.index(words[0]) and all(each in printed for each in words)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the rank that makes no step
def test_first_numbers_that_differ():
    edit = Edit("train.py", "optimizer.step()", "next(model.parameters()).grad.mul_(2)\n            optimizer.step()")
    watch = ["numbers"]
    difference = look(6, TWO, [edit], watch).beside(look(6, TWO, watch=watch))
    assert difference.startswith("no difference in losses\nfirst difference of numbers: gradients of ")
    assert "on rank 0 in update 1, by up to" in difference
    tiny = Edit("train.py", "loss = train_step(model, data_loader)", "loss = train_step(model, data_loader) + 1e-12")
    assert "first difference of losses:\n    changed    step 1: 7.29" in look(6, TWO, [tiny]).beside(look(6, TWO))
    assert look(6, TWO, watch=watch).beside(look(6, TWO, watch=watch)).endswith("no difference in numbers")
    none = Edit("train.py", "        optimizer.step()", "        grid.dp_rank or optimizer.step()")  # rank 1 makes no step
    flags = TWO + "--dp_size 2"
    assert "on rank 1 in update 1 are not there in both" in look(5, flags, [none], watch).beside(look(5, flags, watch=watch))


def test_numbers_that_are_kept_are_not_counted():
    alone, both = (look(5, TWO, watch=watch).watch("Memory") for watch in (["memory"], ["memory", "numbers"]))
    assert alone.held == both.held


def test_edits_have_a_text_of_their_own_and_write_no_file_of_the_step():
    path = STEPS["5"] / "train.py"
    for file in (str(path), "./train.py"):
        with pytest.raises(ValueError, match="name a .py file of that folder"):
            Program(5, edits=[Edit(file, "optimizer.step()", "pass")])
    names = {Program(5, edits=[Edit("train.py", "optimizer.step()", new)]).code("train").co_filename
             for new in ("pass", "optimizer.stepp()", "pass")}
    assert len(names) == 2 and {"optimizer.stepp()" in "".join(linecache.getlines(name)) for name in names} == {True, False}


@pytest.mark.parametrize("watch, edit, words", [
    ("types", ("tensor_parallel.py", "        all_reduce(grad)\n", "        pass\n"), "Found types: [I, V]"),
    ("waits", ("train.py", "        loss = train_step(", "        torch.zeros(1, device=device).item()\n"
               "        loss = train_step("), "in the middle of a step the host reads the value of a tensor")])
def test_watches_of_one_rank_alone(watch, edit, words, capsys):
    assert main(["4", *TWO.split(), "--tp_size", "2", "--watch", watch, "--edit", *edit]) == 0
    unchanged, changed = capsys.readouterr().out.split("changed, rank 0 of 2 ranks")[1:]
    assert words not in unchanged and words in changed
    assert f"first difference of {watch}:" in changed and "no difference" not in changed
