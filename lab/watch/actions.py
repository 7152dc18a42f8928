"""What each rank computes when: the forwards and backwards of its micro-batches, among the messages."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from lab.watch import Watch

LETTERS = {"forward": "F", "backward": "B", "weight gradients": "W"}


class Action(NamedTuple):
    """`start` and `end` are moments, which the world counts: see Event in lab/rank_collectives.py."""

    rank: int
    kind: str  # F, B, W, or the name of another part of a step, such as optimizer
    microbatch: int
    chunk: int
    start: int
    end: int


class Schedule(Watch):
    """`actions` of all ranks, in the order in which they end."""

    places = ("threads",)

    def __init__(self):
        self.actions: list[Action] = []
        self.counts: dict[int, Counter] = {}  # of ranks whose step has no timeline: its forwards and backwards so far

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        self.world, backward = ranks.world, torch.Tensor.backward

        def noted(tensor: torch.Tensor, *args, **kwargs) -> None:
            with self.whole("B", dist.get_rank()):
                backward(tensor, *args, **kwargs)

        with mock.patch.object(torch.Tensor, "backward", noted):
            yield

    @contextlib.contextmanager
    def span(self, rank: int, kind: str, microbatch: int = 0, chunk: int = 0) -> Iterator[None]:
        start = next(self.world.moments)
        yield
        self.actions.append(Action(rank, kind, microbatch, chunk, start, next(self.world.moments)))

    def whole(self, kind: str, rank: int) -> contextlib.AbstractContextManager:
        """A pass through the whole model, in a step that has no timeline."""
        if rank not in self.counts:
            return contextlib.nullcontext()
        self.counts[rank][kind] += 1
        return self.span(rank, kind, self.counts[rank][kind] - 1)

    def begin(self, modules, rank: int) -> None:
        if hasattr(modules, "timeline"):
            timeline = modules.timeline.timeline
            own = timeline.span

            def span(kind: str, microbatch: int | None = None, chunk: int = 0):
                if kind in ("wait", "all-to-all"):  # those are messages
                    return own(kind, microbatch)
                return self.span(rank, LETTERS.get(kind, kind), microbatch or 0, chunk)

            timeline.span = span
            return
        self.counts[rank] = Counter()
        forward = modules.model.Llama.forward

        def noted(*args, **kwargs):
            with self.whole("F", rank):
                return forward(*args, **kwargs)

        modules.model.Llama.forward = noted
