"""The schedules of step 9, and 1F1B with a longer warm-up, for links that are slow; what each keeps alive."""

import functools
from collections.abc import Iterator
from itertools import accumulate

import pipeline_parallel
from pipeline_parallel import Action


def eager_one_f_one_b(stage: int, num_stages: int, num_microbatches: int, ahead: int) -> Iterator[Action]:
    """1F1B whose warm-up is `ahead` times as long: stages compute while messages travel (Zhuang et al. 2023).

    The activations of 1 + ahead * (num_stages - stage - 1) micro-batches are alive at most.
    """
    return pipeline_parallel.one_f_one_b(0, 1 + ahead * (num_stages - stage - 1), num_microbatches)


SCHEDULES = {**pipeline_parallel.SCHEDULES,
             **{f"1f1b-{ahead}": functools.partial(eager_one_f_one_b, ahead=ahead) for ahead in (2, 3, 4)}}


@functools.cache
def live_microbatches(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches at most whose activations a stage holds: what the schedule's own order says."""
    actions = SCHEDULES[schedule](stage, num_stages, num_microbatches)
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))
