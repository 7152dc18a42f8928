"""The search for a plan: which machines work, in which pipelines and order, with how many layers and micro-batches.

    1. simple groupings of the machines, with layers and micro-batches by speed as far as memory allows; and the uniform
       plans that one would write by hand
    2. from the best of them on: regroup machines, move a layer or a micro-batch, as long as the step gets shorter

A grouping is a tuple of groups, one a pipeline. A group is a tuple of machines (ranks) in stage order. Machines that
are in no group idle. Plans are compared by simulating them. A lower bound of the step's time decides which ones are
simulated first, and leaves out those that can't be better.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

from planning.machines import Candidate, Cluster, Pipeline, Setting
from planning.shares import layers_by_speed, shares_by_speed, shares_that_fit
from planning.simulate import Result, peak_memory, simulate
from ranks.memory import USABLE_MEMORY
from utils import UserError

ALIKE = 1.1  # the ratio of two speeds up to which they count as one
EVEN = "data parallel, even shares"
STARTS = 6  # plans to be improved
ACTIONS = 15_000  # forward and backward actions to simulate from each of them, and twice as many before
AUTO = ("1f1b", "1f1b-2", "1f1b-3", "1f1b-4")  # schedules to compare, the one with least memory first

seconds_of = operator.attrgetter("step_seconds")  # of a Result

Grouping = tuple[tuple[int, ...], ...]


class Plans(NamedTuple):
    """`best`: shortest step first, one for each grouping of the machines, where those of about one speed are alike.
    `uniform`: by name, the plans that one would write without a planner, None where they are not possible."""

    best: list[Result]
    uniform: dict[str, Result | None]
    num_simulated: int


def find_plans(cluster: Cluster, global_batch: int, setting: Setting, sizes: list[int] | None = None,
               memory_fraction: float = USABLE_MEMORY, may_recompute: bool = False) -> Plans:
    """The best plans for `global_batch` samples a step. `sizes`: micro-batch sizes to choose from (None: all measured).
    `may_recompute`: with recomputation where none fits without it.

    The schedule "auto" is 1F1B, then with more micro-batches in flight, as long as the step gets shorter by 1 % or
    more: while messages travel over slow links, stages have something to do then, if they have the memory for it.
    Raises UserError where no size divides the batch, or where no plan fits into `memory_fraction` of the free memory.
    """
    if may_recompute and not setting.recompute:
        with contextlib.suppress(UserError):
            return find_plans(cluster, global_batch, setting, sizes, memory_fraction)
        setting = setting._replace(recompute=True)
    sizes, best = usable_sizes(cluster, global_batch, sizes), None
    for schedule in AUTO if setting.schedule == "auto" else [setting.schedule]:
        try:
            plans = Search(cluster, setting._replace(schedule=schedule), global_batch, sizes, memory_fraction).run()
        except UserError:
            if best is None:
                raise
            break
        if best and plans.best[0].step_seconds > 0.99 * best.best[0].step_seconds:
            break
        best = plans
    return best


def usable_sizes(cluster: Cluster, global_batch: int, sizes: list[int] | None) -> list[int]:
    for size in sizes or ():
        if size not in cluster.sizes:
            raise UserError(f"--micro_batch_size {size} was not measured on all machines, only "
                            f"{', '.join(map(str, cluster.sizes))}: choose one of these, or measure again")
    usable = [size for size in sizes or cluster.sizes if global_batch % size == 0]
    if not usable:
        raise UserError(f"--global_batch {global_batch} is no multiple of a micro-batch size "
                        f"({', '.join(map(str, sizes or cluster.sizes))}): use one that is, or measure other sizes")
    return usable


class Search:
    """The plans simulated so far. `memory`: bytes that each machine may use. `speed`: models a second."""

    def __init__(self, cluster: Cluster, setting: Setting, global_batch: int, sizes: list[int], memory_fraction: float):
        self.cluster, self.setting, self.global_batch, self.sizes = cluster, setting, global_batch, sizes
        self.memory_fraction = memory_fraction
        ranks, whole = range(len(cluster.machines)), (0, len(cluster.names))
        self.memory = [memory_fraction * machine.free_memory for machine in cluster.machines]
        self.speed = [1 / max(cluster.seconds(rank, sizes[0], whole, setting.kinds), 1e-12) for rank in ranks]
        self.fastest_first = sorted(ranks, key=lambda rank: -self.speed[rank])
        self.simulated: dict[Candidate, Result] = {}
        self.runs: dict = {}
        self.num_actions = 0
        self.by_speed = functools.cache(self.by_speed)  # neighbours of plans have many neighbours in common
        self.split_layers = functools.cache(self.split_layers)
        self.lower_bound = functools.cache(lambda candidate: lower_bound(cluster, candidate, setting))

    def run(self) -> Plans:
        uniform = self.uniform_plans()
        most_memory_first = sorted(self.fastest_first, key=lambda rank: -self.memory[rank])
        orders = [self.fastest_first, self.fastest_first[::-1], most_memory_first]
        candidates = [self.by_speed(groups, size) for groups in first_groupings(orders) for size in self.sizes]
        for candidate in self.promising(candidates):
            if self.num_actions > 2 * ACTIONS:
                break
            self.simulate(candidate)
        for start in self.best([0] * len(self.speed))[:STARTS]:  # the best of each choice of numbers of stages
            self.improve(start)
        if not self.simulated:
            raise UserError(self.missing_memory())
        kinds = [round(math.log(speed, ALIKE)) for speed in self.speed]
        return Plans(self.best(kinds), uniform, len(self.simulated))

    def lacks_memory(self, pipeline: Pipeline, size: int) -> list[int]:
        """The stages whose machines have too little memory."""
        peaks = peak_memory(self.cluster, pipeline, size, self.setting)
        return [s for s, rank in enumerate(pipeline.machines) if peaks[s] > self.memory[rank]]

    def split_layers(self, machines: tuple[int, ...], size: int, num_microbatches: int) -> tuple[int, ...] | None:
        """Layers of each stage by its machine's speed and memory; None where layers or memory do not suffice."""
        def too_large(shares: list[int]) -> list[int]:
            return self.lacks_memory(Pipeline(machines, tuple(shares), num_microbatches), size)

        stages = [self.cluster.layer_seconds(rank, size, self.setting.kinds) for rank in machines]
        layers = layers_by_speed(self.cluster.num_layers, stages, too_large)
        return layers and tuple(layers)

    def by_speed(self, groups: Grouping, size: int) -> Candidate | None:
        """The groups as pipelines, layers and micro-batches by speed; None where memory does not suffice."""
        number, split, each, besides = self.global_batch // size, [], [], []
        speeds = [sum(self.speed[rank] for rank in group) for group in groups]
        for group, speed in zip(groups, speeds):
            share = max(1, round(number * speed / sum(speeds)))
            while not (layers := self.split_layers(group, size, share)) and share > 1:
                share = -(-share // 2)  # fewer micro-batches need less memory
            if not layers:
                return None
            seconds = busy_seconds(self.cluster, Pipeline(group, layers, share), size, self.setting)
            split.append(layers)
            each.append(max(*seconds, 1e-12))  # the slowest stage or link sets the pace
            besides.append(sum(seconds) - each[-1])

        def pipelines(shares: list[int]) -> tuple[Pipeline, ...]:
            return tuple(map(Pipeline, groups, split, shares))

        shares = shares_that_fit(number, each, besides, lambda shares: [
            k for k, pipeline in enumerate(pipelines(shares)) if self.lacks_memory(pipeline, size)])
        return shares and Candidate(pipelines(shares), size)

    def simulate(self, candidate: Candidate) -> Result | None:
        """None where memory does not suffice."""
        if candidate not in self.simulated:
            size = candidate.micro_batch_size
            if any(self.lacks_memory(pipeline, size) for pipeline in candidate.pipelines):
                return None
            self.num_actions += sum(2 * len(pipeline.machines) * pipeline.num_microbatches
                                    for pipeline in candidate.pipelines if (pipeline, size) not in self.runs)
            self.simulated[candidate] = simulate(self.cluster, candidate, self.setting, self.runs)
        return self.simulated[candidate]

    def best(self, kinds: list[int]) -> list[Result]:
        """By time, the best of each grouping, where machines of one kind are alike."""
        found: dict = {}
        for result in sorted(self.simulated.values(), key=seconds_of):
            groups = (sorted(kinds[rank] for rank in pipeline.machines) for pipeline in result.candidate.pipelines)
            found.setdefault(tuple(sorted(map(tuple, groups))), result)
        return list(found.values())

    def promising(self, candidates: Iterable[Candidate | None], below: float = float("inf")) -> list[Candidate]:
        """Those not simulated yet whose step may take less than `below` seconds, the shortest lower bound first."""
        bounds = {candidate: self.lower_bound(candidate)
                  for candidate in candidates if candidate and candidate not in self.simulated}
        return sorted((candidate for candidate in bounds if bounds[candidate] < below), key=bounds.get)

    def improve(self, best: Result | None) -> None:
        """Goes from a plan to a better neighbour, and from there on, until there is none or ACTIONS are simulated."""
        most = self.num_actions + ACTIONS
        while best and self.num_actions <= most:
            below = best.step_seconds * (1 - 1e-6)
            found = (self.simulate(candidate) for candidate in self.promising(self.neighbours(best.candidate), below)
                     if self.num_actions <= most)
            best = next((other for other in found if other and other.step_seconds < below), None)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate | None]:
        """Other micro-batch sizes and groupings, with layers and micro-batches by speed; one of these moved."""
        groups = tuple(pipeline.machines for pipeline in candidate.pipelines)
        for size in self.sizes:
            yield self.by_speed(groups, size)
        for others in {tuple(sorted(others)) for others in regroupings(groups, len(self.speed)) if others}:
            yield self.by_speed(others, candidate.micro_batch_size)
        yield from moved(candidate)

    def uniform_plans(self) -> dict[str, Result | None]:
        """What one would write without a planner, with its best micro-batch size; None where it is not possible."""
        everyone, found = tuple(range(len(self.speed))), {}
        plans = {"the fastest machine alone": ((self.fastest_first[0],),)}
        if len(everyone) > 1:
            plans |= {"one pipeline, even layers": (everyone,),
                      EVEN: tuple((rank,) for rank in everyone)}
        for name, groups in plans.items():
            results = []
            for size in self.sizes:
                with contextlib.suppress(UserError):  # too few layers or micro-batches
                    shares = shares_by_speed(self.global_batch // size, [1.0] * len(groups))
                    split = [tuple(shares_by_speed(self.cluster.num_layers, [1.0] * len(group))) for group in groups]
                    results.append(self.simulate(Candidate(tuple(map(Pipeline, groups, split, shares)), size)))
            found[name] = min(filter(None, results), key=seconds_of, default=None)
        return found

    def missing_memory(self) -> str:
        """Why no plan fits: what the model takes, and what each machine has."""
        size = self.sizes[0]
        whole = peak_memory(self.cluster, Pipeline((0,), (self.cluster.num_layers,), 1), size, self.setting)[0]
        each = ", ".join(f"machine {rank} ({machine.host}) {memory / 1e6:.4g}"
                         for rank, (machine, memory) in enumerate(zip(self.cluster.machines, self.memory)))
        recompute = "" if self.setting.recompute else "use --recompute, "
        return (f"not enough memory for any plan: one machine would need {whole / 1e6:.4g} MB for micro-batches of "
                f"{size} samples. The machines may use, in MB: {each}: {self.memory_fraction} of what was free. To "
                f"fit, {recompute}free memory, add a machine, or take fewer layers, a smaller --seq_len or other sizes")


def first_groupings(orders: list[list[int]]) -> set[Grouping]:
    """Rows of machines, cut into pipelines or dealt to them like cards.

    Rows are all orders of up to three machines, else the first few machines of each of the `orders`.
    """
    n, found = len(orders[0]), set()
    for number in range(1, n + 1):
        some = {tuple(order[:number]) for order in orders}
        rows = set(permutations(range(n), number)) if n <= 3 else some | {tuple(sorted(row)) for row in some}
        for row in rows:
            for k in range(1, number + 1):
                cuts = [number * i // k for i in range(k + 1)]
                found.add(tuple(sorted(row[start:stop] for start, stop in pairwise(cuts))))
                found.add(tuple(sorted(row[i::k] for i in range(k))))
    return found


def regroupings(groups: Grouping, num_machines: int) -> Iterator[Grouping]:
    """Two machines swapped; a machine moved into any place of a pipeline, alone, or idle."""
    used = [rank for group in groups for rank in group]
    idle = [rank for rank in range(num_machines) if rank not in used]
    for a, b in [*combinations(used, 2), *((a, b) for a in used for b in idle)]:
        swap = {a: b, b: a}
        yield tuple(tuple(swap.get(rank, rank) for rank in group) for group in groups)
    for rank in range(num_machines):
        others = tuple(left for group in groups if (left := tuple(other for other in group if other != rank)))
        yield others
        yield (*others, (rank,))
        for k, group in enumerate(others):
            for place in range(len(group) + 1):
                yield (*others[:k], (*group[:place], rank, *group[place:]), *others[k + 1 :])


def moves(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One piece, such as a layer, moved from one that has several to another."""
    for a, b in permutations(range(len(counts)), 2):
        if counts[a] > 1:
            yield tuple(count + (k == b) - (k == a) for k, count in enumerate(counts))


def moved(candidate: Candidate) -> Iterator[Candidate]:
    """A micro-batch moved from one pipeline to another, or a decoder layer between two stages of a pipeline."""
    before = candidate.pipelines
    for shares in moves(tuple(pipeline.num_microbatches for pipeline in before)):
        yield candidate._replace(pipelines=tuple(
            pipeline._replace(num_microbatches=share) for pipeline, share in zip(before, shares)))
    for k, pipeline in enumerate(before):
        for layers in moves(pipeline.layers):
            yield candidate._replace(pipelines=(*before[:k], pipeline._replace(layers=layers), *before[k + 1 :]))


def busy_seconds(cluster: Cluster, pipeline: Pipeline, size: int, setting: Setting) -> list[float]:
    """What each stage computes for a micro-batch, and for how long it takes each link to the next stage."""
    message, machines = cluster.message_bytes(size, setting.wire_dtype), pipeline.machines
    stages = zip(machines, cluster.stages(pipeline.layers))
    return [*(cluster.seconds(rank, size, stage, setting.kinds) for rank, stage in stages),
            *(message / cluster.links[a][b].bandwidth for a, b in pairwise(machines))]


def lower_bound(cluster: Cluster, candidate: Candidate, setting: Setting) -> float:
    """Seconds that no simulated step is shorter than: the slowest stage or link of each pipeline sets its pace."""
    return max(pipeline.num_microbatches * max(busy_seconds(cluster, pipeline, candidate.micro_batch_size, setting))
               for pipeline in candidate.pipelines)
