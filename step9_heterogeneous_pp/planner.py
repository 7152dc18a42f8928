"""The search for a plan: which machines work, in which pipelines and order, with how many layers and micro-batches.

    1. every way to group the machines into pipelines, some of them idle; machines that are alike are not told apart
    2. each group as one pipeline: its order, its layers by formula (estimate); then the micro-batches of each pipeline
    3. the most promising of these are simulated (simulation), and so are the uniform plans that one writes by hand
    4. from the best of them on: move a layer, move a micro-batch, swap two machines, as long as the step gets shorter

Eight unlike machines have 21147 groupings, all of which are estimated. Where there are more than 30000, a row of the
machines by speed is cut into pipelines instead, or dealt to them like cards.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations, permutations
from typing import NamedTuple

from estimate import Estimate, Shape, pipelines_of, share_out
from machines import Cluster
from pipeline_simulation import Pipeline, Setting
from simulation import Candidate, Result, peak_memory, simulate

MOST_GROUPINGS = 30000
ESTIMATES_KEPT = 200  # to be simulated
ACTIONS = 100_000  # forward and backward actions to simulate, for the estimates' best and then for improving on these
ALIKE = 0.05  # machines whose measurements differ by less than this share are alike


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
    estimates = {size: Estimate(cluster, setting, size, search.memory) for size in sizes}
    fastest_first = sorted(range(len(cluster.machines)), key=lambda rank: -estimates[sizes[0]].speed(rank))
    groupings = list(find_groupings(search.classes, fastest_first))
    promising, num_estimated = rank_by_estimate(groupings, estimates, global_batch)
    uniform = {name: search.uniform(options)
               for name, options in uniform_plans(cluster, global_batch, sizes, fastest_first).items()}
    search.spend(ACTIONS, (search.score(candidate) for candidate in promising))
    for start in search.best(3):
        search.spend(ACTIONS // 3, search.improve(start))
    best = search.best()
    if not best:
        raise ValueError(missing_memory(cluster, estimates[sizes[0]], global_batch // sizes[0], memory_fraction))
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

    def improve(self, scored: Scored) -> Iterator[None]:
        """Goes from neighbour to better neighbour; a yield for each that was tried."""
        improved = True
        while improved:
            improved = False
            for candidate in neighbours(scored.candidate, self.kind):
                is_new = candidate not in self.scored
                other = self.score(candidate) if is_new else None
                if other and other.result.step_seconds < scored.result.step_seconds * (1 - 1e-6):
                    scored, improved = other, True
                    break
                yield


def neighbours(candidate: Candidate, kind: dict[int, int]) -> Iterator[Candidate]:
    """A micro-batch moved between pipelines, a layer between stages, or two machines swapped that are of unlike `kind`."""
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


def alike(cluster: Cluster) -> list[list[int]]:
    """The machines in classes: within one, exchanging two machines changes no measurement by more than ALIKE."""
    def close(a: float, b: float) -> bool:
        return abs(a - b) <= ALIKE * max(abs(a), abs(b))

    def same(i: int, j: int) -> bool:
        a, b = cluster.machines[i], cluster.machines[j]
        pairs = [(a.free_memory, b.free_memory), (a.optimizer_seconds, b.optimizer_seconds)]
        pairs += [(a.passed[kind][size][-1], b.passed[kind][size][-1]) for kind in "FB" for size in cluster.sizes]
        for k in range(len(cluster.machines)):
            if k not in (i, j):
                for one, other in ((cluster.links[i][k], cluster.links[j][k]), (cluster.links[k][i], cluster.links[k][j])):
                    pairs += zip(one, other)
        return all(close(*pair) for pair in [*pairs, *zip(cluster.links[i][j], cluster.links[j][i])])

    classes: list[list[int]] = []
    for rank in range(len(cluster.machines)):
        for members in classes:
            if all(same(rank, member) for member in members):
                members.append(rank)
                break
        else:
            classes.append([rank])
    return classes


def find_groupings(classes: list[list[int]], fastest_first: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Groups of machines, one a pipeline. All of them, where two that differ by machines of one class are the same."""
    found: set[tuple] = {()}  # a grouping: groups of classes, sorted
    for kind, members in enumerate(classes):
        for _ in members:
            larger = set(found)  # this machine idles
            for groups in found:
                for k in range(len(groups) + 1):
                    group = (*groups[k], kind) if k < len(groups) else (kind,)
                    larger.add(tuple(sorted((*groups[:k], group, *groups[k + 1 :]))))
            found = larger
            if len(found) > MOST_GROUPINGS:
                yield from rows_of(fastest_first)
                return
    for groups in found - {()}:
        ranks = [iter(members) for members in classes]
        yield [tuple(next(ranks[kind]) for kind in group) for group in groups]


def rows_of(fastest_first: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """The fastest machines, in that order or in the order of their ranks, cut into pipelines or dealt to them."""
    for number in range(1, len(fastest_first) + 1):
        for row in (fastest_first[:number], sorted(fastest_first[:number])):
            for k in range(1, number + 1):
                cuts = [number * i // k for i in range(k + 1)]
                yield [tuple(row[start:stop]) for start, stop in zip(cuts, cuts[1:])]
                yield [tuple(row[i::k]) for i in range(k)]


def rank_by_estimate(groupings: list[list[tuple]], estimates: dict[int, Estimate], global_batch: int) -> tuple[list, int]:
    """The candidates of shortest estimated step, shortest first, and how many were looked at."""
    kept: list[tuple] = []  # a heap, the worst first
    order = 0
    for size, estimate in estimates.items():
        num_microbatches = global_batch // size
        total = sum(map(estimate.speed, range(len(estimate.memory))))
        shapes: dict[tuple, Shape | None] = {}
        for groups in groupings:
            for group in groups:
                if group not in shapes:
                    share = num_microbatches * sum(map(estimate.speed, group)) / total
                    shapes[group] = estimate.best_shape(group, max(1, round(share)))
            order += 1
            chosen = [shapes[group] for group in groups]
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


def missing_memory(cluster: Cluster, estimate: Estimate, num_microbatches: int, memory_fraction: float) -> str:
    """Why no plan fits: what the machines can hold as one pipeline, those with most memory first."""
    order = sorted(range(len(cluster.machines)), key=lambda rank: -estimate.memory[rank])[: cluster.num_layers]
    held = [max(0, estimate.most_layers(rank, s, len(order), num_microbatches)) for s, rank in enumerate(order)]
    whole = peak_memory(cluster, Pipeline((0,), (cluster.num_layers,), 1), estimate.size, estimate.setting)[0]
    lines = [f"machine {rank} ({cluster.machines[rank].host}) {estimate.memory[rank] / 1e6:.4g} MB for {layers} of the "
             "layers" for rank, layers in zip(order, held)]
    return (f"not enough memory for any plan: the model takes {whole / 1e6:.4g} MB, and all machines may use "
            f"{sum(estimate.memory) / 1e6:.4g} MB: {memory_fraction} of what was free. In one pipeline, with "
            f"micro-batches of {estimate.size} samples: {'; '.join(lines)}: {sum(held)} of {cluster.num_layers} layers "
            "are placed. Free memory, add a machine, or take fewer layers, a smaller --seq_len or other sizes")
