"""Schedules without a process: legal, free of deadlock, the textbook's bubble, the promised live activations."""

import pytest

from launch import modules_of

with modules_of(8):
    from pipeline_parallel import Action, afab, one_f_one_b

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]
SECONDS = {"F": 1.0, "B": 2.0, "W": 0.0}
both = pytest.mark.parametrize("schedule", [afab, one_f_one_b])


def simulate(actions: list[list[Action]], seconds: dict[str, float] = SECONDS, stage_of=None) -> list[float]:
    """Seconds at which each rank ends, transfers free. AssertionError where no rank can go on, with what each awaits.

    A forward needs the previous stage's, a backward the next stage's (on the last stage: its own forward), and the
    gradients of weights need the stage's own backward. Where a rank has no W, its B takes W's seconds, too. A rank whose
    actions have chunks holds as many stages: rank r the stages r, r + p, ... of p ranks, or stage_of(r, chunk).
    """
    num_ranks, todo = len(actions), [[(*action, 0)[:3] for action in rank] for rank in actions]
    split = [any(kind == "W" for kind, _, _ in rank) for rank in todo]
    last_stage = max(chunk for rank in todo for _, _, chunk in rank) * num_ranks + num_ranks - 1
    done, clock = {}, [0.0] * num_ranks
    while any(todo):
        moved = False
        for r, rank in enumerate(todo):
            while rank:
                kind, i, chunk = rank[0]
                s = stage_of(r, chunk) if stage_of else chunk * num_ranks + r
                needs = {"F": [], "B": [(s, "F", i)], "W": [(s, "B", i)]}[kind]
                if kind == "F" and s > 0:
                    needs.append((s - 1, "F", i))
                if kind == "B" and s < last_stage:
                    needs.append((s + 1, "B", i))
                if any(need not in done for need in needs):
                    break
                start = max([clock[r], *(done[need] for need in needs)])
                whole = kind == "B" and not split[r]
                clock[r] = done[s, kind, i] = start + seconds[kind] + (seconds["W"] if whole else 0.0)
                rank.pop(0)
                moved = True
        waits = [[action[: 2 + (last_stage >= num_ranks)] for action in rank[:1]] for rank in todo]
        assert moved, f"deadlock, the stages wait for {waits}"
    return clock


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
        for s, stage in enumerate(actions_of(schedule, p, m)):
            alive = peak = 0
            for action in stage:
                alive += 1 if action.kind == "F" else -1
                peak = max(peak, alive)
            assert alive == 0 and peak == (m if schedule is afab else min(p - s, m)), (p, m, s)


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
