"""What a module takes of the memory while it computes: what it keeps for its backward, and what it needs for a moment.

A CPU does not count what a process allocates, so here each operation's result is counted as long as it lives. What an
operation allocates and frees within itself is not seen. On a GPU torch's own counter is read.
"""

import time
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model


class Allocations(TorchDispatchMode):
    """Counts, within a `with` block, the bytes of the tensors that operations make: `now`, and `peak` at most."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs))
                 if isinstance(tensor, torch.Tensor)}  # an operation in place, or a view, allocates nothing
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.alive and key not in given:
                    self.alive[key] = weakref.ref(storage, lambda _, key=key, size=size: self.free(key, size))
                    self.now += size
                    self.peak = max(self.peak, self.now)
        return result

    def free(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size


def peak_bytes(run: Callable, device: torch.device) -> int:
    """Bytes at most that run() has allocated at a time, beside what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with Allocations() as counted:
        run()
    return counted.peak


def load_code(device: torch.device) -> None:
    """Call it before a clock is read: at its first backward, and its first mode, torch loads code for seconds."""
    one = torch.ones(1, requires_grad=True)
    peak_bytes(lambda: torch.autograd.backward(2 * one, one.detach()), device)


def saved_bytes(run: Callable, weights: Iterable[torch.Tensor]) -> int:
    """Bytes that run(), a pass forward and backward, keeps for its backward, without the storages of `weights`."""
    own, storages = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(storages.values())


def memory_of(module: torch.nn.Module, run_of: Callable, device: torch.device, room: float,
              seconds: float) -> dict[str, float]:
    """What one sample takes, and what a second one adds to it: the difference is what any micro-batch takes.

    `run_of(size)` is a pass forward and backward. Without the time or memory for two samples, one takes it all.
    """
    saved, peaks, start = [], [], time.perf_counter()
    for size in (1, 2):
        if size == 2 and (4 * peaks[0] > room or 2 * (time.perf_counter() - start) > seconds):
            break
        run = run_of(size)
        run()  # makes gradients, and copies of the weights in the dtype
        saved.append(saved_bytes(run, [*module.parameters(), *model.casts.values()]))
        peaks.append(peak_bytes(run, device))
    a_sample = saved[-1] - saved[0] or saved[0]
    slope = max(0, peaks[-1] - peaks[0] or peaks[0])
    return {"saved_bytes": float(a_sample), "working_bytes": float(max(0, slope - a_sample)),
            "fixed_bytes": float(max(0, peaks[0] - slope))}
