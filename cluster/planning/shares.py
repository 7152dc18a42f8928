"""Shares of like pieces of work, such as decoder layers or micro-batches, for ranks of unlike speeds.

The pieces are dealt one by one, each to the rank that would be done with it first: with speeds of 4:2:1, seven layers
go 4, 2, 1. No other split has a smaller largest time, because the piece that ends last could not have ended earlier
anywhere else.
"""

import heapq
from collections.abc import Callable

from utils import UserError


def shares_by_speed(total: int, seconds_each: list[float], limits: list[int] | None = None,
                    besides: list[float] | None = None) -> list[int]:
    """How many of `total` pieces each rank takes, at least one, so that the slowest rank is done as early as possible.

    `seconds_each`: of one piece, by rank. `limits`: the most pieces that a rank can take. `besides`: seconds that a
    rank needs in any case. Of ranks that would be done at the same time, the lower one takes the piece.
    Raises UserError where there are fewer pieces than ranks, or where the limits leave pieces over.
    """
    num_ranks = len(seconds_each)
    limits, besides = limits or [total] * num_ranks, besides or [0.0] * num_ranks
    if total < num_ranks:
        raise UserError(f"{total} layers or micro-batches for {num_ranks} ranks: each needs at least one")
    if min(limits) < 1 or sum(limits) < total:
        raise UserError(f"{total} layers or micro-batches for {num_ranks} ranks that can take {limits} of them at "
                        "most: add a rank, or raise the limits; each rank needs at least one")
    shares = [1] * num_ranks
    done = [(besides[rank] + 2 * seconds, rank) for rank, seconds in enumerate(seconds_each) if limits[rank] > 1]
    heapq.heapify(done)  # when each rank would be done with its next piece
    for _ in range(total - num_ranks):
        _, rank = heapq.heappop(done)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(done, (besides[rank] + (shares[rank] + 1) * seconds_each[rank], rank))
    return shares


def shares_that_fit(total: int, seconds_each: list[float], besides: list[float],
                    too_large: Callable[[list[int]], list[int]]) -> list[int] | None:
    """shares_by_speed within what memory allows; None where it does not suffice.

    `too_large(shares)` names the ranks whose share does not fit. Each of them is dealt fewer pieces, until all fit.
    """
    limits = [total] * len(seconds_each)
    while len(limits) <= total <= sum(limits) and min(limits) > 0:
        shares = shares_by_speed(total, seconds_each, limits, besides)
        if not (ranks := too_large(shares)):
            return shares
        for rank in ranks:
            limits[rank] = shares[rank] - 1
    return None
