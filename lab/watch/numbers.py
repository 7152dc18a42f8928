"""Gradients and weights as the optimizer sees them."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lab.watch import Watch


class Numbers(Watch):
    """`gradients` that the optimizer saw, and `weights` after its step: of each rank a list, an entry a step, by the
    parameter's name."""

    places = ("threads",)

    def __init__(self):
        self.gradients: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)
        self.weights: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        def note(records: dict, what: str, optimizer: torch.optim.Optimizer) -> None:
            group = optimizer.param_groups[0]
            records[dist.get_rank()].append({name.removeprefix("module."): getattr(param, what).detach().clone()
                                             for name, param in zip(group["param_names"], group["params"])
                                             if getattr(param, what) is not None})

        hooks = (register_optimizer_step_pre_hook(lambda optimizer, *_: note(self.gradients, "grad", optimizer)),
                 register_optimizer_step_post_hook(lambda optimizer, *_: note(self.weights, "data", optimizer)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
