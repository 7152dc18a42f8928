"""What each rank computes when: the forwards and backwards of its micro-batches, among the messages."""

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from lab.watch import Watch

LETTERS = {"forward": "F", "backward": "B", "weight gradients": "W"}


class Action(NamedTuple):
    """`start` and `end` are moments, which the world counts, those of its messages too (Event)."""

    rank: int
    kind: str  # F, B, W, or the name of another part of an optimizer step
    microbatch: int
    chunk: int
    start: int
    end: float  # infinity until then


class Schedule(Watch):
    """`actions` of all ranks, in the order of their ends: the spans of a step's timeline, from step 6 on. Before, a
    forward of the whole model is one, and a backward."""

    places = ("threads",)

    def __init__(self):
        self.actions: list[Action] = []
        self.open: dict[int, Action | None] = {}  # rank -> what it computes now
        self.counts: dict[tuple, Iterator[int]] = defaultdict(itertools.count)  # (rank, kind) -> micro-batches
        self.without_timeline: set[int] = set()  # ranks

    def around(self, ranks) -> contextlib.AbstractContextManager:
        self.world = ranks.world
        return mock.patch.object(torch.Tensor, "backward", self.counted("B", torch.Tensor.backward))

    def begin(self, modules, rank: int) -> None:
        if not hasattr(modules, "timeline"):
            self.without_timeline.add(rank)
            modules.model.Llama.forward = self.counted("F", modules.model.Llama.forward)
            return
        timeline = modules.timeline.timeline
        own = timeline.span

        @contextlib.contextmanager
        def span(kind: str, *of):
            with own(kind, *of), self.span(kind, *of):
                yield

        timeline.span = span

    @contextlib.contextmanager
    def span(self, kind: str, microbatch: int | None = None, chunk: int = 0) -> Iterator[None]:
        rank = dist.get_rank()
        action = Action(rank, LETTERS.get(kind, kind), microbatch or 0, chunk, next(self.world.moments), math.inf)
        around, is_noted = self.open.get(rank), kind not in ("wait", "all-to-all")  # the messages say these
        if is_noted:
            self.open[rank] = action
        yield
        if is_noted:
            self.actions.append(action._replace(end=next(self.world.moments)))
            self.open[rank] = around

    def counted(self, kind: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            if (rank := dist.get_rank()) not in self.without_timeline:
                return function(*args, **kwargs)
            with self.span(kind, next(self.counts[rank, kind])):
                return function(*args, **kwargs)

        return call
