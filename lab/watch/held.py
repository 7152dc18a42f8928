"""Bytes that ranks hold, by kind: weights, gradients, the optimizer's averages, activations, messages; at every moment.

What an operation makes is counted from then until it is freed. What it allocates and frees within itself is not seen.
"""

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab import rank_collectives, thread_ranks
from lab.watch import Watch
from lab.watch.memory import KINDS, Held
from lab.watch.numbers import hooked

PHASES = ("forward", "backward", "weight gradients", "gradient norm", "optimizer")
ROW = "{:10}" + "{:>13}" * (len(KINDS) + 1) + "  {}"
COPIES = {rank_collectives.__file__, thread_ranks.__file__}  # their clones stand for what is on its way


class Phases(Watch):
    """Tells a rank's count of bytes when a phase of an optimizer step begins and ends: as the step's timeline has them,
    and in steps without one after each forward and backward."""

    def __init__(self):
        self._counts: dict[int, Held] = {}

    @property
    def own(self) -> Held:
        """The count of the calling rank."""
        return self._counts[dist.get_rank()]

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        zero_grad, backward, resize = torch.nn.Module.zero_grad, torch.autograd.backward, torch.UntypedStorage.resize_

        def begin_step(module: torch.nn.Module, *args, **options) -> None:
            zero_grad(module, *args, **options)
            self.own.snapshot("before the step")

        def run_backward(*args, **options) -> None:
            if (count := self.own).phase != "between":
                return backward(*args, **options)
            count.moment("forward")
            count.begin("backward")
            backward(*args, **options)
            count.end()

        def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self.own.resized(storage)
            return result

        with (mock.patch.object(torch.nn.Module, "zero_grad", begin_step),
              mock.patch.object(torch.autograd, "backward", run_backward),
              mock.patch.object(torch.UntypedStorage, "resize_", resize_storage)):
            yield

    def begin(self, modules, rank: int) -> None:
        count = self._counts[rank]
        with contextlib.suppress(AttributeError):  # a step without buckets
            as_gradients = mock.patch.object(count, "default", "gradients")
            modules.data_parallel.Bucket.__init__ = as_gradients(modules.data_parallel.Bucket.__init__)
        with contextlib.suppress(AttributeError):  # a step without a timeline
            span = modules.timeline.timeline.span

            @contextlib.contextmanager
            def phase(kind: str, *of):
                if kind == "gradient norm":
                    count.snapshot("after backward")
                if kind in PHASES:
                    count.begin(kind, *of)
                with span(kind, *of):
                    yield
                if kind in PHASES:
                    count.end()

            modules.timeline.timeline.span = phase


class Live(Held, TorchDispatchMode):
    """Counts, within a `with` block, the tensors that operations of this thread make."""

    def __init__(self):
        TorchDispatchMode.__init__(self)
        Held.__init__(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = {each.untyped_storage()._cdata for each in tensors}  # in place, or a view: nothing is allocated
        if func is not torch.ops.aten.clone.default or not is_copy(sys._getframe(1)):
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and not each.is_meta and (
                        each.untyped_storage()._cdata not in given):
                    self.note(each, self.kind_of(func, tensors[0] if tensors else None))
        return result

    @property
    def now(self) -> int:
        return sum(self.held.values())


def is_copy(frame: types.FrameType) -> bool:
    """Whether a message's content is copied. Between an operation and who calls it are a few functions of torch's."""
    for _ in range(4):
        if frame and frame.f_code.co_filename in COPIES:
            return True
        frame = frame and frame.f_back
    return False


class Memory(Phases):
    """`held[rank]`: after each phase, such as "forward 3", its name and {kind: bytes}. `peak[rank]`: the most of all
    together, and in which phase. `snapshots[rank]`: of the last optimizer step, "before the step", "after backward"
    (with a timeline), and "after the step". A rank's averages are there from its first step on."""

    places = ("threads", "alone")

    def __init__(self):
        super().__init__()
        self.held: dict[int, list[tuple[str, dict[str, int]]]] = {}
        self.peak: dict[int, tuple[str, dict[str, int]]] = {}
        self.snapshots: dict[int, dict[str, dict[str, int]]] = {}

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        of_messages = ranks.world if ranks.kind == "threads" else dist
        receive = of_messages.irecv

        def irecv(tensor: torch.Tensor, *args, **options) -> types.SimpleNamespace:
            count, handle = self.own, receive(tensor, *args, **options)
            count.label(tensor, "messages", "activations")
            return types.SimpleNamespace(wait=lambda: handle.wait() and count.label(tensor, "activations", "messages"),
                                         is_completed=handle.is_completed)

        with (super().around(ranks), mock.patch.object(of_messages, "irecv", irecv),
              hooked(register_optimizer_step_pre_hook(self.before_step),
                     register_optimizer_step_post_hook(self.after_step))):
            try:
                yield
            finally:
                if ranks.kind == "alone" and self._counts:  # an error has ended the rank, on this thread
                    self._counts.pop(ranks.rank).__exit__(None, None, None)

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if not optimizer.state:
            self.own.default = "optimizer"  # its averages are made now

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self.own.default = "activations"
        self.own.snapshot("after the step")

    def begin(self, modules, rank: int) -> None:
        count = self._counts[rank] = Live()
        super().begin(modules, rank)
        init_weights, make_scheduler = modules.model.init_weights, modules.utils.make_scheduler

        def count_weights(model: torch.nn.Module, *args) -> None:
            count.storages.clear()  # what is before, such as a tensor of the grid's ranks, does not count
            count.held = Counter(dict.fromkeys(KINDS, 0))
            init_weights(model, *args)
            count.params.extend(model.parameters())

        def start(optimizer: torch.optim.Optimizer, *args):
            count.params += [param for group in optimizer.param_groups for param in group["params"]]
            count.start()
            return make_scheduler(optimizer, *args)

        modules.model.init_weights, modules.utils.make_scheduler = count_weights, start
        count.__enter__()  # for this thread

    def end(self, modules, rank: int) -> None:
        count = self._counts.pop(rank)
        count.__exit__(None, None, None)
        self.held[rank], self.snapshots[rank] = count.moments, count.snapshots
        self.peak[rank] = count.peak_at, dict(count.peak)

    def __str__(self) -> str:
        rows = [ROW.format("bytes", *KINDS, "together", "at most, in")]
        for rank, (phase, found) in sorted(self.peak.items()):
            numbers = [f"{found.get(kind, 0):,}" for kind in KINDS]
            rows.append(ROW.format(f"rank {rank}", *numbers, f"{sum(found.values()):,}", phase))
        return "\n".join(rows)
