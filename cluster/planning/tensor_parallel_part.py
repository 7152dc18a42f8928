"""What one rank of a tensor-parallel group computes, without the others: for plan.py --measure.

The first rank's part of each module is as large as any other's. It computes alone here, and where training would sum
over the group, the bytes of the sum are noted. What the sums take is told by the links between the ranks.
"""

import contextlib
import types
from collections import Counter
from collections.abc import Callable, Iterator

import process_group_manager as pgm
import tensor_parallel
from machine_facts import gather, machines, say
from planning.machines import Link
from utils import UserError

SMALL = 1 << 20  # bytes up to which tensor_parallel.all_reduce takes log2(tp_size) rounds, on CPUs


@contextlib.contextmanager
def alone_in_tp_group(tp_size: int) -> Iterator[list[int]]:
    """Within it, this process computes what the first of tp_size ranks does. Yields the bytes of each all-reduce so
    far, none of which is sent."""
    all_reduced, before = [], (pgm.process_group_manager, tensor_parallel.all_reduce)
    pgm.process_group_manager = types.SimpleNamespace(tp_world_size=tp_size, tp_rank=0)
    tensor_parallel.all_reduce = lambda tensor, op=None: all_reduced.append(tensor.nbytes)
    try:
        yield all_reduced
    finally:
        pgm.process_group_manager, tensor_parallel.all_reduce = before


def clocks_of_parts(make_clock: Callable, device_type: str) -> dict:
    """By tp_size what make_clock(tp_size=...) returns, for all that share out the ranks of a host evenly. Says which
    the model can't be split into. Collective."""
    counts = Counter(zip(machines(), gather(device_type))).values()  # of the ranks of each host
    clocks = {}
    for tp_size in range(2, max(counts) + 1):
        if any(count % tp_size == 0 for count in counts):
            try:
                clocks[tp_size] = make_clock(tp_size=tp_size)
            except UserError as error:
                say(f"no plans with tp_size {tp_size}: {error}")
    return clocks


def all_reduce_seconds(number: int, num_bytes: float, tp_size: int, link: Link, is_gpu: bool) -> float:
    """Of so many all-reduces over a tp group, of `num_bytes` together: see tensor_parallel.all_reduce."""
    rounds, share = 2 * (tp_size - 1), 1 / tp_size  # of a ring
    if tp_size in (2, 4, 8, 16) and not is_gpu and num_bytes <= number * SMALL:
        rounds, share = tp_size.bit_length() - 1, 1  # of recursive doubling
    return rounds * (number * link.latency + share * num_bytes / link.bandwidth)
