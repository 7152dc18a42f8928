"""Shares of like pieces of work, such as decoder layers or micro-batches, for ranks of unlike speeds.

The pieces are dealt one by one, each to the rank that would be done with it first: with speeds of 4:2:1, seven layers
go 4, 2, 1. No other split has a smaller largest time, because the piece that ends last could not have ended earlier
anywhere else.
"""

import heapq
import operator
from collections.abc import Callable

from utils import UserError

GAIN = 0.03  # see samples_by_speed


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


def layers_by_speed(count: int, stages: list[tuple[float, float, float]],
                    too_large: Callable[[list[int]], list[int]] = lambda shares: []) -> list[int] | None:
    """Decoder layers of each stage, as shares_that_fit.

    `stages`: of each, the seconds of what is before the decoder layers, of one of these, and of what is behind. The
    first stage has the embedding besides its layers, the last one the head: in a small model that is many layers'
    worth.
    """
    besides = [0.0] * len(stages)
    besides[0] += stages[0][0]
    besides[-1] += stages[-1][2]
    return shares_that_fit(count, [layer for _, layer, _ in stages], besides, too_large)


def samples_by_speed(total: int, size: int, seconds: list[float], is_whole: bool = False) -> list[int]:
    """`total` samples, dealt to ranks that need `seconds` for `size` of them. Where that makes the step shorter by less
    than GAIN, ranks take whole micro-batches: a part of one takes longer than its samples' part of the time. They do so
    in any case with `is_whole`, if the samples make enough of them."""
    shares, (number, left_over) = shares_by_speed(total, seconds), divmod(total, size)
    if left_over or number < len(seconds):
        return shares
    whole = [size * share for share in shares_by_speed(number, seconds)]
    longest, shortest = (max(map(operator.mul, each, seconds)) for each in (whole, shares))
    return shares if longest > (1 + GAIN) * shortest and not is_whole else whole
