"""Every way to group machines into pipelines, where machines that are alike are not told apart."""

from collections.abc import Iterator
from itertools import pairwise

from planning.machines import Cluster

MOST_GROUPINGS = 30000
ALIKE = 0.05  # machines whose measurements differ by less than this share are alike


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
                pairs += zip(cluster.links[i][k], cluster.links[j][k])
                pairs += zip(cluster.links[k][i], cluster.links[k][j])
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
                yield [tuple(row[start:stop]) for start, stop in pairwise(cuts)]
                yield [tuple(row[i::k]) for i in range(k)]
