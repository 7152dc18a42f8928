"""Zero bubble: its schedule without a process. Its gradients: test_all_steps_same_math.py."""

import pytest
from launch import modules_of
from test_step8_schedules import SIZES, actions_of, check_order_of_transfers, simulate

with modules_of(10):
    from pipeline_parallel import Action, zero_bubble
    from timeline import Span, describe_bubble


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_is_legal_and_its_bubble_is_the_least(p):
    """Where F, B and W take one unit each, no schedule is quicker: the last stage starts after p - 1 units, and has 3 m
    units of work. With fewer micro-batches than stages, one has to go all the way to the last stage and back.
    """
    for m in range(1, 17):
        actions = actions_of(zero_bubble, p, m)
        for s, stage in enumerate(actions):
            kinds = "FBW" if s > 0 else "FB"
            assert sorted(stage) == sorted(Action(kind, i) for kind in kinds for i in range(m)), (p, m, stage)
        makespan = max(simulate(actions, {"F": 1.0, "B": 1.0, "W": 1.0}))
        assert makespan == (3 * m + p - 1 if m >= p else 2 * p + 2 * m - 1), (p, m)


def test_zero_bubble_keeps_no_more_than_p_micro_batches_alive():
    """Until their W, where 1F1B keeps p - s until their B."""
    for p, m in SIZES:
        for s, stage in enumerate(actions_of(zero_bubble, p, m)):
            last = "B" if s == 0 else "W"
            alive = [sum((a.kind == "F") - (a.kind == last) for a in stage[: k + 1]) for k in range(len(stage))]
            assert alive[-1] == 0 and max(alive) == min(p, m), (p, m, s)


def test_transfers_arrive_in_the_order_they_are_awaited():
    check_order_of_transfers(zero_bubble)


@pytest.mark.parametrize("p, m, ideal", [(4, 8, "11.1%"), (4, 4, "20.0%"), (4, 2, "45.5%")])  # 3, 3 and 5 of 27, 15, 11
def test_the_ideal_bubble(p, m, ideal):
    stages = [[Span(kind, m - 1, 0, 1, False, None) for kind in ("forward", "backward", "weight gradients")]] * p
    assert f"measured, {ideal} ideal" in describe_bubble(stages)
