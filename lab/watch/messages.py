"""The messages of all ranks, in their order, and those of one optimizer step."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.rank_collectives import Event
from lab.watch import Watch


KINDS = ("send", "receive", "all_reduce", "all_to_all_single")  # what carries tensors of the training
LOGGED = 64  # numbers for the log have so many bytes at most, and are left out


class Messages(Watch):
    """`events`: the log of all ranks."""

    places = ("threads",)

    def __init__(self):
        self.events: list[Event] = []
        self.before: dict[int, list[int]] = {}  # rank -> the number of events before each optimizer step

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        def note(optimizer, *_) -> None:
            if isinstance(optimizer, torch.optim.AdamW):  # the first one of a step, if there are two
                self.before.setdefault(dist.get_rank(), []).append(len(ranks.world.events))

        hook = register_optimizer_step_pre_hook(note)
        self.events = ranks.world.events
        try:
            yield
        finally:
            hook.remove()

    def between(self, rank: int, step: int) -> list[Event]:
        """What a rank exchanges from its optimizer step `step`, counted from 0, to the next one."""
        return [event for event in self.events[slice(*self.before[rank][step : step + 2])] if event.rank == rank]

    def of_a_step(self, step: int = 0) -> list[Counter]:
        """Of each rank, how often it had each (kind, other ranks of the group, peer, bytes) between those steps."""
        return [Counter(event[1:5] for event in self.between(rank, step)
                        if event.kind in KINDS and event.num_bytes > LOGGED) for rank in sorted(self.before)]
