"""What the ranks of a step's train.py exchange in its second optimizer step, counted on ranks in this process."""

from collections import Counter

import torch
import torch.distributed as dist
from lab.program import StepSource, train
from lab.thread_ranks import World
from torch.optim.optimizer import register_optimizer_step_pre_hook

KINDS = ("send", "receive", "all_reduce", "all_to_all_single")
LOGGED = 64  # numbers for the log have so many bytes at most, and are left out


def messages(step: int, num_ranks: int, flags: list) -> list[Counter]:
    """Of each rank, the Counter of (kind, other ranks of the group, peer, bytes). See rank_collectives.Event."""
    world, steps = World(num_ranks), [[] for _ in range(num_ranks)]  # by rank: the number of events before each step

    def begin(optimizer, *_) -> None:
        if isinstance(optimizer, torch.optim.AdamW):  # the first one of a step, if there are two
            steps[dist.get_rank()].append(len(world.events))

    hook = register_optimizer_step_pre_hook(begin)
    try:
        train(StepSource(step), num_ranks, flags, world=world)
    finally:
        hook.remove()
    return [Counter(event[1:5] for event in world.events[slice(*steps[rank][:2])]
                    if event.rank == rank and event.kind in KINDS and event.num_bytes > LOGGED)
            for rank in range(num_ranks)]
