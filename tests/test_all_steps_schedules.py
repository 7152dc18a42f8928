"""Schedules without a process: legal, free of deadlock, with the bubble and the live activations of the formulas.

Their gradients: test_all_steps_same_math.py. Over NCCL: test_all_steps_nccl.py.
"""

import pytest
import torch
from lab.program import Program
from lab.watch.schedule import play, problem

EIGHT, TEN, ELEVEN = (Program(step).load() for step in (8, 10, 11))
timeline = ELEVEN.timeline
afab, one_f_one_b = EIGHT.pipeline_parallel.SCHEDULES.values()
zero_bubble, weight_gradients = TEN.pipeline_parallel.zero_bubble, TEN.weight_gradients
*_, interleaved, interleaved_zero_bubble = ELEVEN.virtual_stages.SCHEDULES.values()
PLAIN = [(p, 1, m) for p in range(1, 9) for m in range(1, 17)]
CHUNKS = [(p, v, m) for p in (2, 3, 4, 8) for v in range(2, 5) for m in (1, 2, 3, 4, 5, 8, 11)]
WHOLE, SPLIT = {"F": 1, "B": 2, "W": 0}, {"F": 1, "B": 1, "W": 1}  # units of time


def first_round(p: int, m: int) -> int:
    return -(-m // max(m // p, 1))


@pytest.mark.parametrize("step, schedule, sizes, units, end, peak", [
    (8, afab, PLAIN, WHOLE, lambda p, v, m: 3 * (m + p - 1), lambda s, p, v, m: m),
    (8, one_f_one_b, PLAIN, WHOLE, lambda p, v, m: 3 * (m + p - 1), lambda s, p, v, m: p - s),
    (10, zero_bubble, PLAIN[16:], SPLIT, lambda p, v, m: 3 * m + p - 1 if m >= p else 2 * p + 2 * m - 1,
     lambda s, p, v, m: p),
    (11, interleaved, CHUNKS, WHOLE, lambda p, v, m: 3 * (v * m + p - 1 if m >= p else v * p + m - 1),
     lambda s, p, v, m: (v - 1) * first_round(p, m) + 2 * (p - s) - 1),
    (11, interleaved_zero_bubble, CHUNKS, SPLIT, lambda p, v, m: 3 * v * m + p - 1 if m >= p else None,
     lambda s, p, v, m: (v - 1) * first_round(p, m) + p),
], ids=lambda value: getattr(value, "__name__", None))
def test_legal_with_the_bubble_and_the_live_activations_of_the_formulas(step, schedule, sizes, units, end, peak):
    """Messages have no names: between two ranks they have to be received in the order in which they are sent.

    Where F, B and W take one unit each, no schedule is quicker than zero bubble: the last stage starts after p - 1
    units, and has 3 m units of work. With fewer micro-batches than stages, one has to go all the way to the last stage
    and back.
    """
    for p, v, m in sizes:
        actions = [list(schedule(stage, p, m, *[v] * (v > 1))) for stage in range(p)]
        assert (found := problem(actions, m, v, units)) is None, (p, v, m, found)
        assert {kind for kind, *_ in actions[-1]} == set("FBW" if units is SPLIT else "FB")
        played = play(actions, units)
        assert end(p, v, m) in (None, played.end), (p, v, m, played.end)
        assert played.peaks == [min(peak(s, p, v, m), v * m) for s in range(p)], (p, v, m)


def test_a_deadlock_is_found():
    """The simulator itself can fail: backward before forward on the last stage."""
    actions = [list(one_f_one_b(stage, 2, 2)) for stage in range(2)]
    actions[1][0], actions[1][1] = actions[1][1], actions[1][0]
    assert "deadlock" in problem(actions, 2)


@pytest.mark.parametrize("schedule, v, units", [
    (one_f_one_b, 1, WHOLE), (zero_bubble, 1, SPLIT), (interleaved, 2, WHOLE), (interleaved_zero_bubble, 2, SPLIT)])
def test_the_ideal_bubble_that_is_printed_is_that_of_the_schedule(schedule, v, units):
    """Of any one, with fewer micro-batches than stages, too; and whatever time the actions took when measured."""
    kinds = {"F": "forward", "B": "backward", "W": "weight gradients"}
    for m in (2, 3, 8):
        played = play([list(schedule(stage, 4, m, *[v] * (v > 1))) for stage in range(4)], units)
        ideal = 1 - 3 * v * m / played.end
        for speed in (1, 2):  # twice as fast, an action leaves half of its time idle
            said = timeline.describe_bubble([[
                timeline.Span(kinds[kind], i, start, start + (end - start) / speed, chunk=chunk)
                for kind, i, chunk, start, end in spans] for spans in played.spans])
            assert f"{ideal:.1%} ideal" in said, (m, said)
        assert f"bubble: {ideal:.1%} measured" not in said


def test_what_w_has_used_is_given_up(world_of_one):
    """Neither it nor the graph that made it, in which the hidden states that a stage has received are a leaf."""
    weight, x = torch.nn.Parameter(torch.ones(2, 3)), torch.ones(4, 3, requires_grad=True)
    weight_gradients.postpone(True)
    weight_gradients.linear(x * 2, weight).sum().backward()
    entries = weight_gradients.take()
    weight_gradients.postpone(False)
    assert len(entries) == 1 and weight.grad is None and entries[0][2].grad_fn is None
    TEN.process_group_manager.setup_process_group_manager(1, 1, 1)
    wrapper = TEN.data_parallel.DataParallelBucket(torch.nn.ParameterList([weight]))
    weight_gradients.add_weight_gradients(entries, wrapper)
    assert not entries and torch.equal(weight.grad, torch.full((2, 3), 8.0))
