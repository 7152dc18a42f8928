"""Data parallelism between unlike pipelines: each module's gradient is summed over the ranks that hold the module.

Which ranks these are differs from module to module. Buckets therefore end where the owners change:

    pipeline 0   | stage 0: embedding, layers 0-4   | stage 1: layers 5-7, projection |
    pipeline 1   | stage 0: embedding, layers 0-2 | stage 1: layers 3-7, projection   |
    buckets      | owners 0, 2                    | 0, 3 | owners 1, 3              |  <- launched from here

Each pipeline's gradient is the mean over its own micro-batches. It is weighted by their share of all micro-batches, so
that the sum over pipelines is the mean over the global batch, in which every sample counts once.

A tied embedding has all first and all last stages as owners, in one sum. `param.grad` is a view into its bucket, as in
step 8. All ranks fill and launch their buckets in the model's order, last module first, and a tied parameter at the
end: the same on every rank, whatever it holds.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate
from timeline import timeline
from wire import CompressedAllReduce


class Owners(NamedTuple):
    """Where a module is held, as (pipeline, stage), and the group of the ranks there with this tp rank."""

    places: list[tuple[int, int]]
    group: dist.ProcessGroup | None  # None: this rank is not among them, or is the only one


def find_owners(pipelines: list[PipelineTemplate], tied: tuple[str, str] | None) -> dict[str, Owners]:
    """Module name -> its owners, in the order of the model. Collective.

    A tied parameter comes before all of them, under its name: its owners are those of both modules that have it.
    """
    modules = [name for stage in pipelines[0].modules_per_stage for name in stage]
    places = {name: [(k, s) for k, template in enumerate(pipelines)
                     for s, names in enumerate(template.modules_per_stage) if name in names] for name in modules}
    if tied:
        first, last = (next(name for name in modules if param.startswith(f"{name}.")) for param in tied)
        places = {tied[0]: sorted({*places[first], *places[last]}), **places}
    grid = pgm.process_group_manager
    return {name: Owners(at, grid.group_of(at) if len(at) > 1 else None) for name, at in places.items()}


class Bucket:
    """Parameters whose gradients share one flat buffer and one all-reduce over `group`; `weight` is this pipeline's.

    `wire_dtype`: what gradients are encoded in on their way, see wire.py; None: they travel as they are.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup, weight: float,
                 wire_dtype: torch.dtype | None = None):
        self.params, self.group, self.weight = params, group, weight
        self.wire_dtype = None if wire_dtype == params[0].dtype else wire_dtype
        self.buffer = params[0].new_zeros(sum(param.numel() for param in params))
        self.awaited, self.handle = set(params), None
        parts = self.buffer.split([param.numel() for param in params])
        self.views = {param: part.view_as(param) for param, part in zip(params, parts)}

    def take(self, param: nn.Parameter) -> None:
        """Makes `param.grad` a view of the buffer where autograd, finding none to add to, has made a new tensor."""
        if param.grad is not self.views[param]:
            self.views[param].copy_(param.grad)
            param.grad = self.views[param]

    def launch(self) -> None:
        """Starts the sum. A parameter that the last micro-batch did not reach has what others left, or zero."""
        self.unreached = {param for param in self.awaited if param.grad is None}
        for param in self.awaited:
            param.grad = self.views[param].zero_() if param.grad is None else param.grad.mul_(self.weight)
        self.launched = timeline.now()
        if self.wire_dtype is None:
            self.handle = dist.all_reduce(self.buffer, group=self.group, async_op=True)
        else:
            self.handle = CompressedAllReduce(self.buffer, self.group, self.wire_dtype)

    def gather(self) -> None:
        """The second half of a compressed sum, which has to have come so far that this rank's part can be added."""
        if self.wire_dtype is not None:
            with timeline.span("wait"):
                self.handle.gather()

    def finish(self) -> None:
        """Waits for the sum of what each pipeline has weighted."""
        with timeline.span("wait"):
            self.handle.wait()
        timeline.add("all-reduce", None, self.launched, communication=True)
        for param in self.unreached:  # by no pipeline, as all have the same model: the optimizer leaves it alone
            param.grad = None
        self.awaited, self.handle = set(self.params), None


class DataParallelBucket(nn.Module):
    """Wraps a stage; `require_backward_grad_sync` says whether the coming backward ends an accumulation.

    After that backward, finish_gradient_sync() has to be called before the gradients are read.
    `weight`: this pipeline's share of the global batch. `owners`: see find_owners.
    `bucket_mb`: megabytes a bucket; by default 25, or an eighth of a small model: one bucket would overlap nothing.
    `wire_dtype`: see Bucket.
    """

    def __init__(self, module: PipelineStage, owners: dict[str, Owners], weight: float,
                 bucket_mb: float | None = None, wire_dtype: torch.dtype | None = None):
        super().__init__()
        self.module, self.weight, self.wire_dtype = module, weight, wire_dtype
        self.require_backward_grad_sync = True
        self.buckets, self.bucket_of = [], {}
        ordered = list(reversed(in_model_order(module, owners)))  # backward reaches them roughly in this order
        device = next(module.parameters()).device
        num_bytes = torch.tensor(sum(param.nbytes for param, _ in ordered), device=device)
        dist.all_reduce(num_bytes, dist.ReduceOp.MAX)  # all owners of a bucket have to close it at the same parameter
        self.make_buckets(ordered, min(25e6, num_bytes.item() / 8) if bucket_mb is None else bucket_mb * 1e6)
        for param, _ in ordered:
            if param in self.bucket_of:
                param.register_post_accumulate_grad_hook(self.gradient_arrived)

    def make_buckets(self, ordered: list[tuple[nn.Parameter, Owners]], limit: float) -> None:
        """Fills one bucket after the other; one is full once it holds `limit` bytes, or the next has other owners."""
        members, size = [], 0
        for i, (param, owners) in enumerate(ordered):
            if owners.group is None:
                continue
            members.append(param)
            size += param.numel() * param.element_size()
            following = ordered[i + 1][1].places if i + 1 < len(ordered) else None
            if size >= limit or following != owners.places:
                self.buckets.append(Bucket(members, owners.group, self.weight, self.wire_dtype))
                self.bucket_of.update(dict.fromkeys(members, self.buckets[-1]))
                members, size = [], 0

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Runs inside backward, once `param.grad` holds the sum over the micro-batches so far."""
        bucket = self.bucket_of[param]
        bucket.take(param)
        if not self.require_backward_grad_sync:
            return
        param.grad *= self.weight
        bucket.awaited.discard(param)
        for bucket in self.buckets:  # in order, so that all ranks launch the same all-reduces in the same order
            if bucket.awaited:
                break
            if bucket.handle is None:
                bucket.launch()

    def finish_gradient_sync(self) -> None:
        """Launches what no gradient has completed (a parameter that the loss did not reach), waits for all."""
        for bucket in self.buckets:
            if bucket.handle is None:
                bucket.launch()
        for bucket in self.buckets:
            bucket.gather()
        for bucket in self.buckets:
            bucket.finish()


def in_model_order(stage: PipelineStage, owners: dict[str, Owners]) -> list[tuple[nn.Parameter, Owners]]:
    """The stage's parameters with their owners, as the model has them; the tied one, if there is one, comes first."""
    place, found = {name: i for i, name in enumerate(owners)}, []
    for name, param in stage.model.named_parameters():
        if not param.requires_grad:  # frozen: nobody sums what has no gradient
            continue
        is_tied = stage.tied is not None and name in stage.tied
        key = stage.tied[0] if is_tied else next(module for module in owners if name.startswith(f"{module}."))
        found.append((place[key], param, owners[key]))
    found.sort(key=lambda item: item[0])  # stable: within a module they keep their order
    return [(param, owned) for _, param, owned in found]
