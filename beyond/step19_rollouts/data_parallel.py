"""Data parallelism with buckets: a few large all-reduces instead of many small ones, while backward still computes.

Backward computes gradients from the last layer to the first. They are stored one after the other in flat buffers, the
buckets. As soon as all gradients of a bucket are there, its all-reduce starts and runs in the background:

    backward     | final_proj | layer 7 | layer 6 | layer 5 | layer 4 | ... | layer 0 | embedding |
    all-reduce                | bucket 0          | bucket 1          | ...                       | bucket n | wait

`param.grad` is a view into its bucket: autograd adds to the very memory that is sent and that the optimizer reads.
Buffers need not be set to zero, because the first micro-batch's gradient is copied in. A bucket is divided by dp_size
once, before its all-reduce.
With gradient accumulation only the last micro-batch communicates, and it sends the accumulated gradient.
Buckets have the dtype of the parameters: gradients are summed in float32 even where activations are bfloat16.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from timeline import timeline


class Bucket:
    """Parameters whose gradients share one flat buffer and one all-reduce over `process_group`."""

    def __init__(self, params: list[nn.Parameter], process_group: dist.ProcessGroup):
        self.params, self.process_group = params, process_group
        self.grad_data = params[0].new_zeros(sum(param.numel() for param in params))
        self.awaited, self.handle = set(params), None
        parts = self.grad_data.split([param.numel() for param in params])
        self.views = {param: part.view_as(param) for param, part in zip(params, parts)}

    def take(self, param: nn.Parameter) -> None:
        """Makes `param.grad` the view again: the first backward after zero_grad() creates a new tensor for it."""
        if param.grad is not self.views[param]:
            self.views[param].copy_(param.grad)
            param.grad = self.views[param]

    def sync_gradient(self) -> None:
        self.grad_data /= self.process_group.size()
        handle = dist.all_reduce(self.grad_data, group=self.process_group, async_op=True)
        self.handle = timeline.background(handle, "all-reduce")

    def wait(self) -> None:
        """Waits for the all-reduce. Each rank divided by dp_size first, so the sum is the mean."""
        with timeline.span("wait"):
            self.handle.wait()
        self.awaited, self.handle = set(self.params), None


class DataParallelBucket(nn.Module):
    """Wraps a model. Set `require_backward_grad_sync` to whether the next backward is the last of the accumulation.

    After that backward, call finish_gradient_sync() before reading the gradients. `bucket_cap_mb`: megabytes per
    bucket, by default 25 or an eighth of all gradients, whichever is less: a single bucket would overlap with nothing.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.buckets, self.bucket_of = [], {}
        params = list(reversed(list(module.parameters())))  # roughly the order of backward
        num_bytes = sum(param.numel() * param.element_size() for param in params)
        limit = min(25e6, num_bytes / 8) if bucket_cap_mb is None else bucket_cap_mb * 1e6
        if pgm.process_group_manager.dp_world_size == 1:
            return
        self.initialize_buckets(params, limit)
        for param in params:
            param.register_post_accumulate_grad_hook(self.mark_param_as_ready)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        """Fills one bucket after the other. A bucket is full once it holds `limit` bytes."""
        members, size = [], 0
        for param in params:
            members.append(param)
            size += param.numel() * param.element_size()
            if size >= limit or param is params[-1]:
                self.buckets.append(Bucket(members, pgm.process_group_manager.dp_group))
                self.bucket_of.update(dict.fromkeys(members, self.buckets[-1]))
                members, size = [], 0

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def mark_param_as_ready(self, param: nn.Parameter) -> None:
        """Called by backward when `param.grad` holds the sum over the micro-batches so far."""
        bucket = self.bucket_of[param]
        assert bucket.handle is None, "call finish_gradient_sync() after the last backward, or replicas drift apart"
        bucket.take(param)
        if not self.require_backward_grad_sync:
            return
        bucket.awaited.discard(param)
        for each in self.buckets:  # in order, because all ranks have to launch the same all-reduces in the same order
            if each.awaited:
                break
            if each.handle is None:
                each.sync_gradient()

    def finish_gradient_sync(self) -> None:
        """Launches buckets that lack gradients, of parameters that the loss does not use, and waits for all buckets."""
        for bucket in self.buckets:
            for param in bucket.awaited:
                if param.grad is None:
                    param.grad = bucket.views[param].zero_()
            if bucket.handle is None:
                bucket.sync_gradient()
        for bucket in self.buckets:
            bucket.wait()


def all_reduce_loss_across_dp_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The mean over the global batch, of which each dp rank has computed its own share."""
    grid = pgm.process_group_manager
    if grid.dp_world_size > 1:
        dist.all_reduce(loss, group=grid.dp_group)
        loss /= grid.dp_world_size
    return loss
