"""The schedules of step 9, and 1F1B with a longer warm-up, for links that are slow."""

import functools
from collections.abc import Iterator

import pipeline_parallel
from pipeline_parallel import Action


def eager_one_f_one_b(stage: int, num_stages: int, num_microbatches: int, ahead: int) -> Iterator[Action]:
    """1F1B whose warm-up is `ahead` times as long: stages compute while messages travel (Zhuang et al. 2023).

    The activations of 1 + ahead * (num_stages - stage - 1) micro-batches are alive at most.
    """
    return pipeline_parallel.one_f_one_b(0, 1 + ahead * (num_stages - stage - 1), num_microbatches)


SCHEDULES = {**pipeline_parallel.SCHEDULES,
             **{f"1f1b-{ahead}": functools.partial(eager_one_f_one_b, ahead=ahead) for ahead in (2, 3, 4)}}
