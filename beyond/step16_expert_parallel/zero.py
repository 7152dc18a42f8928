"""ZeRO: data parallelism whose ranks divide the optimizer's work and memory (Rajbhandari et al. 2020).

N replicas need not all hold AdamW's two averages and update all weights. The weights of a bucket stand one after the
other in a flat buffer, which is cut into N shards. Rank r owns shard r: it alone keeps the averages for these numbers
and updates them. A shard begins and ends anywhere inside of a parameter, because AdamW treats each number by itself.

    gradients of the bucket   | rank 0 | rank 1 | rank 2 |    on each rank, of its own samples
                                   |        |        |        reduce-scatter: shard r of all ranks is summed on rank r
    AdamW                     | rank 0 | rank 1 | rank 2 |    each rank updates its own shard
                                   |        |        |        all-gather: rank r sends shard r to all others
    weights of the bucket     | rank 0   rank 1   rank 2 |    on each rank

An all-reduce is a reduce-scatter and an all-gather, so level 1 sends as many bytes as data parallelism.

    --zero 1   Gradients add up on each rank. After the last micro-batch, they are scattered and given up.
    --zero 2   A bucket is scattered as soon as each of its parameters has a gradient, in a pipeline after a B or a W.
               They add up in the shard, so no rank ever holds all of them.

Replicas scatter the same buckets in the same order: all run the same schedule, on graphs of the same shape.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import Bucket, DataParallelBucket
from timeline import timeline
from utils import UserError, positive_int

# torch 2.13 renamed them
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Messages in the background: sent[i] goes to rank i of the group, received[i] comes from it, but for this rank's.

    None is no message. gloo sends from and to host memory only, so on CUDA over gloo tensors are copied there and back.
    """

    def __init__(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup):
        rank, size = group.rank(), group.size()
        wire_device = "cpu" if dist.get_backend() == "gloo" else "cuda"
        self.received, self.arriving = received, [each if each is None else each.to(wire_device) for each in received]
        self.operations = []  # they keep the tensors
        for other in (*range(rank + 1, size), *range(rank)):  # the ranks don't all send to the same one first
            for call, tensor in ((dist.isend, sent[other]), (dist.irecv, self.arriving[other])):
                if tensor is not None:
                    self.operations.append(dist.P2POp(call, tensor.to(wire_device), group=group, group_peer=other))
        self.handles = dist.batch_isend_irecv(self.operations) if self.operations else []  # none in a group of one

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        for tensor, arrived in zip(self.received, self.arriving):
            if arrived is not tensor:
                tensor.copy_(arrived)

    def get_future(self):  # for the timeline: several messages of NCCL have none together
        return self

    def then(self, callback) -> None:
        """Calls it at once, on a stream that waits for the messages, as the future of a collective does."""
        with torch.cuda.stream(torch.cuda.Stream()):
            for handle in self.handles:
                handle.wait()
            callback(self)


def can_use_library(sizes: list[int]) -> bool:
    """NCCL's collectives take shards of one size. gloo's reduce-scatter is an all-reduce, with twice the bytes."""
    return dist.get_backend() == "nccl" and len(set(sizes)) == 1


def reduce_scatter(full: torch.Tensor, sizes: list[int], group: dist.ProcessGroup):
    """Starts to sum shard r of the group's flat tensors `full` on rank r. `sizes`: numbers in each rank's shard.

    Returns a handle and, for this rank's shard, summands that are there once the handle has been waited for.
    """
    parts, rank = full.split(sizes), group.rank()
    if can_use_library(sizes):
        total = torch.empty_like(parts[rank])
        return reduce_scatter_tensor(total, full, group=group, async_op=True), [total]
    received = [torch.empty_like(parts[rank]) for _ in sizes]
    received[rank] = parts[rank]
    return Exchange(parts, received, group), received[rank + 1 :] + received[: rank + 1]  # its own comes last


def all_gather(full: torch.Tensor, sizes: list[int], group: dist.ProcessGroup):
    """Starts to send this rank's shard of the flat tensor `full` to all, and to receive theirs into it: a handle."""
    parts = full.split(sizes)
    own = parts[group.rank()]
    if can_use_library(sizes):
        return all_gather_tensor(full, own, group=group, async_op=True)
    return Exchange([own] * group.size(), parts, group)


class ShardedBucket:
    """Parameters whose weights share a flat buffer, of which each rank of `group` owns a shard, its part by `shares`.
    Of each shard there are copies in other groups.

    `shard` (numbers,) is a view of this rank's part, and what the optimizer updates. Its gradient is the mean over all
    replicas. `gradients` holds those of the parameters, from the first one until all are scattered.
    """

    def __init__(self, params: list[nn.Parameter], replicas: pgm.Replicas, shares: list[int]):
        self.params, self.group, self.copies, self.gradients = params, replicas.shard, replicas.copy, None
        self.weights = torch.cat([param.data.flatten() for param in params])
        for param, part in zip(params, self.weights.split([param.numel() for param in params])):
            param.data = part.view_as(param)
        bounds = [len(self.weights) * sum(shares[:rank]) // sum(shares) for rank in range(len(shares) + 1)]
        self.sizes = [end - start for start, end in zip(bounds, bounds[1:])]
        self.shard = nn.Parameter(self.weights.split(self.sizes)[self.group.rank()])

    def take(self, param: nn.Parameter) -> None:
        """Makes `param.grad` a view into a buffer, to which later micro-batches add. It is made for the first one."""
        self.gradients = self.gradients or Bucket(self.params, self.group)
        self.gradients.take(param)

    def scatter(self) -> None:
        """Starts the reduce-scatter. The parameters give up their gradients: the next backward makes new ones."""
        handle, self.summands = reduce_scatter(self.gradients.grad_data, self.sizes, self.group)
        self.handle, self.gradients = timeline.background(handle, "reduce-scatter"), None
        for param in self.params:
            param.grad = None

    def wait(self) -> None:
        """Waits for the reduce-scatter and adds the group's part of the mean over all replicas to the gradient."""
        with timeline.span("wait"):
            self.handle.wait()
        total, *others = self.summands
        for other in others:  # always in this order, so that a run can be repeated to the last bit
            total += other
        total /= pgm.process_group_manager.cp_dp_world_size
        self.shard.grad = total if self.shard.grad is None else self.shard.grad.add_(total)
        self.handle = self.summands = None  # and with them the buffers


class Zero(DataParallelBucket):
    """Wraps a model. `level` is 1 or 2, see above (3: see fsdp.py); `shares`: a positive number for each shard."""

    def __init__(self, module: nn.Module, level: int, shares: list[int] | None = None):
        self.level, self.shares = level, shares or [1] * pgm.process_group_manager.replicas.shard.size()
        self.in_flight = None
        super().__init__(module)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        """Gradients that further ranks sum need shards that are alike on them, so each kind has buckets of its own."""
        self.kinds = {param: pgm.process_group_manager.kind(name) for name, param in self.module.named_parameters()}
        for kind in sorted(set(self.kinds.values())):
            members = [param for param in params if self.kinds[param] == kind]
            super().initialize_buckets(members, math.inf if kind == "whole" else limit)

    def make_bucket(self, params: list[nn.Parameter]) -> ShardedBucket:
        return ShardedBucket(params, *self.division(params))

    def division(self, params: list[nn.Parameter]) -> tuple[pgm.Replicas, list[int]]:
        """The replicas of parameters of one kind, and the shares of those that divide them."""
        replicas, places = pgm.process_group_manager.replicas_of(self.kinds[params[0]])
        return replicas, [self.shares[place] for place in places]

    def mark_param_as_ready(self, param: nn.Parameter) -> None:
        """Called by backward when `param.grad` holds the sum over the micro-batches that are not scattered yet."""
        bucket = self.bucket_of[param]
        bucket.take(param)
        if not self.require_backward_grad_sync and self.level == 1:
            return
        bucket.gradients.awaited.discard(param)
        if not bucket.gradients.awaited:
            self.scatter(bucket)

    def scatter(self, bucket: ShardedBucket) -> None:
        """Starts the reduce-scatter when the one before has ended, or the buffers of all buckets would be alive."""
        if self.in_flight:
            self.in_flight.wait()
        bucket.scatter()
        self.in_flight = bucket

    def finish_gradient_sync(self) -> None:
        """Scatters what is left: of a bucket over two chunks, one may have had gradients since the last time."""
        for bucket in self.buckets:
            if bucket.gradients:
                self.scatter(bucket)
        self.in_flight.wait()
        self.in_flight = None
        for bucket in self.buckets:
            if bucket.copies.size() > 1:
                dist.all_reduce(bucket.shard.grad, group=bucket.copies)

    def gradient(self, param: nn.Parameter) -> torch.Tensor:
        """The part of the gradient that lies in this rank's shard: flat, and often empty."""
        bucket = self.bucket_of[param]
        start = param.storage_offset() - sum(bucket.sizes[: bucket.group.rank()])  # seen from the shard
        return bucket.shard.grad[max(start, 0) : max(start + param.numel(), 0)]

    def named_parameters(self, *args, **options) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards: they are what zero_grad(), clipping and the optimizer are for."""
        return ((f"shard {i}", bucket.shard) for i, bucket in enumerate(self.buckets))

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """As tensor_parallel.clip_grad_norm. Of replicas, each counts its own shards, but for copies of others."""
        grid, norms = pgm.process_group_manager, [self.buckets[0].shard.grad[:0]]  # a rank may count nothing
        split = {getattr(module, name) for module in self.modules() for name in getattr(module, "tp_dims", ())}
        for name, param in self.module.named_parameters():
            is_first_copy = self.bucket_of[param].copies.rank() == 0 and (grid.tp_rank == 0 or param in split)
            if is_first_copy and (grid.pp_is_first_stage or name != "embedding.weight"):
                part = self.gradient(param)
                rows = part[: len(part) // 1024 * 1024].view(-1, 1024)  # float32 loses digits in sums of millions
                norms += [torch.linalg.vector_norm(rows, dim=-1), part[rows.numel() :]]
        squares = torch.nn.utils.get_total_norm(norms) ** 2
        dist.all_reduce(squares)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, squares.sqrt())
        return squares.sqrt()

    def gather_weights(self) -> None:
        """After the optimizer's step: each rank sends the shards that it has updated to all others."""
        handles = [timeline.background(all_gather(bucket.weights, bucket.sizes, bucket.group), "all-gather")
                   for bucket in self.buckets]
        with timeline.span("wait"):
            for handle in handles:
                handle.wait()


def share_list(text: str) -> list[int]:
    """The type of --zero_shares."""
    return [positive_int(word) for word in text.split(",")]


def check_zero(args):
    """Returns the flags. Raises UserError for some that can't be had together."""
    replicas = args.dp_size * args.cp_size
    if args.zero and replicas == 1:
        raise UserError(f"--zero {args.zero} divides what the replicas hold, and --dp_size 1 is only one: "
                        "raise --dp_size or --cp_size, or leave --zero out")
    if args.shard_size and (not args.zero or args.shard_size == 1 or replicas % args.shard_size):
        raise UserError(f"--shard_size {args.shard_size} of {replicas} replicas divide among them what --zero "
                        f"{args.zero} says: use --zero, and a divisor of {replicas} that is 2 or more")
    if args.gather_once and args.zero != 3:
        raise UserError(f"--gather_once is for divided weights, but --zero is {args.zero}: use --zero 3 with it")
    shards = args.shard_size or replicas
    if args.zero_shares and (not args.zero or len(args.zero_shares) != shards):
        raise UserError(f"--zero_shares names {len(args.zero_shares)} parts of what --zero {args.zero} divides among "
                        f"{shards} replicas: use --zero, and a number for each of these")
    return args
