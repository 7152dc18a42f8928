"""Types for collectives: what is right is not refused, on any grid, and faults are, in seconds and in one process."""

import importlib.util
import re
import sys
import time

import find_by_types
import pytest
from find_by_types import FAULTS, GRIDS, check, check_step, check_trainer, not_tried, published, trainers
from lab.launch import ROOT
from lab.program import Edit, Program

PAGE = (ROOT / "docs" / "TYPES.md").read_text(encoding="utf-8")
MIX = r"Invariant type on axis \w+ cannot mix with other types"
LEFT = "still a summand, P,|Partial type on axis"
FOUND = {  # of the museum, then of the published ones: what the refusal says
    "drift": "R is added to P on axis dp", "partial": rf"{MIX}. Found types: \[I, V\]",
    "double": rf"{MIX}. Found types: \[R, I\]", "early": "P is added to R on axis dp",
    "each": "P is added to R on axis dp", "twice": "all_reduce over dp of what is the same", "tied": LEFT,
    "clip": "norm is V on axis pp", "norms": LEFT,
    "tp head_norms": LEFT, "tp gathered": "all_reduce over ranks of what is the same", "tp bias": MIX,
    "tp bias_mean": MIX, "tp f": MIX, "tp g": MIX, "tp own_norm": "V on axis ranks, where the weight is I",
    "sp norms": f"norm1.weight: {LEFT}", "sp router": f"router.weight: {LEFT}", "cp ring": MIX,
    "ep group": "mlp.up: R on axis ranks, where the weight is V", "ep own_norm": "V on axis ranks, where",
    "replicas hook": "R is added to P", "replicas stale": f"embedding.weight: {LEFT}", "contrastive no_grad": MIX,
}
OTHERS = [name for name in [*FAULTS, *published()] if name not in FOUND and not not_tried(name)]
FIRST = {step: (step, ranks, flags) for step, ranks, flags in reversed(GRIDS)}  # of each step
LAST = {step: (step, ranks, flags) for step, ranks, flags in GRIDS}


def test_faults_of_the_museum_and_published_ones_are_found_in_seconds():
    start = time.process_time()  # other tests may run beside this one
    for name, words in FOUND.items():
        assert re.search(words, saw := check(name)), (name, saw)
    assert time.process_time() - start < 5
    assert sum(name in FAULTS for name in FOUND) >= 6 and sum(name in published() for name in FOUND) >= 8


@pytest.mark.parametrize("kind", [kind for kind in trainers() if not not_tried(kind)])
def test_a_right_trainer_is_not_refused(kind):
    assert check_trainer(kind) == ""


@pytest.mark.parametrize("step, ranks, flags", [
    pytest.param(*grid, marks=() if grid in (FIRST[grid[0]], LAST[grid[0]]) else pytest.mark.slow) for grid in GRIDS])
def test_a_right_step_is_not_refused(step, ranks, flags):
    assert check_step(Program(step, flags.split())) == ""


def test_the_grids_are_small_and_large():
    steps = {step: [(ranks, flags) for each, ranks, flags in GRIDS if each == step] for step in FIRST}
    assert steps.keys() == {"4", "8", "14", "15", "16"}
    for step in ("8", "14", "15", "16"):
        assert {ranks for ranks, _ in steps[step]} == {8, 1024}
    for step in ("14", "15", "16"):
        for word in ("", "--sequence_parallel"):
            for tp in (2, 8):
                assert any(word in flags and f"--tp_size {tp}" in flags for _, flags in steps[step]), (step, word, tp)
    assert {"2", "8"} == {re.search(r"--ep_size (\d)", flags)[1] for _, flags in steps["16"]}


@pytest.mark.parametrize("step, flags, file, old, new, words", [
    ("4", "--tp_size 2", "tensor_parallel.py", "Reduce.apply(x.to(self.dtype))", "x.to(self.dtype)", MIX),
    ("4", "--tp_size 2", "tensor_parallel.py", "    model.final_proj.register_forward_pre_hook(copy_input)\n", "", MIX),
    ("8", "--tp_size 2", "tensor_parallel.py", "return Reduce.apply(llama.linear(x, self.weight))",
     "return llama.linear(x, self.weight)", MIX),
    ("14", "--tp_size 2 --sequence_parallel", "sequence_parallel.py", "        return scatter_tokens(grad)\n",
     "        return grad.chunk(2, 1)[0]\n", MIX),
    ("14", "--tp_size 2 --sequence_parallel", "train.py", "(Gather, Scatter)", "(Gather, Reduce)", MIX),
    ("15", "--cp_size 2", "context_parallel.py", "grad_q.to(q.dtype), *message.wait().to(own.dtype)\n",
     "grad_q, *torch.zeros_like(own)\n", ""),
    ("16", "--tp_size 2 --num_experts 4", "tensor_parallel.py", "tuple(f.apply(each) for each in args)",
     "(f.apply(args[0]), *args[1:])", MIX),
    ("16", "--tp_size 2 --num_experts 4", "tensor_parallel.py",
     "            experts.register_forward_hook(lambda module, args, output: g.apply(output))\n", "", MIX),
    ("16", "--dp_size 2 --ep_size 2 --num_experts 4", "expert_parallel.py",
     "return exchange(grad, ctx.received, ctx.sent)", "return grad.new_zeros(sum(ctx.sent), 128)",
     "all_to_all in forward and (nothing|part) in backward are no pair"),
])
def test_a_collective_that_is_left_out_is_refused(step, flags, file, old, new, words):
    """But for a ring whose messages go around and are not used: that is about numbers."""
    saw = check_step(Program(step, flags.split(), [Edit(file, old, new)]))
    assert re.search(words, saw) if words else not saw, saw


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_others_are_not_found_and_no_right_version_is_refused(name):
    assert check(name) == check(name, healthy=True) == ""


def test_the_page_says_of_each_fault_whether_types_find_it():
    """In what types_table.table() has printed."""
    said, printed = {}, PAGE.partition("| faults of |")[2]
    for where, *cells in re.findall(r"^\| ([a-z]+) \| (.*?) ?\| (.*?) ?\|$", printed, re.M):
        for kind, cell in zip(("yes", "no"), cells):
            said |= {f"{where} {fault.split()[0]}".removeprefix("museum "): kind for fault in cell.split(", ") if fault}
    for words, kind in (("By types alone", "yes"), ("By neither", "no"), ("types not tried", "not tried")):
        (line,) = re.findall(rf"{words}: ((?:.+\n?)+?)(?=- |\n|$)", printed)
        said |= {" ".join(fault.split()[:-1]): kind for fault in line.split(", ")}
    assert said == {name: "not tried" if not_tried(name) else "yes" if name in FOUND else "no"
                    for name in [*FAULTS, *published()]}


def test_the_command(capsys):
    assert find_by_types.main(["partial", "tp f", "scale"]) == 0
    shown = capsys.readouterr().out
    assert "convert(tensor, tp, src=I, dst=R) on the Invariant operand" in shown
    assert "\n2 of 3 found, 0 not tried, none refused without a fault, in " in shown
    with pytest.raises(SystemExit):
        find_by_types.main(["nothing"])


def test_a_clear_sentence_where_spmd_types_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    for name in ("lab.watch.typed_gradients", "lab.watch.typed_steps", "lab.watch.types"):
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.find_spec("find_by_types")
    words = "^find_by_types.py: types for collectives need a package of their own: pip install -c .* spmd_types$"
    with pytest.raises(SystemExit, match=words):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
