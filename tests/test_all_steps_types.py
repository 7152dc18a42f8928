"""Types for collectives: what is right is not refused, on any grid, and faults are, in seconds and in one process."""

import importlib.util
import itertools
import re
import sys
import time

import pytest
from lab.program import Edit, Program
from museum import checks, trainers
from museum.faults import FAULTS
from museum.typed import GRIDS, check_step, check_trainer

MIX = r"Invariant type on axis \w+ cannot mix with other types"
REFUSED = [fault for fault in FAULTS.values() if "types" in fault.seen]
RIGHT = trainers.RIGHT.load()
OF_STEP = {step: [each for each in GRIDS if each.split()[0] == step] for step in ("4", "8", "14", "15", "16")}


def test_faults_are_refused_in_seconds():
    start = time.process_time()  # other tests may run beside this one
    for fault in REFUSED:
        found = checks.find(fault, "types")
        assert checks.says(fault, "types", found.saw) == (True, True), (fault.name, found.saw)
    assert time.process_time() - start < max(5, len(REFUSED) / 2) and len(REFUSED) >= 9


@pytest.mark.parametrize("kind", [
    kind for kind in RIGHT.trainers_model.TRAINERS | RIGHT.trainers_data.TRAINERS if kind not in checks.NOT_TYPED])
def test_a_right_trainer_is_not_refused(kind):
    assert check_trainer(kind, RIGHT) == ""


@pytest.mark.parametrize("grid", [
    pytest.param(grid, marks=() if grid in (first, last) else pytest.mark.slow(drawn=4))
    for first, *others, last in OF_STEP.values() for grid in (first, *others, last)])
def test_a_right_step_is_not_refused(grid):
    assert checks.healthy_alarms(grid, ["types"]) == []


def test_the_grids_are_small_and_large():
    assert sum(map(len, OF_STEP.values())) == len(GRIDS) == 24
    for step in ("8", "14", "15", "16"):
        assert {Program(step, grid.split()[1:]).size for grid in OF_STEP[step]} == {8, 1024}
    for step, word, tp in itertools.product(("14", "15", "16"), ("", "--sequence_parallel"), (2, 8)):
        assert any(word in grid and f"--tp_size {tp}" in grid for grid in OF_STEP[step]), (step, word, tp)
    assert {"2", "8"} == {re.search(r"--ep_size (\d)", grid)[1] for grid in OF_STEP["16"]}


@pytest.mark.parametrize("step, flags, file, old, new, words", [
    ("4", "--tp_size 2", "tensor_parallel.py", "Reduce.apply(x.to(self.dtype))", "x.to(self.dtype)", MIX),
    ("8", "--tp_size 2", "tensor_parallel.py", "return Reduce.apply(llama.linear(x, self.weight))",
     "return llama.linear(x, self.weight)", MIX),
    ("14", "--tp_size 2 --sequence_parallel", "train.py", "(Gather, Scatter)", "(Gather, Reduce)", MIX),
    ("15", "--cp_size 2", "context_parallel.py", "grad_q.to(q.dtype), *message.wait().to(own.dtype)\n",
     "grad_q, *torch.zeros_like(own)\n", ""),
    ("16", "--tp_size 2 --num_experts 4", "tensor_parallel.py",
     "            experts.register_forward_hook(lambda module, args, output: g.apply(output))\n", "", MIX),
    ("16", "--dp_size 2 --ep_size 2 --num_experts 4", "expert_parallel.py",
     "return exchange(grad, ctx.received, ctx.sent)", "return grad.new_zeros(sum(ctx.sent), 128)",
     "all_to_all in forward and (nothing|part) in backward are no pair"),
])
def test_a_collective_that_is_left_out_is_refused(step, flags, file, old, new, words):
    """Beside the museum's, but for a ring whose messages go around and are not used: that is about numbers."""
    saw = check_step(Program(step, flags.split(), [Edit(file, old, new)]))
    assert re.search(words, saw) if words else not saw, saw


def test_a_clear_sentence_where_spmd_types_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    for name in ("lab.watch.typed_gradients", "lab.watch.typed_steps", "lab.watch.types"):
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.find_spec("museum.typed")
    words = "^error: types for collectives need a package of their own: pip install -c .* spmd_types$"
    with pytest.raises(SystemExit, match=words):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
