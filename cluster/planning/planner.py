"""The search for a plan: which machines work, in which pipelines and order, with how many layers and micro-batches.

    1. every way to group the machines into pipelines, some of them idle; machines that are alike are not told apart
    2. each group as one pipeline: its order, its layers by formula (estimate); then the micro-batches of each pipeline
    3. the most promising of these are simulated (simulation), and so are the uniform plans that one writes by hand
    4. from the best of them on: move a layer, move a micro-batch, swap two machines, as long as the step gets shorter

Eight unlike machines have 21147 groupings, all of which are estimated. Where there are more than 30000, a row of the
machines by speed is cut into pipelines instead, or dealt to them like cards.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import combinations, permutations
from typing import NamedTuple

from planning.estimate import Estimate, Shape, pipelines_of, share_out
from planning.groupings import alike, find_groupings
from planning.machines import Cluster
from planning.pipeline_simulation import Pipeline, Setting
from planning.simulation import Candidate, Result, peak_memory, simulate

ESTIMATES_KEPT = 200  # to be simulated
ALTERNATIVES = 8  # orders and splits of the machines of a pipeline
STARTS = 10  # of these, to be improved
ACTIONS = 60_000  # forward and backward actions to simulate, for the estimates' best and then for improving on these


class Scored(NamedTuple):
    candidate: Candidate
    result: Result


class Plans(NamedTuple):
    """`best`: shortest step first, one for each grouping of the machines. `uniform`: by name, the plans that one would
    write without a planner, or the reason why they can't be."""

    best: list[Scored]
    uniform: dict[str, Scored | str]
    num_estimated: int
    num_simulated: int


def find_plans(cluster: Cluster, global_batch: int, setting: Setting, sizes: list[int] | None = None,
               memory_fraction: float = 0.9) -> Plans:
    """The best plans for `global_batch` samples a step. `sizes`: micro-batch sizes to choose from (None: all measured).

    Raises ValueError where no size divides the batch, or where no plan fits into `memory_fraction` of the free memory.
    """
    sizes = usable_sizes(cluster, global_batch, sizes)
    search = Search(cluster, setting, memory_fraction)
    estimates = {size: Estimate(cluster, setting, size, global_batch // size, search.memory) for size in sizes}
    fastest_first = sorted(range(len(cluster.machines)), key=lambda rank: -estimates[sizes[0]].speed(rank))
    groupings = list(find_groupings(search.classes, fastest_first))
    promising, num_estimated = rank_by_estimate(groupings, estimates)
    uniform = {name: search.uniform(options)
               for name, options in uniform_plans(cluster, global_batch, sizes, fastest_first).items()}
    search.spend(ACTIONS, (search.score(candidate) for candidate in promising))
    most = search.num_actions + ACTIONS
    for start in search.best(STARTS):
        estimate = estimates[start.candidate.micro_batch_size]
        search.spend(min(ACTIONS // 3, most - search.num_actions), search.improve(start, estimate))
    best = search.best()
    if not best:
        raise ValueError(missing_memory(cluster, estimates[sizes[0]], memory_fraction))
    return Plans(best, uniform, num_estimated, len(search.scored))


def usable_sizes(cluster: Cluster, global_batch: int, sizes: list[int] | None) -> list[int]:
    for size in sizes or ():
        if size not in cluster.sizes:
            raise ValueError(f"--micro_batch_size {size} was not measured on all machines, only "
                             f"{', '.join(map(str, cluster.sizes))}: choose one of these, or measure again")
    usable = [size for size in sizes or cluster.sizes if global_batch % size == 0]
    if not usable:
        raise ValueError(f"--global_batch {global_batch} is no multiple of a micro-batch size "
                         f"({', '.join(map(str, sizes or cluster.sizes))}): use one that is, or measure other sizes")
    return usable


class Search:
    """The candidates simulated so far. `memory`: bytes that each machine may use."""

    def __init__(self, cluster: Cluster, setting: Setting, memory_fraction: float):
        self.cluster, self.setting = cluster, setting
        self.classes = alike(cluster)
        self.kind = {rank: kind for kind, members in enumerate(self.classes) for rank in members}
        self.memory = [memory_fraction * machine.free_memory for machine in cluster.machines]
        self.scored: dict[Candidate, Scored] = {}
        self.runs: dict = {}
        self.num_actions = 0

    def too_much(self, candidate: Candidate) -> int | None:
        """The first machine whose memory does not suffice."""
        for pipeline in candidate.pipelines:
            peaks = peak_memory(self.cluster, pipeline, candidate.micro_batch_size, self.setting)
            for rank, peak in zip(pipeline.machines, peaks):
                if peak > self.memory[rank]:
                    return rank
        return None

    def score(self, candidate: Candidate) -> Scored | None:
        """The simulated candidate, None where memory does not suffice."""
        if candidate in self.scored:
            return self.scored[candidate]
        if self.too_much(candidate) is not None:
            return None
        self.num_actions += sum(2 * len(pipeline.machines) * pipeline.num_microbatches
                                for pipeline in candidate.pipelines
                                if (pipeline, candidate.micro_batch_size) not in self.runs)
        result = simulate(self.cluster, candidate, self.setting, self.runs)
        self.scored[candidate] = Scored(candidate, result)
        return self.scored[candidate]

    def spend(self, num_actions: int, steps: Iterable) -> None:
        """Goes through `steps` until so many actions have been simulated."""
        most = self.num_actions + num_actions
        for _ in steps:
            if self.num_actions >= most:
                return

    def best(self, number: int | None = None) -> list[Scored]:
        """By time, the best of each grouping."""
        found: dict = {}
        for scored in sorted(self.scored.values(), key=lambda scored: scored.result.step_seconds):
            groups = tuple(sorted(tuple(sorted(self.kind[rank] for rank in pipeline.machines))
                                  for pipeline in scored.candidate.pipelines))
            found.setdefault(groups, scored)
        return list(found.values())[:number]

    def uniform(self, options: list[Candidate] | str) -> Scored | str:
        """The best of the options, or why there is none."""
        if isinstance(options, str):
            return options
        scored = [score for candidate in options if (score := self.score(candidate))]
        if scored:
            return min(scored, key=lambda score: score.result.step_seconds)
        rank = self.too_much(options[0])
        return f"the memory of machine {rank} ({self.cluster.machines[rank].host}) does not suffice"

    def improve(self, scored: Scored, estimate: Estimate) -> Iterator[None]:
        """Goes from neighbour to better neighbour; a yield for each that was tried."""
        improved = True
        while improved:
            improved = False
            for candidate in neighbours(scored.candidate, self.kind, estimate):
                is_new = candidate not in self.scored
                other = self.score(candidate) if is_new else None
                if other and other.result.step_seconds < scored.result.step_seconds * (1 - 1e-6):
                    scored, improved = other, True
                    break
                yield


def neighbours(candidate: Candidate, kind: dict[int, int], estimate: Estimate) -> Iterator[Candidate]:
    """A micro-batch moved between pipelines, a pipeline in another order or split, a layer moved between its stages, or
    two machines swapped that are of unlike `kind`."""
    pipelines = candidate.pipelines

    def changed(**replaced: Pipeline) -> Candidate:
        new = tuple(replaced.get(f"p{k}", pipeline) for k, pipeline in enumerate(pipelines))
        return candidate._replace(pipelines=new)

    for a, b in permutations(range(len(pipelines)), 2):
        m, n = pipelines[a].num_microbatches, pipelines[b].num_microbatches
        if m > 1:
            yield changed(**{f"p{a}": pipelines[a]._replace(num_microbatches=m - 1),
                             f"p{b}": pipelines[b]._replace(num_microbatches=n + 1)})
    for k, pipeline in enumerate(pipelines):
        for shape in estimate.shapes(tuple(sorted(pipeline.machines)), pipeline.num_microbatches)[:ALTERNATIVES]:
            yield changed(**{f"p{k}": pipeline._replace(machines=shape.machines, layers=shape.layers)})
        for s, t in permutations(range(len(pipeline.layers)), 2):
            if pipeline.layers[s] > 1:
                layers = list(pipeline.layers)
                layers[s], layers[t] = layers[s] - 1, layers[t] + 1
                yield changed(**{f"p{k}": pipeline._replace(layers=tuple(layers))})
    used = [rank for pipeline in pipelines for rank in pipeline.machines]
    idle = [rank for rank in kind if rank not in used]
    for a, b in [*combinations(used, 2), *((a, b) for a in used for b in idle)]:
        swap = {a: b, b: a}
        if kind[a] == kind[b]:
            continue
        yield candidate._replace(pipelines=tuple(
            pipeline._replace(machines=tuple(swap.get(rank, rank) for rank in pipeline.machines))
            for pipeline in pipelines))


def rank_by_estimate(groupings: list[list[tuple]], estimates: dict[int, Estimate]) -> tuple[list, int]:
    """The candidates of shortest estimated step, shortest first, and how many were looked at."""
    kept: list[tuple] = []  # a heap, the worst first
    order = 0
    for size, estimate in estimates.items():
        num_microbatches = estimate.num_microbatches
        speed = {group: sum(map(estimate.speed, group)) for groups in groupings for group in groups}
        shapes: dict[tuple, Shape | None] = {}
        for groups in groupings:
            order += 1
            total, chosen = sum(speed[group] for group in groups), []
            for group in groups:
                halvings = int(math.log2(total / speed[group]) + 1e-9)  # its share is at most the half, a quarter, ...
                key = group, max(1, -(-num_microbatches // 2**halvings))
                if key not in shapes:
                    shapes[key] = first_shape(estimate, *key)
                chosen.append(shapes[key])
            if None in chosen or (shares := share_out(chosen, num_microbatches)) is None:
                continue
            seconds = max(shape.time(share) for shape, share in zip(chosen, shares))
            if len(kept) == ESTIMATES_KEPT and seconds >= -kept[0][0]:
                continue
            seconds += estimate.gradient_seconds(chosen)
            heapq.heappush(kept, (-seconds, order, Candidate(pipelines_of(chosen, shares), size)))
            if len(kept) > ESTIMATES_KEPT:
                heapq.heappop(kept)
    return [candidate for _, _, candidate in sorted(kept, reverse=True)], order


def first_shape(estimate: Estimate, group: tuple[int, ...], num_microbatches: int) -> Shape | None:
    """The quickest for so many micro-batches or, where memory does not suffice, for a smaller share of them."""
    while not (shapes := estimate.shapes(group, num_microbatches)) and num_microbatches > 1:
        num_microbatches = -(-num_microbatches // 2)
    return shapes[0] if shapes else None


def uniform_plans(cluster: Cluster, global_batch: int, sizes: list[int], fastest_first: list[int]) -> dict:
    """What one would write without a planner: name -> its candidates of each micro-batch size, or why it can't be."""
    n, layers = len(cluster.machines), cluster.num_layers
    alone, plans = (fastest_first[0],), {}
    plans["the fastest machine alone"] = [
        Candidate((Pipeline(alone, (layers,), global_batch // size),), size) for size in sizes]
    if n == 1:
        return plans
    name = "one pipeline, even layers"
    plans[name] = f"{n} stages for {layers} decoder layers"
    if n <= layers:
        even = tuple(layers // n + (s < layers % n) for s in range(n))
        plans[name] = [Candidate((Pipeline(tuple(range(n)), even, global_batch // size),), size) for size in sizes]
    name, options = "data parallel, even shares", []
    for size in sizes:
        share, left = divmod(global_batch // size, n)
        if share:
            options.append(Candidate(tuple(Pipeline((k,), (layers,), share + (k < left)) for k in range(n)), size))
    plans[name] = options or f"{global_batch} samples for {n} machines"
    return plans


def missing_memory(cluster: Cluster, estimate: Estimate, memory_fraction: float) -> str:
    """Why no plan fits: what the machines can hold as one pipeline, those with most memory first."""
    order = sorted(range(len(cluster.machines)), key=lambda rank: -estimate.memory[rank])[: cluster.num_layers]
    p, m = len(order), estimate.num_microbatches
    held = [max(0, estimate.most_layers(rank, s, p, m)) for s, rank in enumerate(order)]
    whole = peak_memory(cluster, Pipeline((0,), (cluster.num_layers,), 1), estimate.size, estimate.setting)[0]
    lines = [f"machine {rank} ({cluster.machines[rank].host}) {estimate.memory[rank] / 1e6:.4g} MB for {layers} of the "
             "layers" for rank, layers in zip(order, held)]
    return (f"not enough memory for any plan: the model takes {whole / 1e6:.4g} MB, and all machines may use "
            f"{sum(estimate.memory) / 1e6:.4g} MB: {memory_fraction} of what was free. In one pipeline, with "
            f"micro-batches of {estimate.size} samples: {'; '.join(lines)}: {sum(held)} of {cluster.num_layers} layers "
            "are placed. Free memory, add a machine, or take fewer layers, a smaller --seq_len or other sizes")
