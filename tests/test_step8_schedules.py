"""Schedules without a process: legal, free of deadlock, the textbook's bubble, the promised live activations."""

import pytest

from launch import modules_of
from schedule_check import play, simulate

with modules_of(8):
    from pipeline_parallel import Action, afab, one_f_one_b

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]
both = pytest.mark.parametrize("schedule", [afab, one_f_one_b])


def actions_of(schedule, p: int, m: int, *v: int) -> list[list[Action]]:
    return [list(schedule(stage, p, m, *v)) for stage in range(p)]


@both
@pytest.mark.parametrize("p", range(1, 9))
def test_legal_and_bubble(schedule, p):
    for m in range(1, 17):
        actions = actions_of(schedule, p, m)
        for stage in actions:
            assert sorted(stage) == sorted(Action(kind, i) for kind in "FB" for i in range(m)), (p, m, stage)
        for backward in (1.0, 2.0):
            makespan = max(simulate(actions, {"F": 1.0, "B": backward, "W": 0.0}))
            bubble = 1 - m * (1 + backward) / makespan
            assert bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12), (p, m)


@both
def test_live_activations(schedule):
    for p, m in SIZES:
        peaks = play(actions_of(schedule, p, m)).peaks
        assert peaks == [m if schedule is afab else min(p - s, m) for s in range(p)], (p, m)


@both
def test_transfers_arrive_in_the_order_they_are_awaited(schedule):
    """Neighbours exchange unnamed messages: the order of sending has to be the order of receiving."""
    check_order_of_transfers(schedule)


def check_order_of_transfers(schedule) -> None:
    for p, m in SIZES:
        actions = actions_of(schedule, p, m)
        for s in range(p - 1):
            for kind in "FB":
                sent, received = ([a for a in actions[stage] if a.kind == kind] for stage in (s, s + 1))
                assert sent == received, (p, m, s)


def test_a_deadlock_is_found():
    """The simulator itself can fail: backward before forward on the last stage."""
    actions = actions_of(one_f_one_b, 2, 2)
    actions[1][0], actions[1][1] = actions[1][1], actions[1][0]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(actions)
