"""Tensor parallelism in plans: so many ranks of a host as one faster machine, a unit.

    hosts           a: ranks 0 1 2 3    b: ranks 4 5          tp_size of each host: a 4, b 2
    units           0: ranks 0 1 2 3    1: ranks 4 5          a Cluster of two machines, for which search.py plans
    plan of units   machines 0; 1                             plan of ranks   machines 0,1,2,3; 4,5   tp_size 4;2

A unit takes as long as its slowest rank: plan.py --measure has timed the ranks together, each its part of the modules,
with the all-reduces. Each rank holds what was measured of its part. Between units

    hidden states   go from each rank of a stage to the same tp rank of the next one: tp_size copies of them
    gradients       of each number are summed by the ranks that hold it, as many at a time as there are parts

so that units on unlike hosts have the one link between the hosts for all of it, and units on one host as many links as
they have ranks. All units of a host have one tp_size, and so have all stages of a pipeline.
"""

import copy
import functools
import math

from planning.machines import Cluster, Link, Machine, Setting, broken
from planning.search import Plans, Scored, find_plans
from utils import UserError

WORTH = 0.99  # of the time of a step without tensor parallelism: a plan with it takes less


def find_tensor_parallel_plans(cluster: Cluster, global_batch: int, setting: Setting, sizes: list[int] | None = None,
                               memory_fraction: float = 0.9) -> Plans:
    """As find_plans, but ranks of one host share layers where that makes the step shorter by 1 % or more.

    First all hosts have the same tp_size, or the next smaller one that divides their ranks. Then, from the best on,
    each host tries its others.
    """
    cluster, places = with_parts(cluster), {}
    for rank, (host, machine) in enumerate(zip(cluster.hosts, cluster.data["machines"])):
        places.setdefault((host, str(machine.get("device")).partition(":")[0]), []).append(rank)
    options = [[tp_size for tp_size in cluster.parts if len(ranks) % tp_size == 0] for ranks in places.values()]

    @functools.cache
    def search(choice: tuple[int, ...]) -> Plans | UserError:
        units = sorted(tuple(ranks[k : k + tp_size]) for tp_size, ranks in zip(choice, places.values())
                       for k in range(0, len(ranks), tp_size))
        try:
            found = find_plans(of_units(cluster, units), global_batch, setting, sizes, memory_fraction)
            return found._replace(best=[of_ranks(scored, units) for scored in found.best])
        except UserError as error:
            return error

    def seconds(choice: tuple[int, ...]) -> float:
        found = search(choice)
        return math.inf if isinstance(found, UserError) else found.best[0].result.step_seconds

    alone = (1,) * len(options)
    best = min((tuple(max(size for size in each if size <= most) for each in options) for most in cluster.parts),
               key=seconds)
    for k, each in enumerate(options):
        best = min(((*best[:k], size, *best[k + 1 :]) for size in each), key=seconds)
    if seconds(best) > WORTH * seconds(alone):
        best = alone
    found, plain = search(best), search(alone)
    if isinstance(found, UserError):
        raise found
    if best == alone:
        return found
    without = "without tensor parallelism"
    uniform = {without: str(plain)} if isinstance(plain, UserError) else {**plain.uniform, without: plain.best[0]}
    return found._replace(uniform=uniform)


def with_parts(cluster: Cluster) -> Cluster:
    """The cluster with its `parts` for each tp_size that was measured, in rising order. Raises UserError."""
    entries = cluster.data.get("tensor_parallel", {})
    if not isinstance(entries, dict) or not all(str(key).isdigit() and int(key) > 1 and isinstance(entry, dict)
                                                for key, entry in entries.items()):
        raise broken(f"'tensor_parallel' should have 'modules' and 'machines' by tp_size, but is {entries!r:.60}")
    cluster = copy.copy(cluster)
    cluster.parts = {1: cluster, **{tp_size: Cluster({**cluster.data, **entries[str(tp_size)]})
                                    for tp_size in sorted(map(int, entries))}}
    return cluster


def of_units(cluster: Cluster, units: list[tuple[int, ...]]) -> Cluster:
    """A cluster whose machines are these groups of ranks."""
    made = copy.copy(cluster)
    made.machines = [cluster.machines[ranks[0]] if len(ranks) == 1 else unit_of(cluster, ranks) for ranks in units]
    made.links = [[None if a == b else link_between(cluster, a, b) for b in units] for a in units]
    made.sizes = sorted(set.intersection(*(set(machine.passed["R"]) for machine in made.machines)))
    return made


def unit_of(cluster: Cluster, ranks: tuple[int, ...]) -> Machine:
    """A tp group of ranks as one machine."""
    part = cluster.parts[len(ranks)]
    machines, data = [cluster.machines[rank] for rank in ranks], [part.data["machines"][rank] for rank in ranks]

    def slowest(kind: str) -> dict[str, list[float]]:
        return {size: list(map(max, *(machine[kind][size] for machine in data)))
                for size in set.intersection(*(set(machine[kind]) for machine in data))}

    entry = {"forward": slowest("forward"), "backward": slowest("backward"),
             "optimizer_seconds": max(machine["optimizer_seconds"] for machine in data),
             "free_memory": min(machine.free_memory for machine in machines),
             "process_memory": max(machine.process_memory for machine in machines)}
    return part.read_machine(entry, ranks[0])._replace(tp_size=len(ranks))


def link_between(cluster: Cluster, a: tuple[int, ...], b: tuple[int, ...]) -> Link:
    """For all that the ranks of the unit a send to those of b."""
    links = [cluster.links[rank][other] for rank in a for other in b]
    flows = min(len(a), len(b)) if cluster.machines[a[0]].host == cluster.machines[b[0]].host else 1
    return Link(max(link.latency for link in links), flows * min(link.bandwidth for link in links))


def of_ranks(scored: Scored, units: list[tuple[int, ...]]) -> Scored:
    """A plan of units as one of ranks."""
    pipelines = tuple(pipeline._replace(machines=tuple(rank for unit in pipeline.machines for rank in units[unit]),
                                        tp_size=len(units[pipeline.machines[0]]))
                      for pipeline in scored.candidate.pipelines)
    peaks = {rank: peak for unit, peak in scored.result.peak_memory.items() for rank in units[unit]}
    return Scored(scored.candidate._replace(pipelines=pipelines), scored.result._replace(peak_memory=peaks))
