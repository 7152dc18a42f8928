"""Tensor parallelism while plan.py --measure times modules: a rank's part of each, and the sums over its group.

Ranks of one host that would share layers in training do so here, too, so that what they wait for each other is in the
seconds. What memory a part takes, one rank finds for all, without them.
"""

import contextlib
import types
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
import tensor_parallel
from machine_facts import gather, machines, say
from utils import UserError


@contextlib.contextmanager
def in_tp_group(tp_size: int, group: dist.ProcessGroup | None = None):
    """Within it, this process is a rank of `group`. Without one it is the first of tp_size ranks, and all-reduces only
    take the memory for what the others would send."""
    before = pgm.process_group_manager, tensor_parallel.all_reduce
    tp_rank = dist.get_rank(group) if group else 0
    pgm.process_group_manager = types.SimpleNamespace(ranks=[torch.arange(tp_size).view(1, tp_size)], tp_rank=tp_rank,
                                                      tp_world_size=tp_size, tp_group=group)
    if not group:
        tensor_parallel.all_reduce = lambda tensor, op=None: torch.empty_like(tensor)
    try:
        yield
    finally:
        pgm.process_group_manager, tensor_parallel.all_reduce = before


def clocks_of_parts(make_clock: Callable, device_type: str) -> dict:
    """By tp_size make_clock(tp_size=...), with this rank's group, for all that share out the ranks of a host evenly.
    Says which ones the model can't be split over. Collective."""
    places, clocks = {}, {}
    for rank, place in enumerate(zip(machines(), gather(device_type))):
        places.setdefault(place, []).append(rank)
    for tp_size in range(2, max(map(len, places.values())) + 1):
        if not (sharing := [ranks for ranks in places.values() if len(ranks) % tp_size == 0]):
            continue
        try:
            clocks[tp_size] = make_clock(tp_size=tp_size)
        except UserError as error:  # on all ranks
            say(f"no plans with tp_size {tp_size}: {error}")
            continue
        for ranks in [ranks[k : k + tp_size] for ranks in sharing for k in range(0, len(ranks), tp_size)]:
            group = dist.new_group(ranks, pgm.timeout)
            if dist.get_rank() in ranks:
                clocks[tp_size].tp_group = group
    return clocks
