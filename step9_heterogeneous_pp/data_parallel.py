"""Data parallelism between unlike pipelines: the gradient of each module is summed over the ranks that hold the module.

Which ranks these are, its owners, differs from module to module. So a bucket ends where the owners change:

    pipeline 0   | stage 0: embedding, layers 0-4 | stage 1: layers 5-7, projection |
    pipeline 1   | stage 0: embedding, layers 0-2 | stage 1: layers 3-7, projection |
    ranks        pipeline 0: 0 and 1, pipeline 1: 2 and 3
    owners       embedding, layers 0-2: 0 and 2 | layers 3-4: 0 and 3 | layers 5-7, projection: 1 and 3

The loss of each micro-batch is divided by the number of all micro-batches of the step, those of the other pipelines
included, so the sum of all gradients is that of the mean over the global batch. A tied embedding is owned by all first
and all last stages. All ranks fill and launch their buckets in the same order: the model's last module first, a tied
parameter at the end.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate
from timeline import timeline


def find_owners(stage: PipelineStage, pipelines: list[PipelineTemplate]) -> list[tuple]:
    """The stage's parameters, each with the group of its owners, None where this rank is the only one. Collective.

    They are in the order of backward: the model's last module first, a tied parameter at the end. Frozen parameters
    have no gradient and are left out.
    """
    modules = [name for names in pipelines[0].modules_per_stage for name in names]
    places = {name: {(k, s) for k, template in enumerate(pipelines)
                     for s, names in enumerate(template.modules_per_stage) if name in names} for name in modules}
    grid, tied, found = pgm.process_group_manager, stage.tied or (), []
    params = {name: param for name, param in reversed([*stage.model.named_parameters()]) if param.requires_grad}
    for module in reversed(modules):
        group = grid.group_of(places[module])
        found += [(param, group) for name, param in params.items()
                  if name.startswith(f"{module}.") and name not in tied]
    if tied:  # owned by the owners of both modules
        ends = [module for module in modules if any(name.startswith(f"{module}.") for name in tied)]
        group = grid.group_of({place for module in ends for place in places[module]})
        found += [(params[name], group) for name in tied if name in params]
    return found


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
        handle = dist.all_reduce(self.grad_data, group=self.process_group, async_op=True)
        self.handle = timeline.background(handle, "all-reduce")

    def wait(self) -> None:
        with timeline.span("wait"):
            self.handle.wait()
        self.awaited, self.handle = set(self.params), None


class DataParallelBucket(nn.Module):
    """Wraps a stage. Set `require_backward_grad_sync` to whether the next backward is the last of the accumulation.

    After that backward, call finish_gradient_sync() before reading the gradients. `bucket_cap_mb`: megabytes per
    bucket, by default 25 or an eighth of a stage's gradients, whichever is less: one alone would overlap with nothing.
    """

    def __init__(self, module: PipelineStage, pipelines: list[PipelineTemplate], bucket_cap_mb: float | None = None,
                 bucket_class: type[Bucket] = Bucket):
        super().__init__()
        self.module, self.bucket_class = module, bucket_class
        self.require_backward_grad_sync = True
        self.buckets, self.bucket_of = [], {}
        params = find_owners(module, pipelines)
        num_bytes = torch.tensor(sum(param.nbytes for param, _ in params), device=next(module.parameters()).device)
        dist.all_reduce(num_bytes, dist.ReduceOp.MAX)  # all owners of a bucket have to end it at the same parameter
        limit = min(25e6, num_bytes.item() / 8) if bucket_cap_mb is None else bucket_cap_mb * 1e6
        self.initialize_buckets(params, limit)
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.mark_param_as_ready)

    def initialize_buckets(self, params: list[tuple[nn.Parameter, dist.ProcessGroup | None]], limit: float) -> None:
        """Fills one bucket after the other. One is full once it holds `limit` bytes, or the next owners are others."""
        members, size = [], 0
        for i, (param, group) in enumerate(params):
            if group is None:  # nothing to sum
                continue
            members.append(param)
            size += param.numel() * param.element_size()
            following = params[i + 1][1] if i + 1 < len(params) else None
            if size >= limit or following is not group:
                self.buckets.append(self.bucket_class(members, group))
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
