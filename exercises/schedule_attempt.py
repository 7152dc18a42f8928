"""The reader's schedule, without a process: its list for each stage, what stages can't do with it, and its times."""

import itertools
from collections.abc import Callable

from attempt import Wrong
from lab.watch.schedule import UNITS, Played, draw, play, problem


def play_schedule(attempt, schedule: Callable, num_stages: int, num_microbatches: int, *num_chunks: int,
                  seconds: dict = UNITS, stage_of: Callable | None = None) -> Played:
    """What schedule(stage, p, m, *v) yields for all stages, timed. Raises Wrong where stages can't run it."""
    chunks, actions = num_chunks[0] if num_chunks else 1, []
    for stage in range(num_stages):
        call = f"{'rank' if chunks > 1 else 'stage'} {stage} of {num_stages}, {count(num_microbatches, 'micro-batch')}"
        yielded = schedule(stage, num_stages, num_microbatches, *num_chunks)
        if not hasattr(yielded, "__iter__"):
            raise Wrong(f"{call}: it returns {yielded!r}, but has to yield actions: yield Action(\"F\", i)")
        actions.append(attempt.some(yielded, 6 * chunks * num_microbatches, f"{call}: the schedule"))
        if stage_of is None and (plain := [action for action in actions[-1] if not hasattr(action, "kind")]):
            raise Wrong(f"{call}: it yields {plain[0]!r}, but the executor needs an Action(kind, micro-batch)")
    if said := problem(actions, num_microbatches, chunks, seconds, stage_of):
        size = f"{count(num_stages, 'rank' if chunks > 1 else 'stage')}, {count(num_microbatches, 'micro-batch')}"
        raise Wrong(f"{size}: {said}")
    return play(actions, seconds, stage_of)


def train_with(attempt, flags: str) -> None:
    """Two optimizer steps of train.py on 3 ranks, with the reader's schedule: as in one process."""
    common = "--num_hidden_layers 6 --gradient_accumulation_steps 4 --max_tokens 128"
    got, one = attempt.train(3, f"{common} --pp_size 3 {flags}"), attempt.train(1, common, ours=True)
    for step, what in itertools.product(range(2), ("loss", "grad_norm")):
        attempt.same(got.rows[step][what], one.rows[step][what], f"the {what} of step {step + 1} of a training on 3 "
                     "ranks, compared with one process")


def score_time_and_memory(attempt, played: Played, units: float, alive: list[int], size: str) -> None:
    """Scores the units of time, and where these are the least, the activations that are alive, all ranks together."""
    attempt.score(f"units of time, {size}", played.end, units)
    if played.end <= units:
        attempt.score(f"activations alive at most, all of them together, {size}", sum(played.peaks), sum(alive))


def picture(played: Played) -> str:
    return f"\n{draw(played)}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'e' * noun.endswith('h')}s"
