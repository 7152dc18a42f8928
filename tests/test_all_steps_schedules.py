"""Schedules without a process: legal, free of deadlock, with the bubble and the live activations of the formulas.

Their gradients: test_all_steps_same_math.py. Over NCCL: test_all_steps_nccl.py.
"""

import pytest
from launch import modules_of
from schedule_check import play, problem

with modules_of(8):
    from pipeline_parallel import afab, one_f_one_b
with modules_of(10):
    from pipeline_parallel import zero_bubble
    from timeline import Span as Span10, describe_bubble as describe_bubble10
with modules_of(11):
    from timeline import Span, describe_bubble
    from virtual_stages import interleaved, interleaved_zero_bubble

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


FB, FBW = ("forward", "backward"), ("forward", "backward", "weight gradients")


@pytest.mark.parametrize("step, kinds, m, said", [
    (10, FBW, 8, "measured, 11.1% ideal"), (10, FBW, 4, "measured, 20.0% ideal"),  # 3 of 27, 3 of 15
    (10, FBW, 2, "measured, 45.5% ideal"),  # 5 of 11
    (11, FB, 8, "15.8% ideal, that is (p-1)/(2m+p-1) with p=4 stages and m=8"),  # 3 of 19
    (11, FBW, 8, " 5.9% ideal, that is (p-1)/(6m+p-1) with p=4 stages and m=8"),  # 3 of 51
    (11, FB, 3, "m=3 micro-batches are less than a round of p=4")])
def test_the_ideal_bubble_that_is_printed(step, kinds, m, said):
    if step == 10:
        assert said in describe_bubble10([[Span10(kind, m - 1, 0, 1) for kind in kinds]] * 4)
    else:
        assert said in describe_bubble([[Span(kind, m - 1, 0, 1, chunk=1) for kind in kinds]] * 4)
