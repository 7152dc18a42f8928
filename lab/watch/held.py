"""Bytes that ranks hold, by kind: weights, gradients, the optimizer's averages, activations, messages; at every moment.

On ranks of this process, operations compute with real tensors: what each one makes is counted from then until it is
freed. What an operation allocates and frees within itself is not seen. On ranks without numbers the count is theirs.
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


class Live(Held, TorchDispatchMode):
    """Counts, within a `with` block, the tensors that operations of this thread make."""

    def __init__(self):
        TorchDispatchMode.__init__(self)
        Held.__init__(self)
        self.params, self.backwards = [], 0

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Training begins."""
        self.params += [param for group in optimizer.param_groups for param in group["params"]]
        self.default, self.phase = "activations", "between"
        self.restart()

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
        if frame.f_code.co_filename in COPIES:
            return True
        frame = frame.f_back
    return False


class Memory(Watch):
    """`held[rank]`: after each phase, such as "forward 3", its name and {kind: bytes}. `peak[rank]`: the most of all
    together, and in which phase. `snapshots[rank]`: in the last optimizer step, "before the step", "after backward", and
    "after the step". A rank's averages are there from its first step on."""

    places = ("threads", "alone")

    def __init__(self):
        self.held: dict[int, list[tuple[str, dict[str, int]]]] = {}
        self.peak: dict[int, tuple[str, dict[str, int]]] = {}
        self.snapshots: dict[int, dict[str, dict[str, int]]] = {}
        self._live: dict[int, Held] = {}

    @property
    def _own(self) -> Held:
        return self._live[dist.get_rank()]

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        if ranks.kind == "alone":  # it counts already
            yield
            return
        zero_grad, backward, receive = torch.nn.Module.zero_grad, torch.autograd.backward, ranks.world.irecv
        resize = torch.UntypedStorage.resize_

        def begin(module: torch.nn.Module, *args, **options) -> None:
            zero_grad(module, *args, **options)
            self._own.backwards = 0
            self._own.snapshot("before the step")

        def run_backward(*args, **options) -> None:
            """A phase, also where a step has no timeline."""
            live = self._own
            if live.phase != "between":
                return backward(*args, **options)
            live.phase = f"forward {live.backwards}"
            live.end(live.params)
            live.begin("backward", live.backwards)
            backward(*args, **options)
            live.end(live.params)
            live.backwards += 1

        def irecv(tensor: torch.Tensor, *args, **options):
            live, handle = self._own, receive(tensor, *args, **options)
            live.label(tensor, "messages", "activations")
            finish = handle.finish

            def arrive() -> None:
                finish()
                live.label(tensor, "activations", "messages")

            handle.finish = arrive
            return handle

        def resize_storage(storage: torch.UntypedStorage, size: int):
            resize(storage, size)
            self._own.resized(storage)
            return storage

        with (mock.patch.object(torch.nn.Module, "zero_grad", begin),
              mock.patch.object(torch.UntypedStorage, "resize_", resize_storage),
              mock.patch.object(torch.autograd, "backward", run_backward),
              mock.patch.object(ranks.world, "irecv", irecv),
              hooked(register_optimizer_step_pre_hook(self.before_step),
                     register_optimizer_step_post_hook(self.after_step))):
            yield

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._own.snapshot("after backward")
        if not optimizer.state:
            self._own.default = "optimizer"  # its averages are made now

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._own.default = "activations"
        self._own.snapshot("after the step")

    def begin(self, modules, rank: int) -> None:
        live = self._live[rank] = Live()
        init_weights, make_scheduler = modules.model.init_weights, modules.utils.make_scheduler

        def count_weights(model: torch.nn.Module, *args) -> None:
            live.storages.clear()  # what is before, such as a tensor of the grid's ranks, does not count
            live.held = Counter(dict.fromkeys(KINDS, 0))
            init_weights(model, *args)
            live.params.extend(model.parameters())

        def start(optimizer: torch.optim.Optimizer, *args):
            live.start(optimizer)
            return make_scheduler(optimizer, *args)

        modules.model.init_weights, modules.utils.make_scheduler = count_weights, start
        with contextlib.suppress(AttributeError):  # a step without buckets
            live.default, init = "weights", modules.data_parallel.Bucket.__init__
            modules.data_parallel.Bucket.__init__ = mock.patch.object(live, "default", "gradients")(init)
        with contextlib.suppress(AttributeError):  # a step without a timeline
            span = modules.timeline.timeline.span

            @contextlib.contextmanager
            def phase(kind: str, *of):
                if kind in PHASES:
                    live.begin(kind, *of)
                with span(kind, *of):
                    yield
                if kind in PHASES:
                    live.end(live.params)

            modules.timeline.timeline.span = phase
        live.__enter__()

    def end(self, modules, rank: int) -> None:
        live = self._live.pop(rank)
        live.__exit__(None, None, None)
        self.held[rank], self.peak[rank], self.snapshots[rank] = (
            live.moments, (live.peak_at, dict(live.peak)), live.snapshots)

    def __str__(self) -> str:
        rows = [ROW.format("bytes", *KINDS, "together", "at most, in")]
        for rank, (phase, found) in sorted(self.peak.items()):
            numbers = [f"{found.get(kind, 0):,}" for kind in KINDS]
            rows.append(ROW.format(f"rank {rank}", *numbers, f"{sum(found.values()):,}", phase))
        return "\n".join(rows)
