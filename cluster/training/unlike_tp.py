"""Pipelines that differ in their number of tensor-parallel ranks: a machine of four GPUs beside one of two.

A parameter is then cut in other places on each pipeline. Its gradients are summed in parts, which end wherever one of
the pipelines has a cut (the common refinement of the splits). Twelve rows over 3 and over 2 ranks:

    pipeline 0, tp 3    | rank 0    | rank 1    | rank 2    |
    pipeline 1, tp 2    | rank 3          | rank 4          |
    parts               | rows 0-3  | 4-5 | 6-7 | 8-11      |     summed over 0 and 3, 1 and 3, 1 and 4, 2 and 4

Where several matrices lie side by side in one parameter (GPT-2's queries, keys and values), each of them is cut so.
A parameter that tensor parallelism leaves whole, such as a norm's weight, has the same gradient on all tp ranks of a
stage. They divide it by their number, and it is summed over all owners: 2 ranks beside 3 could not be paired.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import Bucket, DataParallelBucket
from machine_facts import gather
from pipeline_template import PipelineTemplate
from process_group_manager import Mismatch, ProcessGroupManager
from training.samples import SamplesPlugin


@dataclass(frozen=True)
class Template(PipelineTemplate):
    """A pipeline template each of whose stages is split over `tp_size` ranks."""

    tp_size: int = 1


class UnlikeGrid(ProcessGroupManager):
    """The ranks of pipelines with `tp_sizes` of their own, pipeline after pipeline, TP varying fastest."""

    def arrange(self, stages_per_pipeline: list[int], tp_sizes: list[int]) -> list[torch.Tensor]:
        sizes = [stages * tp_size for stages, tp_size in zip(stages_per_pipeline, tp_sizes)]
        if sum(sizes) != self.world_size:
            raise Mismatch(f"pipelines of {stages_per_pipeline} stages on {tp_sizes} tensor-parallel ranks each need "
                           f"{sum(sizes)} processes, but {self.world_size} run: start as many, or change --pipelines "
                           "or --tp_size")
        blocks = torch.arange(self.world_size).split(sizes)
        return [block.view(-1, tp_size) for block, tp_size in zip(blocks, tp_sizes)]

    def group_of(self, places: set[tuple[int, int]]) -> None:
        """No parameter as a whole has owners here, its parts have: see SplitGradients."""


class Held(NamedTuple):
    """What one rank holds of a parameter: `rows` along `dim` of each of `fused` matrices side by side, `numel` numbers.
    Where it holds all of it, the dim is None, the rows are 0, and `copies` ranks of its stage do so."""

    dim: int | None
    fused: int
    rows: int
    numel: int
    copies: int


def held_of(model: nn.Module, name: str, param: nn.Parameter) -> Held:
    module, _, key = name.rpartition(".")
    owner = model.get_submodule(module)
    dim, fused = getattr(owner, "tp_dims", {}).get(key), getattr(owner, "tp_fused", {}).get(key, 1)
    if dim is None:
        return Held(None, 1, 0, param.numel(), pgm.process_group_manager.tp_world_size)
    return Held(dim, fused, param.size(dim) // fused, param.numel(), 1)


def refine(stages: list[list[tuple[int, int]]]) -> Iterator[tuple[dict[int, int], int]]:
    """The parts of a parameter: for each rank that holds it the part's first row, counted from its own, and the number
    of rows. `stages`: (rank, rows) of the tp ranks of each stage with the parameter; 0 rows stand for all of it."""
    total = max(sum(rows for _, rows in stage) for stage in stages)
    spans, cuts = {}, {0, total}
    for stage in stages:
        stops = [*itertools.accumulate(rows for _, rows in stage)]
        spans |= {rank: (stop - rows, stop) if rows else (0, total) for (rank, rows), stop in zip(stage, stops)}
        cuts.update(stops)
    for first, stop in itertools.pairwise(sorted(cuts) if total else (0, 0)):
        yield {rank: first - a for rank, (a, b) in spans.items() if a <= first and stop <= b}, stop - first


class Part(NamedTuple):
    """`rows` of a gradient, from the row `first` on; all of it where `held` has no dim."""

    param: nn.Parameter
    held: Held
    first: int
    rows: int

    def view(self, gradient: torch.Tensor) -> torch.Tensor:
        dim, fused, *_ = self.held
        return gradient if dim is None else gradient.unflatten(dim, (fused, -1)).narrow(dim + 1, self.first, self.rows)


class BucketOfParts:
    """Parts of gradients with the same owners. They are copied into a `bucket`, summed there, and copied back."""

    def __init__(self, parts: list[Part], group: dist.ProcessGroup, bucket_class: type[Bucket]):
        self.parts, self.params = parts, {part.param for part in parts}
        numbers = [part.view(part.param).numel() for part in parts]
        self.bucket = bucket_class([parts[0].param.new_empty(sum(numbers))], group)
        self.pieces, self.awaited = self.bucket.grad_data.split(numbers), set(self.params)

    @property
    def handle(self):
        return self.bucket.handle

    def sync_gradient(self) -> None:
        for part, piece in zip(self.parts, self.pieces):
            piece.copy_(part.view(part.param.grad).flatten()).div_(part.held.copies)
        self.bucket.sync_gradient()

    def wait(self) -> None:
        self.bucket.wait()
        for part, piece in zip(self.parts, self.pieces):
            own = part.view(part.param.grad)
            own.copy_(piece.view(own.shape))
        self.awaited = set(self.params)


class SplitGradients(DataParallelBucket):
    """A stage whose gradients are summed in parts. All ranks work out all buckets, and launch theirs in one order."""

    def initialize_buckets(self, params: list[tuple[nn.Parameter, None]], limit: float) -> None:
        grid, model, tied = pgm.process_group_manager, self.module.model, self.module.tied or ()
        names = {param: name for name, param in model.named_parameters()}
        own = {tied[0] if names[param] in tied else names[param]: param for param, _ in params}
        everyone = gather({key: tuple(held_of(model, names[param], param)) for key, param in own.items()})
        everyone = [{key: Held(*facts) for key, facts in each.items()} for each in everyone]
        stages = [row for block in grid.ranks for row in reversed(block.tolist())]  # in the order of backward
        waiting: dict[tuple[int, ...], tuple[float, list[Part]]] = {}  # by their owners
        for key in sorted({key: None for row in stages for key in everyone[row[0]]}, key=lambda key: key in tied):
            held = [[(rank, everyone[rank][key]) for rank in row] for row in stages if key in everyone[row[0]]]
            split = max((each for row in held for _, each in row), key=lambda each: each.rows)  # or whole everywhere
            for firsts, rows in refine([[(rank, each.rows) for rank, each in row] for row in held]):
                ranks, numel = tuple(sorted(firsts)), split.numel * (rows / split.rows if split.rows else 1)
                if len(ranks) == 1:  # nothing to sum
                    continue
                size, parts = waiting.pop(ranks, (0.0, []))
                if grid.global_rank in firsts:
                    copies = everyone[grid.global_rank][key].copies
                    parts.append(Part(own[key], split._replace(copies=copies), firsts[grid.global_rank], rows))
                waiting[ranks] = size + numel * next(model.parameters()).element_size(), parts
                if waiting[ranks][0] >= limit:
                    self.add_bucket(ranks, waiting.pop(ranks)[1])
        for ranks, (_, parts) in waiting.items():
            self.add_bucket(ranks, parts)

    def add_bucket(self, ranks: tuple[int, ...], parts: list[Part]) -> None:
        if group := pgm.process_group_manager.group_over(ranks):
            self.buckets.append(BucketOfParts(parts, group, self.bucket_class))
            for part in parts:
                self.bucket_of.setdefault(part.param, []).append(self.buckets[-1])

    def mark_param_as_ready(self, param: nn.Parameter) -> None:
        assert all(each.handle is None for each in self.bucket_of[param]), "call finish_gradient_sync()"
        if not self.require_backward_grad_sync:
            return
        for each in self.bucket_of[param]:
            each.awaited.discard(param)
        for each in self.buckets:
            if each.awaited:
                break
            if each.handle is None:
                each.sync_gradient()

    def finish_gradient_sync(self) -> None:
        for bucket in self.buckets:
            for param in bucket.awaited:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            if bucket.handle is None:
                bucket.sync_gradient()
        for bucket in self.buckets:
            bucket.wait()


class UnlikePlugin(SamplesPlugin):
    """Takes pipelines of `Template`s, each with a tp_size of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.grid_class, self.data_parallel_class = UnlikeGrid, SplitGradients

    def set_pipelines(self, pipelines: list[Template], num_microbatches) -> None:
        self.tp_size = [template.tp_size for template in pipelines]
        super().set_pipelines(pipelines, num_microbatches)
