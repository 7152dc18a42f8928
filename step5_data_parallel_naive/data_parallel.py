"""Data parallelism, the naive way: every dp rank holds the whole model and reads different samples, and gradients are
averaged.

As soon as backward has computed the gradient of a parameter, an all-reduce averages it over the dp group: one small
message per parameter, and backward waits for each of them. With gradient accumulation only the last micro-batch
communicates, and it sends the *accumulated* gradient. To average only the last micro-batch's gradient would leave each
replica's earlier micro-batches unaveraged, so the replicas would diverge.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm


class DataParallelNaive(nn.Module):
    """Wraps a model. Set `require_backward_grad_sync` to whether the next backward is the last of the accumulation."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        if pgm.process_group_manager.dp_world_size > 1:
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(self.allreduce_grad)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def allreduce_grad(self, param: nn.Parameter) -> None:
        """Called by backward when `param.grad` holds the sum over the micro-batches so far."""
        if self.require_backward_grad_sync:
            grid = pgm.process_group_manager
            dist.all_reduce(param.grad, group=grid.dp_group)
            param.grad /= grid.dp_world_size


def all_reduce_loss_across_dp_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The mean over the global batch, of which each dp rank has computed its own share."""
    grid = pgm.process_group_manager
    if grid.dp_world_size > 1:
        dist.all_reduce(loss, group=grid.dp_group)
        loss /= grid.dp_world_size
    return loss
