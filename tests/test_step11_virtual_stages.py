"""Virtual stages: the interleaved schedules without a process, against formulas.

Their gradients: test_all_steps_same_math.py. Over NCCL: test_all_steps_nccl.py.
"""

import pytest
from launch import fork, modules_of
from test_step8_schedules import actions_of, simulate
from test_step8_timeline import SHORT, order, read_trace

with modules_of(11):
    from pipeline_parallel import Action
    from timeline import Span, describe_bubble
    from virtual_stages import interleaved, interleaved_zero_bubble

UNITS = {interleaved: {"F": 1.0, "B": 2.0, "W": 0.0}, interleaved_zero_bubble: {"F": 1.0, "B": 1.0, "W": 1.0}}
both = pytest.mark.parametrize("schedule", [interleaved, interleaved_zero_bubble])
SIZES = [(p, v, m) for p in (2, 3, 4, 8) for v in range(2, 5) for m in (1, 2, 3, 4, 5, 8, 11)]


def peak(actions: list[Action]) -> int:
    """The largest number of chunks alive: from their F until their W or, where backward is whole, their B."""
    last, alive = "W" if any(action.kind == "W" for action in actions) else "B", [0]
    for action in actions:
        alive.append(alive[-1] + (action.kind == "F") - (action.kind == last))
    assert alive[-1] == 0
    return max(alive)


@both
def test_legal_with_the_bubble_and_the_live_activations_of_the_formulas(schedule):
    for p, v, m in SIZES:
        actions, first_round = actions_of(schedule, p, m, v), -(-m // max(m // p, 1))
        for s, rank in enumerate(actions):
            kinds = "FBW" if schedule is interleaved_zero_bubble else "FB"
            assert sorted(rank) == sorted(Action(kind, i, c) for kind in kinds for i in range(m) for c in range(v))
            own = p if schedule is interleaved_zero_bubble else 2 * (p - s) - 1
            assert peak(rank) == min((v - 1) * first_round + own, v * m), (p, v, m, s)
        units = max(simulate(actions, UNITS[schedule]))
        if m >= p:
            assert units == 3 * v * m + (p - 1) * (1 if schedule is interleaved_zero_bubble else 3), (p, v, m)
        elif schedule is interleaved:
            assert units == 3 * (v * p + m - 1), (p, v, m)


@both
def test_transfers_arrive_in_the_order_they_are_awaited(schedule):
    """Messages have no names: between two ranks, those of a group are received in the order in which they are sent."""
    for p, v, m in SIZES:
        actions = actions_of(schedule, p, m, v)
        for s in range(p):
            for kind in "FB":
                hop = 1 if s == p - 1 else 0  # the last rank's chunk c is followed by the first rank's chunk c + 1
                here = [(i, c + hop) for k, i, c in actions[s] if k == kind and c + hop < v]
                there = [(i, c) for k, i, c in actions[(s + 1) % p] if k == kind and c >= hop]
                assert here == there, (p, v, m, s, kind)


@pytest.mark.parametrize("kinds, m, said", [
    ("forward backward", 8, "15.8% ideal, that is (p-1)/(2m+p-1) with p=4 stages and m=8"),  # 3 of 19
    ("forward backward,weight gradients", 8, " 5.9% ideal, that is (p-1)/(6m+p-1) with p=4 stages and m=8"),  # 3 of 51
    ("forward backward", 3, "m=3 micro-batches are less than a round of p=4")])
def test_the_ideal_bubble(kinds, m, said):
    kinds = kinds.replace(",", " ").replace("weight gradients", "weight_gradients").split()
    spans = [Span(kind.replace("_", " "), m - 1, 0, 1, chunk=1) for kind in kinds]
    assert said in describe_bubble([spans] * 4)


def test_timeline_is_the_schedule(tmp_path):
    done = fork(11, 2, *SHORT, tmp_path, "--pp_size", 2, "--gradient_accumulation_steps", 2, "--max_tokens", 128,
                "--profile_batch", 2, "--num_hidden_layers", 4, "--virtual_stages", 2, "--pp_engine", "interleaved_zb")
    orders = ["F0 F1 F0' F1' B0' W0' B1' W1' B0 W0 B1 W1", "F0 F1 F0' B0' F1' B1' W0' B0 W1' B1 W0 W1"]
    for rank, events in read_trace(tmp_path / "default_run" / "timeline_batch2_all.json").items():
        assert order(events) == orders[rank], rank
    assert "(p-1)/(6m+p-1) with p=2 stages and m=2 micro-batches" in done.stdout
