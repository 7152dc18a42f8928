"""Where the search for a plan starts, and which plans are one change away from a plan.

A grouping is a tuple of groups, one a pipeline. A group is a tuple of machines (ranks) in stage order. Machines that
are in no group idle.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

from planning.machines import Candidate

Grouping = tuple[tuple[int, ...], ...]


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


def microbatch_moves(candidate: Candidate) -> Iterator[Candidate]:
    """A micro-batch moved from one pipeline to another."""
    for shares in moves(tuple(pipeline.num_microbatches for pipeline in candidate.pipelines)):
        yield candidate._replace(pipelines=tuple(
            pipeline._replace(num_microbatches=share) for pipeline, share in zip(candidate.pipelines, shares)))


def layer_moves(candidate: Candidate) -> Iterator[Candidate]:
    """A decoder layer moved from one stage of a pipeline to another."""
    before = candidate.pipelines
    for k, pipeline in enumerate(before):
        for layers in moves(pipeline.layers):
            yield candidate._replace(pipelines=(*before[:k], pipeline._replace(layers=layers), *before[k + 1 :]))
