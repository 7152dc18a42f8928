"""When samples move from machines that have become slower to the others, and how many: a plan that follows.

A pipeline of N samples in micro-batches of B takes N times its slowest stage's seconds for a sample, and B times the
other stages', which fill and drain it. The slowest pipeline makes the step. What fresh shares save by this model, they
save of the measured step, which has the time for messages as well. So each step has a gain: by how much it would have
been faster with fresh shares, 50 % at most.

    when      the gains of the last 4, 6, 10 or 20 steps add up to 200 %: 10 % over 20 steps, 50 % over 4. The shares
              are made of the medians of these steps; one that they would have made slower counts against them
    noise     their mean is also three standard errors above zero
    calm      each move doubles what the next one needs, for 100 steps: there are three in that time at most
    early     once, after the second to fourth step, samples move for a gain of 3 %. The first step, which warms up,
              never counts. Where a round has more local steps than that, samples move after the first round

Who is in which pipeline, and with how many layers, stays. Only steps count in which each rank has measured what it
computes: on CPUs all, where there is a GPU every tenth.
"""

import math
import statistics
from typing import NamedTuple

from planning.shares import shares_by_speed

EARLY, REFINES = 3, 0.03  # steps; the gain of the early move
WINDOWS, MOST, NEEDED = (4, 6, 10, 20), 0.5, 2.0  # steps; a step's gain at most; the sum of gains
SURE, CALM = 3.0, 100  # standard errors; steps
UNITS = 2000  # of samples, at most, that are dealt one by one: this is done after each step


class Seen(NamedTuple):
    """Of a step: its seconds, and those of each stage for a sample, by pipeline."""

    seconds: float
    rates: list[list[float]]


class Rebalancing:
    """Decides by what it observes. The same numbers give the same decisions on all ranks.

    `samples`: of each pipeline in a step. `size`: samples of a micro-batch. `unit`: so many samples move together.
    `early`: so many steps are seen before the early move; 1 for rounds of many local steps, of which the first counts.
    """

    def __init__(self, samples: list[int], size: int, unit: int = 1, early: int = EARLY):
        self.samples, self.size, self.unit, self.early = samples, size, unit, early
        self.moved, self.seen, self.is_warm, self.is_refined = [], [], early == 1, False  # moved: after which steps

    def follow(self, step: int, seconds: float, of_stages: list[list[float]]) -> list[int] | None:
        """The samples to move to after `step`, which are then taken for done; None to stay. `seconds`: of the step;
        `of_stages`: those that each stage computed, by pipeline; 0 where it has not measured them."""
        if all(map(all, of_stages)):
            rates = [[value / count for value in each] for each, count in zip(of_stages, self.samples)]
            if self.is_warm:
                self.seen = [*self.seen[1 - WINDOWS[-1]:], Seen(seconds, rates)]
            self.is_warm = True
        needed = NEEDED * 2 ** sum(step - before < CALM for before in self.moved)
        tries, is_early = [(count, needed) for count in WINDOWS], not self.is_refined and len(self.seen) == self.early
        if is_early:
            self.is_refined, tries = True, [(self.early, self.early * REFINES)]
        for count, needed in tries:
            seen = self.seen[-count:]
            if len(seen) == count and self.gain(samples := self.fresh(seen), seen) >= needed:
                self.samples, self.seen = samples, []
                self.moved += [] if is_early else [step]
                return samples
        return None

    def fresh(self, seen: list[Seen]) -> list[int]:
        """The samples for machines as fast as in the median of these steps."""
        rates = [[statistics.median(of_stage) for of_stage in zip(*of_pipeline)]
                 for of_pipeline in zip(*(step.rates for step in seen))]
        count, left_over = divmod(sum(self.samples), unit := self.unit * (1 + sum(self.samples) // self.unit // UNITS))
        shares = shares_by_speed(count, [unit * max(each) for each in rates], besides=[*map(self.fill, rates)])
        samples = [unit * share for share in shares]
        samples[samples.index(max(samples))] += left_over
        return samples

    def gain(self, samples: list[int], seen: list[Seen]) -> float:
        """How much faster these steps would have been with those samples, added up; -1 where that may be chance."""
        gains = []
        for step in seen:
            now = self.seconds(self.samples, step.rates)
            saved = now - self.seconds(samples, step.rates)
            gains.append(min(MOST, saved / (max(step.seconds, now) - saved)))
        is_sure = len(gains) == 1 or sum(gains) >= SURE * statistics.stdev(gains) * math.sqrt(len(gains))
        return sum(gains) if is_sure else -1.0

    def seconds(self, samples: list[int], rates: list[list[float]]) -> float:
        """Of a step without its messages."""
        return max(count * max(stages) + self.fill(stages) for count, stages in zip(samples, rates))

    def fill(self, stages: list[float]) -> float:
        return self.size * (sum(stages) - max(stages))
