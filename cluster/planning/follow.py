"""When work moves from machines that have become slower to the others, and where to: a plan that follows.

A pipeline of N samples in micro-batches of B takes N times its slowest stage's seconds for a sample, and B times the
other stages', which fill and drain it. The slowest pipeline makes the step. What a fresh plan saves by this model, it
saves of the measured step, which has the time for messages as well. So each step has a gain: by how much it would have
been faster with the fresh plan, 50 % at most.

    when      the gains of the last 4, 6, 10 or 20 steps add up to 200 %: 10 % over 20 steps, 50 % over 4. The plan is
              made of the medians of these steps; one that it would have made slower counts against it
    noise     their mean is also three standard errors above zero
    layers    only where what they save in 100 steps is more than the seconds that the move takes
    calm      each move doubles what the next one needs, for 100 steps: there are three in that time at most
    early     once, after the second to fourth step, samples move for a gain of 3 %. The first step, which warms up,
              never counts

Who is in which pipeline stays. Only steps count in which each rank has measured what it computes: on CPUs all, where
there is a GPU every tenth.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from planning.shares import shares_by_speed

EARLY, REFINES = 3, 0.03  # steps; the gain of the early move
WINDOWS, MOST, NEEDED = (4, 6, 10, 20), 0.5, 2.0  # steps; a step's gain at most; the sum of gains
SURE, CALM, PAYS = 3.0, 100, 100  # standard errors; steps
UNITS = 2000  # of samples, at most, that are dealt one by one: this is done after each step


class Split(NamedTuple):
    """Who takes what: the decoder layers of each stage, by pipeline, and the samples of each pipeline in a step."""

    layers: list[list[int]]
    samples: list[int]


class Seen(NamedTuple):
    """Of a step: its seconds, and those of each stage, by pipeline, for a layer of a sample."""

    seconds: float
    rates: list[list[float]]


class Follower:
    """Decides by what it observes. The same numbers give the same decisions on all ranks.

    `size`: samples of a micro-batch. `head`: how many layers' work the head is. `moves_samples`: whether these may.
    `most_layers()`: what each stage has memory for; None where layers stay. `move_seconds(layers)`: how long it takes
    to move so many. `moved`: the steps after which work has moved before.
    """

    def __init__(self, split: Split, size: int, head: float, moves_samples: bool = True,
                 most_layers: Callable | None = None, move_seconds: Callable | None = None, moved=()):
        self.split, self.size, self.head, self.moves_samples = split, size, head, moves_samples
        self.most_layers, self.move_seconds, self.moved = most_layers, move_seconds, list(moved)
        self.limits, self.seen, self.is_warm, self.is_refined = None, [], False, False

    def observe(self, seconds: float, of_stages: list[list[float]]) -> None:
        """A step, and the seconds that each stage computed, by pipeline; 0 where it has not measured them."""
        if not all(map(all, of_stages)):
            return
        rates = [[value / count / work for value, work in zip(each, self.work(layers))]
                 for each, layers, count in zip(of_stages, *self.split)]
        if self.is_warm:
            self.seen = [*self.seen[1 - WINDOWS[-1]:], Seen(seconds, rates)]
        self.is_warm = True

    def decide(self, step: int) -> Split | None:
        """The split to move to after `step`, which is then taken for done; None to stay."""
        found = None
        if not self.is_refined and len(self.seen) == EARLY:
            self.is_refined, early = True, self.fresh(medians(self.seen), False)
            if self.gain(early, self.seen) >= EARLY * REFINES:
                found = early
        elif found := next(filter(None, (self.better(self.seen[-n:], step) for n in WINDOWS if n <= len(self.seen))),
                           None):
            self.moved.append(step)
        if found:
            self.split, self.seen = found, []
        return found

    def better(self, seen: list[Seen], step: int) -> Split | None:
        """The split for which these steps speak."""
        needed = NEEDED * 2 ** sum(step - before < CALM for before in self.moved)
        rates = medians(seen)
        found = [self.fresh(rates, False)]
        if self.most_layers:
            self.limits = self.limits or self.most_layers()
            other = self.fresh(rates, True)
            saved = self.seconds(found[0], rates) - self.seconds(other, rates)
            if PAYS * saved > self.move_seconds(changed(self.split, other)):
                found.insert(0, other)
        return next((split for split in found if self.gain(split, seen) >= needed), None)

    def fresh(self, rates: list[list[float]], moves_layers: bool) -> Split:
        """The split for machines of these speeds."""
        layers, samples = self.split
        if moves_layers:
            ends = [[0.0] * (len(each) - 1) + [each[-1] * self.head] for each in rates]
            layers = [shares_by_speed(sum(own), *facts) for own, *facts in zip(layers, rates, self.limits, ends)]
        if self.moves_samples:
            stages = self.stages(Split(layers, samples), rates)
            count, left_over = divmod(sum(samples), unit := 1 + sum(samples) // UNITS)
            shares = shares_by_speed(count, [unit * max(each) for each in stages], besides=[*map(self.fill, stages)])
            samples = [unit * share for share in shares]
            samples[samples.index(max(samples))] += left_over
        return Split(layers, samples)

    def gain(self, split: Split, seen: list[Seen]) -> float:
        """How much faster these steps would have been with that split, added up; -1 where that may be chance."""
        gains = []
        for step in seen:
            now = self.seconds(self.split, step.rates)
            saved = now - self.seconds(split, step.rates)
            gains.append(min(MOST, saved / (max(step.seconds, now) - saved)))
        is_sure = sum(gains) >= SURE * statistics.stdev(gains) * math.sqrt(len(gains))
        return sum(gains) if is_sure else -1.0

    def seconds(self, split: Split, rates: list[list[float]]) -> float:
        """Of a step without its messages."""
        return max(count * max(stages) + self.fill(stages)
                   for count, stages in zip(split.samples, self.stages(split, rates)))

    def stages(self, split: Split, rates: list[list[float]]) -> list[list[float]]:
        """The seconds of each stage for a sample, by pipeline."""
        return [[rate * work for rate, work in zip(each, self.work(layers))]
                for each, layers in zip(rates, split.layers)]

    def fill(self, stages: list[float]) -> float:
        return self.size * (sum(stages) - max(stages))

    def work(self, layers: list[int]) -> list[float]:
        """Of each stage, in layers; to look up embeddings is none."""
        return [*layers[:-1], layers[-1] + self.head]


def medians(seen: list[Seen]) -> list[list[float]]:
    return [[statistics.median(rates) for rates in zip(*of_pipeline)]
            for of_pipeline in zip(*(step.rates for step in seen))]


def changed(old: Split, new: Split) -> int:
    """How many layers are on another stage."""
    def stage_of_each(layers: list[int]) -> list[int]:
        return [stage for stage, count in enumerate(layers) for _ in range(count)]

    return sum(a != b for before, after in zip(old.layers, new.layers)
               for a, b in zip(stage_of_each(before), stage_of_each(after)))
