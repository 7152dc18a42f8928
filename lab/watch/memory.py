"""What one rank of a step holds and sends, without numbers and without the other ranks.

run_rank() (dry_run.py) runs the step's own main() for one optimizer step. What differs from a real run:

    tensors      have shapes, but no numbers (torch's FakeTensorMode): of an operation only the sizes are computed
    ranks        torch's "fake" process group says how many there are. A message is noted, and done at once
    weights      are made empty; AdamW's averages are there from the start, as in a later step
    devices      with the kernels of a GPU, tensors say that they are on one, and a norm is CUDA's, which keeps less
    experts      get equally many rows each: which ones tokens choose is in the numbers

Count notes each storage once, from the operation that makes it until it is freed.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
FLASH = {getattr(aten, name + "_for_cpu" + end): getattr(aten, name + end)  # torch has no formula for the CPU's
         for name in ("_scaled_dot_product_flash_attention",) for end in ("", "_backward")}
KINDS = ("weights", "gradients", "optimizer", "activations", "messages")


class Event(NamedTuple):
    """A collective or message of this rank. `num_bytes`: sent, an all-reduce around a ring; of a receive, received."""

    rank: int
    kind: str
    axis: str
    group: tuple[int, ...]
    peer: int | None
    num_bytes: int
    handle: "Handle | None"  # None: the program waits at once


class Handle:
    """Of something that is done. What it brought may be waited for. Until then it keeps what it sends, as NCCL does."""

    def __init__(self, rank: "Count", tensor: torch.Tensor | None = None):
        self.rank, self.tensor, self.sent = rank, tensor, None

    def wait(self, *args) -> None:
        self.rank.log.append(("wait", self))
        if self.tensor is not None:
            self.rank.label(self.tensor, "activations", "messages")
        self.tensor = self.sent = None

    def is_completed(self) -> bool:
        return self.rank.is_gpu  # gloo says so only of what was waited for


class NormOfCuda(torch.autograd.Function):
    """F.rms_norm as CUDA's kernel does it: for its backward it keeps the input and 1/rms, in float32, of each token."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return grad * x, torch.empty_like(weight)


class Held:
    """Bytes of storages by kind, of each from when it is noted until it is freed.

    `held` now; `peak`, the most of all together, and in which phase; `most` of each kind by itself; `snapshots` by
    name, and `moments`, one after each phase: its name, and what is held then. Gradients are those of `params`.
    """

    def __init__(self):
        self.default, self.phase, self.storages, self.params = "weights", "weights", {}, []
        self.held, self.snapshots = Counter(dict.fromkeys(KINDS, 0)), {}
        self.restart()

    def restart(self) -> None:
        self.peak, self.peak_at, self.most, self.alive, self.moments = Counter(), "", Counter(self.held), 0, []

    def note(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.storages:
            reference = weakref.ref(storage, lambda _: self.free(key))
            self.storages[key] = [storage.nbytes(), category, reference]
            self.grow(category, storage.nbytes())

    def grow(self, category: str, change: int) -> None:
        self.held[category] += change
        self.most[category] = max(self.most[category], self.held[category])
        self.alive = max(self.alive, self.held["activations"] + self.held["messages"])
        if change > 0 and sum(self.held.values()) > sum(self.peak.values()):
            self.peak, self.peak_at = Counter(self.held), self.phase

    def free(self, key: int) -> None:
        size, category, _ = self.storages.pop(key)
        self.held[category] -= size

    def label(self, tensor: torch.Tensor, category: str, only: str | None = None) -> None:
        entry = self.storages.get(tensor.untyped_storage()._cdata)
        if entry and entry[1] != category and only in (None, entry[1]):
            self.held[entry[1]] -= entry[0]
            self.held[category] += entry[0]
            self.most[category] = max(self.most[category], self.held[category])
            entry[1] = category

    def resized(self, storage: torch.UntypedStorage) -> None:
        if entry := self.storages.get(storage._cdata):
            change, entry[0] = storage.nbytes() - entry[0], storage.nbytes()
            self.grow(entry[1], change)

    def snapshot(self, name: str) -> None:
        self.snapshots[name] = dict(self.held)

    def kind_of(self, func, source: torch.Tensor | None) -> str:
        """Of what an operation makes: the copy of a weight in another dtype is one, too."""
        entry = func is aten._to_copy.default and self.storages.get(source.untyped_storage()._cdata)
        return "weights" if self.default == "activations" and entry and entry[1] == "weights" else self.default

    def begin(self, phase: str, microbatch: int | None = None, chunk: int | None = 0) -> None:
        self.phase = phase if microbatch is None else f"{phase} {microbatch}"

    def end(self) -> None:
        for param in self.params:
            if param.grad is not None:
                self.label(param.grad, "gradients")
        self.moment(self.phase)
        self.phase = "between"

    def moment(self, name: str) -> None:
        self.moments.append((name, dict(self.held)))

    def start(self) -> None:
        """Training begins, or a further step that counts."""
        self.restart()
        self.default, self.phase = "activations", "between"


class Count(Held, TorchDispatchMode):
    """Sizes of all tensors, operations, and `log`, what the rank does: ("compute", seconds, those of its products
    alone), ("begin", phase, micro-batch, chunk), ("end",), ("wait", handle), Event. `seconds_of(flops, bytes, dtype)`
    prices an operation. `kept`: the most between two actions, for backward.
    """

    def __init__(self, seconds_of: Callable[[float, float, torch.dtype | None], float], is_gpu: bool):
        TorchDispatchMode.__init__(self)
        self.fake, self.is_fake, self.is_gpu = FakeTensorMode(allow_non_fake_inputs=True), False, is_gpu
        self.seconds_of, self.log, self.is_view = seconds_of, [], {}
        Held.__init__(self)

    def restart(self) -> None:
        super().restart()
        self.log.clear()
        self.flops, self.kept = 0, 0

    # Operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is aten._local_scalar_dense.default and any(isinstance(each, FakeTensor) for each in tensors):
            assert tensors[0].is_floating_point() or tensors[0].numel() == 1, "numbers of a tensor without numbers"
            return torch.ones((), dtype=tensors[0].dtype).item()
        if func is aten.bincount.default and self.is_fake:  # balanced
            rows, experts = tensors[0].numel(), kwargs.get("minlength", args[-1])
            return torch.tensor([rows // experts + (i < rows % experts) for i in range(experts)])
        if func is aten.repeat_interleave.self_Tensor and not isinstance(args[1], FakeTensor):
            args, func = (args[0].new_empty(int(args[1].sum())),), aten.clone.default
            tensors = [*args]
        if not any(isinstance(each, FakeTensor) for each in tensors) and (tensors or not self.is_fake):
            return func(*args, **kwargs)
        with self.fake:
            result = func(*args, **kwargs)
        self.count(func, args, kwargs, tensors, result)
        return result

    def count(self, func, args, kwargs, tensors: list[torch.Tensor], result) -> None:
        made = [each for each in ([result] if isinstance(result, torch.Tensor) else tree_leaves(result))
                if isinstance(each, torch.Tensor)]
        if (is_view := self.is_view.get(func)) is None:
            returns = func._schema.returns
            is_view = any(each.alias_info and not each.alias_info.is_write for each in returns)
            is_view = self.is_view[func] = is_view or "empty" in func.name() or "_unsafe_view" in func.name()
        category = self.kind_of(func, tensors[0] if tensors else None)
        for each in made:
            self.note(each, category)
        if is_view or self.default != "activations":
            return
        moved = sum(each.numel() * each.element_size() for each in (*tensors, *made))
        formula = flop_registry.get(FLASH.get(func._overloadpacket, func._overloadpacket))
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        named = dict(zip((each.name for each in func._schema.arguments), args)) if formula else {}
        flops //= 1 + named.get("is_causal", False)  # a kernel leaves out what is masked: half of the scores
        self.flops += flops
        dtype = made[0].dtype if made else None
        self.log.append(("compute", self.seconds_of(flops, moved, dtype), self.seconds_of(flops, 0, dtype)))

    # Phases

    def begin(self, phase: str, microbatch: int | None = None, chunk: int | None = 0) -> None:
        super().begin(phase, microbatch, chunk)
        self.log.append(("begin", phase, microbatch, chunk or 0))

    def end(self) -> None:
        self.log.append(("end",))
        self.kept = max(self.kept, self.held["activations"] + self.held["messages"])
        super().end()


class Communication:
    """In place of torch.distributed's functions: notes what is sent, and to whom."""

    def __init__(self, count: Count, axis_of: Callable[[object], str], agree: Callable | None = None):
        self.count, self.axis_of, self.agree = count, axis_of, agree

    def note(self, kind: str, group, num_bytes: float, peer: int | None = None, tensor=None, is_async: bool = False):
        handle = Handle(self.count, tensor if is_async else None) if is_async else None
        if self.count.default == "activations" and dist.get_world_size(group) > 1:
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            axis = self.axis_of(group)
            self.count.log.append(Event(dist.get_rank(), kind, axis, ranks, peer, int(num_bytes), handle))
        return handle

    def all_reduce(self, tensor, op=None, group=None, async_op=False):
        size = dist.get_world_size(group)
        if self.agree and op == dist.ReduceOp.MAX and not isinstance(tensor, FakeTensor):
            tensor.fill_(self.agree(tensor.item()))
        return self.note("all_reduce", group, 2 * (size - 1) * tensor.nbytes // size, is_async=async_op)

    def reduce_scatter_single(self, output, tensor, op=None, group=None, async_op=False):
        self.count.label(output, "messages", "activations")
        others = dist.get_world_size(group) - 1
        handle = self.note("reduce_scatter", group, others * output.nbytes, tensor=output, is_async=async_op)
        if handle:
            handle.sent = tensor
        return handle

    def all_gather_single(self, output, tensor, group=None, async_op=False):
        others = dist.get_world_size(group) - 1
        return self.note("all_gather", group, others * tensor.nbytes, is_async=async_op)

    def all_gather(self, tensors, tensor, group=None, async_op=False):
        return self.note("all_gather", group, (len(tensors) - 1) * tensor.nbytes, is_async=async_op)

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        return self.note("broadcast", group, tensor.nbytes * (src == dist.get_rank()), is_async=async_op)

    def all_to_all_single(self, output, rows, output_sizes=None, input_sizes=None, group=None, async_op=False):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = (input_sizes or [len(rows) // size] * size)[rank] * rows[:1].nbytes
        if not isinstance(output, FakeTensor):  # numbers of rows: all ranks have equal ones
            output.copy_(rows.view(size, -1)[rank].repeat(size))
        return self.note("all_to_all_single", group, rows.nbytes - own, is_async=async_op)

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        peer = dst if dst is not None else dist.get_global_rank(group, group_dst)
        return self.note("send", group, tensor.nbytes, peer, is_async=True)

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        peer = src if src is not None else dist.get_global_rank(group, group_src)
        self.count.label(tensor, "messages", "activations")
        return self.note("receive", group, tensor.nbytes, peer, tensor, is_async=True)

    def send(self, *args, **kwargs) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args, **kwargs) -> None:
        self.irecv(*args, **kwargs).wait()

    def patches(self) -> dict:
        names = ("all_reduce", "all_gather", "broadcast", "all_to_all_single", "isend", "irecv", "send", "recv")
        return {**{name: getattr(self, name) for name in names},
                **{name: self.reduce_scatter_single for name in ("reduce_scatter_single", "reduce_scatter_tensor")},
                **{name: self.all_gather_single for name in ("all_gather_single", "all_gather_into_tensor")}}
