"""The search for a plan: which machines work, in which pipelines and order, with how many layers and micro-batches.

    1. every group of machines as one pipeline, in a few orders, layers by speed: a few micro-batches are simulated,
       which gives its pace, the seconds of the first micro-batch and of each further one
    2. every way to group the machines into pipelines, some machines idle: micro-batches by pace
    3. the most promising of these are simulated whole, and so are the uniform plans that one writes by hand
    4. from the best of them on: move a layer, move a micro-batch, swap two machines, as long as the step gets shorter

The paces only decide which plans are simulated first. Eight unlike machines have 21146 groupings of 255 groups.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import combinations, permutations
from typing import NamedTuple

from planning.groupings import alike, find_groupings
from planning.machines import Cluster
from planning.moves import layer_moves, microbatch_moves
from planning.pipeline_simulation import Pipeline, Setting
from planning.shares import shares_that_fit
from planning.simulation import Candidate, Result, peak_memory, run_pipeline, simulate
from utils import UserError

KEPT = 200  # groupings to be simulated
STARTS = 10  # of these, to be improved
ACTIONS = 60_000  # forward and backward actions to simulate, for the groupings kept and then for improving on these


class Pace(NamedTuple):
    """A pipeline without its number of micro-batches. `each`: seconds of a micro-batch after the `first`."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    first: float
    each: float

    def time(self, num_microbatches: int) -> float:
        return self.first + (num_microbatches - 1) * self.each


class Scored(NamedTuple):
    candidate: Candidate
    result: Result


class Plans(NamedTuple):
    """`best`: shortest step first, one for each grouping of the machines. `uniform`: by name, the plans that one would
    write without a planner, or the reason why they are not possible."""

    best: list[Scored]
    uniform: dict[str, Scored | str]
    num_groupings: int
    num_simulated: int


def find_plans(cluster: Cluster, global_batch: int, setting: Setting, sizes: list[int] | None = None,
               memory_fraction: float = 0.9) -> Plans:
    """The best plans for `global_batch` samples a step. `sizes`: micro-batch sizes to choose from (None: all measured).

    Raises UserError where no size divides the batch, or where no plan fits into `memory_fraction` of the free memory.
    """
    search = Search(cluster, setting, global_batch, usable_sizes(cluster, global_batch, sizes), memory_fraction)
    groupings = list(find_groupings(search.classes, search.fastest_first))
    promising = search.promising(groupings)
    uniform = {name: search.uniform(options) for name, options in search.uniform_plans().items()}
    search.spend(ACTIONS, map(search.score, promising))
    most = search.num_actions + ACTIONS
    for start in search.best()[:STARTS]:
        search.spend(min(ACTIONS // 3, most - search.num_actions), search.improve(start))
    if not search.scored:
        raise UserError(search.missing_memory(memory_fraction))
    return Plans(search.best(), uniform, len(groupings), len(search.scored))


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
    """What has been simulated so far. `memory`: bytes that each machine may use."""

    def __init__(self, cluster: Cluster, setting: Setting, global_batch: int, sizes: list[int], memory_fraction: float):
        self.cluster, self.setting, self.global_batch, self.sizes = cluster, setting, global_batch, sizes
        self.memory = [memory_fraction * machine.free_memory for machine in cluster.machines]
        self.classes = alike(cluster)
        self.kind = {rank: kind for kind, members in enumerate(self.classes) for rank in members}
        whole = (0, len(cluster.names))
        self.speed = [1 / max(self.seconds(rank, sizes[0], whole), 1e-12) for rank in range(len(cluster.machines))]
        self.fastest_first = sorted(range(len(self.speed)), key=lambda rank: -self.speed[rank])
        self.scored: dict[Candidate, Scored] = {}
        self.paces: dict[tuple, Pace | None] = {}
        self.runs: dict = {}
        self.num_actions = 0

    def seconds(self, rank: int, size: int, stage: tuple[int, int]) -> float:
        return sum(self.cluster.seconds(rank, kind, size, stage) for kind in "FB")

    def lacks_memory(self, pipeline: Pipeline, size: int) -> list[int]:
        """The stages whose machines have too little memory."""
        peaks = peak_memory(self.cluster, pipeline, size, self.setting)
        return [s for s, rank in enumerate(pipeline.machines) if peaks[s] > self.memory[rank]]

    def split_layers(self, machines: tuple[int, ...], size: int, num_microbatches: int) -> tuple[int, ...] | None:
        """Layers of each stage by its machine's speed and memory; None where layers or memory do not suffice."""
        cluster, p = self.cluster, len(machines)
        first, stop = cluster.first_layer, cluster.first_layer + cluster.num_layers
        each = [self.seconds(rank, size, (first, stop)) / cluster.num_layers for rank in machines]
        besides = [0.0] * p
        besides[0] += self.seconds(machines[0], size, (0, first))
        besides[-1] += self.seconds(machines[-1], size, (stop, len(cluster.names)))
        layers = shares_that_fit(cluster.num_layers, each, besides, lambda shares: self.lacks_memory(
            Pipeline(machines, tuple(shares), num_microbatches), size))
        return layers and tuple(layers)

    def pace(self, group: tuple[int, ...], size: int, most: int) -> Pace | None:
        """The group's quickest order for `most` micro-batches or, where memory does not suffice, for fewer of them."""
        if (group, size, most) not in self.paces:
            found = [self.pace_of(order, layers, size) for order in self.orders(group)
                     if (layers := self.split_layers(order, size, most))]
            self.paces[group, size, most] = (
                min(found, key=lambda pace: pace.time(most)) if found
                else self.pace(group, size, -(-most // 2)) if most > 1 else None)
        return self.paces[group, size, most]

    def pace_of(self, machines: tuple[int, ...], layers: tuple[int, ...], size: int) -> Pace:
        few, more = len(machines), 2 * len(machines)
        ends = [max(run_pipeline(self.cluster, Pipeline(machines, layers, number), size, self.setting, self.runs).ends)
                for number in (few, more)]
        each = max((ends[1] - ends[0]) / (more - few), 1e-12)
        return Pace(machines, layers, ends[0] - (few - 1) * each, each)

    def orders(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All orders of up to three machines; of more by speed, and from each machine on to the best connected one."""
        if len(group) <= 3:
            return list(permutations(group))
        by_speed = tuple(sorted(group, key=lambda rank: self.speed[rank]))
        found = [by_speed, by_speed[::-1]]
        for first in group:
            path, left = [first], set(group) - {first}
            while left:
                path.append(max(left, key=lambda rank: (self.cluster.links[path[-1]][rank].bandwidth, -rank)))
                left.remove(path[-1])
            found.append(tuple(path))
        return list({tuple(self.kind[rank] for rank in order): order for order in found}.values())

    def promising(self, groupings: list[list[tuple]]) -> list[Candidate]:
        """Those of shortest expected step, shortest first: what the micro-batches take, and the gradients' all-reduce
        over its slowest link."""
        kept: list[tuple] = []  # a heap, the worst first
        for size in self.sizes:
            for order, groups in enumerate(groupings):
                number = self.global_batch // size
                speeds = [sum(self.speed[rank] for rank in group) for group in groups]
                halvings = [int(math.log2(sum(speeds) / speed) + 1e-9) for speed in speeds]
                paces = [self.pace(group, size, -(-number // 2**k)) for group, k in zip(groups, halvings)]
                if None in paces or len(paces) > number:
                    continue
                rate = sum(1 / pace.each for pace in paces)
                seconds = (number - len(paces) + sum(pace.first / pace.each for pace in paces)) / rate
                seconds += self.gradient_seconds(paces)
                heapq.heappush(kept, (-seconds, size, order, paces))
                if len(kept) > KEPT:
                    heapq.heappop(kept)
        candidates = (self.share_microbatches(paces, size) for _, size, _, paces in sorted(kept, reverse=True))
        return [candidate for candidate in candidates if candidate]

    def gradient_seconds(self, paces: list[Pace]) -> float:
        """Of eight buckets with the parameters of the largest stage, over the slowest link between the pipelines."""
        n, cluster = len(paces), self.cluster
        links = [cluster.links[a.machines[0]][b.machines[0]] for a, b in permutations(paces, 2)]
        if n == 1:
            return 0.0
        most = max(max(pace.layers) for pace in paces) / cluster.num_layers * cluster.parameters_before[-1]
        num_bytes = cluster.gradient_bytes(most, self.setting.gradient_wire_dtype)
        return 2 * (n - 1) * (num_bytes / n / min(link.bandwidth for link in links)
                              + 8 * max(link.latency for link in links))

    def share_microbatches(self, paces: list[Pace], size: int) -> Candidate | None:
        """Micro-batches of each pipeline, so that the last one ends early; None where memory does not suffice."""
        def pipelines(shares: list[int]) -> tuple[Pipeline, ...]:
            return tuple(Pipeline(pace.machines, pace.layers, share) for pace, share in zip(paces, shares))

        shares = shares_that_fit(
            self.global_batch // size, [pace.each for pace in paces], [pace.first - pace.each for pace in paces],
            lambda shares: [k for k, pipeline in enumerate(pipelines(shares)) if self.lacks_memory(pipeline, size)])
        return shares and Candidate(pipelines(shares), size)

    def score(self, candidate: Candidate) -> Scored | None:
        """The simulated candidate, None where memory does not suffice."""
        if candidate in self.scored:
            return self.scored[candidate]
        size = candidate.micro_batch_size
        if any(self.lacks_memory(pipeline, size) for pipeline in candidate.pipelines):
            return None
        self.num_actions += sum(2 * len(pipeline.machines) * pipeline.num_microbatches
                                for pipeline in candidate.pipelines if (pipeline, size) not in self.runs)
        self.scored[candidate] = Scored(candidate, simulate(self.cluster, candidate, self.setting, self.runs))
        return self.scored[candidate]

    def spend(self, num_actions: int, steps: Iterable) -> None:
        """Goes through `steps` until so many actions have been simulated."""
        most = self.num_actions + num_actions
        for _ in steps:
            if self.num_actions >= most:
                return

    def best(self) -> list[Scored]:
        """By time, the best of each grouping."""
        found: dict = {}
        for scored in sorted(self.scored.values(), key=lambda scored: scored.result.step_seconds):
            groups = tuple(sorted(tuple(sorted(self.kind[rank] for rank in pipeline.machines))
                                  for pipeline in scored.candidate.pipelines))
            found.setdefault(groups, scored)
        return list(found.values())

    def improve(self, scored: Scored) -> Iterator[None]:
        """Goes from neighbour to better neighbour; a yield for each that was tried."""
        improved = True
        while improved:
            improved = False
            for candidate in self.neighbours(scored.candidate):
                is_new = candidate not in self.scored
                other = self.score(candidate) if is_new else None
                if other and other.result.step_seconds < scored.result.step_seconds * (1 - 1e-6):
                    scored, improved = other, True
                    break
                yield

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """A micro-batch moved, a layer moved, two machines swapped, or a layer moved after such a swap."""
        yield from microbatch_moves(candidate)
        yield from layer_moves(candidate)
        swapped = list(self.swaps(candidate))
        yield from swapped
        for other in swapped:
            yield from layer_moves(other)

    def swaps(self, candidate: Candidate) -> Iterator[Candidate]:
        """Two machines of unlike kind, one of which may idle; their pipelines' layers are split anew."""
        used = [rank for pipeline in candidate.pipelines for rank in pipeline.machines]
        idle = [rank for rank in self.kind if rank not in used]
        for a, b in [*combinations(used, 2), *((a, b) for a in used for b in idle)]:
            if self.kind[a] == self.kind[b]:
                continue
            swap, pipelines = {a: b, b: a}, []
            for machines, layers, number in candidate.pipelines:
                if a in machines or b in machines:
                    machines = tuple(swap.get(rank, rank) for rank in machines)
                    layers = self.split_layers(machines, candidate.micro_batch_size, number)
                pipelines.append(Pipeline(machines, layers, number))
            if all(pipeline.layers for pipeline in pipelines):
                yield candidate._replace(pipelines=tuple(pipelines))

    def uniform_plans(self) -> dict[str, list[Candidate] | str]:
        """What one would write without a planner: name -> a candidate per micro-batch size, or why there is none."""
        n, layers = len(self.cluster.machines), self.cluster.num_layers
        totals = [(size, self.global_batch // size) for size in self.sizes]
        alone, everyone = (self.fastest_first[0],), tuple(range(n))
        plans = {"the fastest machine alone": [Candidate((Pipeline(alone, (layers,), m),), size) for size, m in totals]}
        if n == 1:
            return plans
        even = tuple(layers // n + (s < layers % n) for s in range(n))
        plans["one pipeline, even layers"] = f"{n} stages for {layers} decoder layers" if n > layers else [
            Candidate((Pipeline(everyone, even, m),), size) for size, m in totals]
        plans["data parallel, even shares"] = [
            Candidate(tuple(Pipeline((k,), (layers,), m // n + (k < m % n)) for k in everyone), size)
            for size, m in totals if m >= n] or f"{self.global_batch} samples for {n} machines"
        return plans

    def uniform(self, options: list[Candidate] | str) -> Scored | str:
        """The best of the options, or why there is none."""
        if isinstance(options, str):
            return options
        if scored := [score for candidate in options if (score := self.score(candidate))]:
            return min(scored, key=lambda score: score.result.step_seconds)
        pipeline, stages = next((pipeline, stages) for pipeline in options[0].pipelines
                                if (stages := self.lacks_memory(pipeline, options[0].micro_batch_size)))
        rank = pipeline.machines[stages[0]]
        return f"the memory of machine {rank} ({self.cluster.machines[rank].host}) does not suffice"

    def missing_memory(self, memory_fraction: float) -> str:
        """Why no plan fits: what the model takes, and what each machine has."""
        layers, size = self.cluster.num_layers, self.sizes[0]
        whole = peak_memory(self.cluster, Pipeline((0,), (layers,), 1), size, self.setting)[0]
        each = ", ".join(f"machine {rank} ({machine.host}) {memory / 1e6:.4g}"
                         for rank, (machine, memory) in enumerate(zip(self.cluster.machines, self.memory)))
        return (f"not enough memory for any plan: one machine would need {whole / 1e6:.4g} MB for the model and a "
                f"micro-batch of {size} samples, and stages need the activations of several. The machines may use, in "
                f"MB: {each}: {memory_fraction} of what was free. Free memory, add a machine, or take fewer layers, a "
                "smaller --seq_len or other sizes")
