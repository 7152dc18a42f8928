"""Data parallelism, the naive way: every dp rank holds the whole model and reads other samples; gradients are averaged.

As soon as backward has a parameter's gradient, an all-reduce averages it over the dp group: one small message a
parameter, and backward stands still meanwhile. With gradient accumulation only the last micro-batch communicates, and
what it sends is the *accumulated* gradient: averaging just the last micro-batch's share would leave each replica with
a sum of its own.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm


class DataParallelNaive(nn.Module):
    """Wraps a model; `require_backward_grad_sync` says whether the coming backward ends an accumulation."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        if pgm.process_group_manager.dp_world_size > 1:
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(self.average_gradient)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def average_gradient(self, param: nn.Parameter) -> None:
        """Runs inside backward, once `param.grad` holds the sum over the micro-batches so far."""
        if self.require_backward_grad_sync:
            grid = pgm.process_group_manager
            dist.all_reduce(param.grad, group=grid.dp_group)
            param.grad /= grid.dp_world_size


def average_loss_across_dp_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The mean over the global batch: each dp rank has seen its share only."""
    grid = pgm.process_group_manager
    if grid.dp_world_size > 1:
        dist.all_reduce(loss, group=grid.dp_group)
        loss /= grid.dp_world_size
    return loss
