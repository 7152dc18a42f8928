"""Memory as torch itself counts it: what autograd keeps for backward, and what the allocator gives."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from lab.watch import Watch
from lab.watch.numbers import hooked


class Saved:
    """A tensor that is kept for backward. `log` gets its storage and sizes, and the storage again when it is freed."""

    def __init__(self, tensor: torch.Tensor, log: list):
        self.tensor, self.log = tensor, log
        storage = tensor.untyped_storage()
        self.storage = (storage.data_ptr(), storage.nbytes(), tuple(sorted(tensor.shape)))
        log.append((1, self.storage))

    def __del__(self):
        self.log.append((-1, self.storage))


class Kept(Watch):
    """The largest number of bytes that autograd kept at one time until the first optimizer step.

    `most[rank]`: of "weights", their copies in the run's dtype, and of "others", mostly activations; and "one_copy",
    one copy of all the rank's weights in bfloat16. Memory that several tensors share counts once, that of the
    parameters themselves not at all.
    """

    places = ("threads", "processes")

    def __init__(self):
        self.most: dict[int, dict[str, int]] = {}
        self._logs, self._hooks = {}, {}

    def around(self, ranks) -> contextlib.AbstractContextManager:
        def before_step(optimizer, *_) -> None:
            if (rank := dist.get_rank()) not in self.most:
                self.most[rank] = largest(self._logs[rank], optimizer.param_groups[0]["params"])

        return hooked(register_optimizer_step_pre_hook(before_step))

    def begin(self, modules, rank: int) -> None:
        log = self._logs[rank] = []
        self._hooks[rank] = torch.autograd.graph.saved_tensors_hooks(lambda tensor: Saved(tensor, log),
                                                                     lambda saved: saved.tensor)
        self._hooks[rank].__enter__()  # for this thread

    def end(self, modules, rank: int) -> None:
        self._hooks.pop(rank).__exit__()


def largest(log: list, params: list[torch.Tensor]) -> dict[str, int]:
    """The peaks of the log's bytes. A copy of a weight has the shape of one, or that of its transpose."""
    shapes, own = {tuple(sorted(param.shape)) for param in params}, {param.data_ptr() for param in params}
    alive, held, peak = Counter(), Counter(), Counter()
    for change, (pointer, nbytes, shape) in log:
        kind, before = "weights" if shape in shapes else "others", alive[pointer]
        alive[pointer] += change
        if pointer not in own and 0 in (before, alive[pointer]):
            held[kind] += change * nbytes
            peak[kind] = max(peak[kind], held[kind])
    return {**peak, "one_copy": 2 * sum(param.numel() for param in params)}


class Allocated(Watch):
    """`grown[rank]`: by how many bytes the memory of all tensors grew at most in the second optimizer step, from the
    end of zero_grad() to the end of the optimizer's step, as torch's own allocator reports it for a whole process."""

    places = ("processes",)

    def __init__(self):
        self.grown: dict[int, int] = {}

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        profiler, calls = profile(activities=[ProfilerActivity.CPU], profile_memory=True), []
        zero_grad = torch.nn.Module.zero_grad

        def start(module, *args, **kwargs) -> None:
            zero_grad(module, *args, **kwargs)
            calls.append(module)
            if len(calls) == 2:
                profiler.start()

        def stop(*_) -> None:
            if len(calls) == 2 and not self.grown:
                profiler.stop()
                events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
                sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
                self.grown[dist.get_rank()] = max(itertools.accumulate(sizes, initial=0))

        with mock.patch.object(torch.nn.Module, "zero_grad", start), hooked(register_optimizer_step_post_hook(stop)):
            yield
