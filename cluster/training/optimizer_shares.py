"""The optimizer in unequal shares: the owners of a bucket of gradients divide AdamW's work and memory among them.

Otherwise each rank repeats the whole step, and keeps both averages of all that it holds. But AdamW treats each number
by itself. So the weights of a bucket stand one after the other in a flat buffer, which is cut in proportion to the
shares of its owners (ZeRO, Rajbhandari et al. 2020, cuts in equal parts):

    shares 4, 2, 1        | rank 0               | rank 1    | rank 2 |
    gradients             each rank sends part r of its sum to rank r, which adds them up: a reduce-scatter
    norm, clipping, AdamW each rank has its own parts alone, and what no other rank owns
    weights               rank r sends part r to all owners: an all-gather

A number is updated on one rank and copied to the others, so replicas stay equal in every bit. A reduce-scatter and an
all-gather send as many bytes as an all-reduce; where shares are unequal, the rank with the largest one sends the most.
"""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from checkpoints.pieces import Part
from data_parallel import Bucket, DataParallelBucket
from machine_facts import free_memory, gather, say
from planning.clock import time_optimizer
from timeline import timeline
from training.samples import SamplesPlugin
from utils import UserError, zero_or_more_float

BY = ("speed", "memory")
MEASURED, SECONDS = 1 << 22, 0.3  # numbers of which a step of AdamW is timed, and for how long
CHUNK = 1 << 14  # numbers whose squares are summed at once: float32 loses digits in sums of millions


def as_shares(text: str) -> str | list[float]:
    """The type of --optimizer_shares."""
    if text in BY:
        return text
    try:
        shares = [zero_or_more_float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if not any(shares):
        raise argparse.ArgumentTypeError(f"must be {' or '.join(BY)}, or numbers that are not all zero, one for each "
                                         f"rank, as in 4,2,1, got {text!r:.60}")
    return shares


def choose_optimizer_shares(args, device: torch.device) -> list[float]:
    """For each rank its share; their sum is 1. Collective. Raises UserError, on all ranks, for too few or too many."""
    wanted, size = args.optimizer_shares, dist.get_world_size()
    if wanted == "memory":
        wanted = [max(1.0, free) for free in gather(free_memory(device))]
    elif wanted == "speed":
        numbers = [] if args.equal_shares else [nn.Parameter(torch.zeros(MEASURED, device=device))]
        wanted = gather(1 / time_optimizer(numbers, SECONDS, device) if numbers else 1.0)
    elif len(wanted) != size:
        raise UserError(f"--optimizer_shares has {len(wanted)} numbers, and {size} ranks train: write one for each, or "
                        f"{' or '.join(BY)}")
    return [share / max(wanted) / sum(each / max(wanted) for each in wanted) for share in wanted]


class Messages:
    """Under way: sent[i] to rank i of the group, received[i] from it. Of this rank, and of no numbers, there is none.

    gloo sends from and to host memory only, so on CUDA over gloo the tensors are copied there and back.
    """

    def __init__(self, sent: list[torch.Tensor], received: list[torch.Tensor], group: dist.ProcessGroup):
        wire = "cpu" if dist.get_backend(group) == "gloo" else sent[0].device
        others = [i for i in range(group.size()) if i != group.rank()]
        self.received = [(received[i], received[i].to(wire)) for i in others if len(received[i])]
        arriving = iter(self.received)
        self.operations = [dist.P2POp(dist.isend, sent[i].to(wire), group=group, group_peer=i)
                           for i in others if len(sent[i])]
        self.operations += [dist.P2POp(dist.irecv, next(arriving)[1], group=group, group_peer=i)
                            for i in others if len(received[i])]
        self.handles = dist.batch_isend_irecv(self.operations)

    def wait(self) -> None:
        """It may be called again, and then does nothing."""
        for handle in self.handles:
            handle.wait()
        for tensor, arrived in self.received:
            if arrived is not tensor:
                tensor.copy_(arrived)
        self.handles, self.operations, self.received = [], [], []


class ReduceScatter(Messages):
    """Adds to this rank's part of a flat buffer, of parts of these sizes, what the others of the group have there."""

    def __init__(self, buffer: torch.Tensor, sizes: list[int], group: dist.ProcessGroup):
        parts = buffer.split(sizes)
        self.own = parts[group.rank()]
        super().__init__(parts, [torch.empty_like(self.own) for _ in parts], group)

    def wait(self) -> None:
        others = [tensor for tensor, _ in self.received]
        super().wait()
        for other in others:  # always in this order, so that a run can be repeated to the last bit
            self.own += other


class SharedBucket(Bucket):
    """A bucket whose weights, too, are views of a flat buffer. `parts`: of each parameter its Part. `under_way`: the
    reduce-scatters of all buckets, in order; at most two, because what they receive takes memory."""

    def __init__(self, params: list[nn.Parameter], process_group: dist.ProcessGroup, shares: list[float],
                 under_way: list):
        super().__init__(params, process_group)
        self.under_way, self.parts, self.weights = under_way, {}, torch.cat([param.data.flatten() for param in params])
        ranks, size, position = dist.get_process_group_ranks(process_group), len(self.weights), 0
        total = sum(shares[rank] for rank in ranks)
        ends = [round(size * sum(shares[rank] for rank in ranks[:k]) / total) for k in range(len(ranks) + 1)]
        self.sizes, own = [b - a for a, b in zip(ends, ends[1:])], process_group.rank()
        for param in params:
            within = [min(max(end - position, 0), param.numel()) for end in ends]  # of this parameter
            start, stop = position + within[own], position + within[own + 1]
            part = nn.Parameter(self.weights[start:stop])
            part.grad = self.grad_data[start:stop]
            counts = {rank: b - a for rank, a, b in zip(ranks, within, within[1:])}
            self.parts[param] = Part(part, within[own], counts, param.shape)
            param.data = self.weights[position : position + param.numel()].view_as(param)
            position += param.numel()

    def sync_gradient(self) -> None:
        while len(self.under_way) > 1:
            self.under_way.pop(0).wait()
        self.handle = timeline.background(ReduceScatter(self.grad_data, self.sizes, self.process_group),
                                          "reduce-scatter")
        self.under_way.append(self.handle)

    def gather_weights(self):
        """Starts it: a handle."""
        parts = self.weights.split(self.sizes)
        messages = Messages([parts[self.process_group.rank()]] * len(parts), parts, self.process_group)
        return timeline.background(messages, "all-gather")


class SharedOptimizerPlugin(SamplesPlugin):
    """Its optimizer updates this rank's parts, and what no other rank owns. `optimizer.parts`: of each parameter its
    Part, of which a checkpoint makes whole averages. Call share_out() between set_pipelines and configure."""

    def share_out(self, shares: list[float]) -> None:
        """`shares`: rank by rank, their sum is 1. Raises UserError where owners have none, all of them."""
        grid = pgm.process_group_manager
        for module in (name for names in self.pipelines[0].modules_per_stage for name in names):
            stages = [grid.ranks[dp][pp] for dp, template in enumerate(self.pipelines)
                      for pp, names in enumerate(template.modules_per_stage) if module in names]
            for owners in torch.stack(stages, dim=1).tolist():  # those of one tp rank
                if len(owners) > 1 and not any(shares[rank] for rank in owners):
                    raise UserError(f"--optimizer_shares gives nothing to ranks {', '.join(map(str, owners))}, who "
                                    f"alone hold {module}: give one of them a share")
        say(f"optimizer shares, by rank: {', '.join(f'{share:.1%}' for share in shares)}")
        self.bucket_class = functools.partial(SharedBucket, shares=shares, under_way=[])

    def configure(self, *args, **options):
        model, optimizer, dataloader = super().configure(*args, **options)
        optimizer.parts = {param: part for bucket in model.buckets for param, part in bucket.parts.items()}
        for group in optimizer.param_groups:
            group["params"] = [optimizer.parts[param].own if param in optimizer.parts else param
                               for param in group["params"]]
        optimizer.register_step_post_hook(functools.partial(self.gather_weights, model))
        return model, optimizer, dataloader

    @staticmethod
    def gather_weights(model: DataParallelBucket, *_) -> None:
        """The end of each optimizer.step(): all owners get the weights that one of them has updated."""
        for handle in [bucket.gather_weights() for bucket in model.buckets]:
            handle.wait()

    def clip_grad_norm(self, model: DataParallelBucket, max_norm: float) -> torch.Tensor:
        """As tensor_parallel.clip_grad_norm. Each rank counts its own parts and what it alone owns: each number once.
        """
        grid, found = pgm.process_group_manager, []
        split = {getattr(module, name) for module in model.modules() for name in getattr(module, "tp_dims", ())}
        squares = next(model.parameters()).new_zeros(())
        for param in model.parameters():
            own = model.bucket_of[param].parts[param].own if param in model.bucket_of else param
            if own.grad is not None and own.numel():
                found.append(own)
                if grid.tp_rank == 0 or param in split:
                    squares += torch.nn.utils.get_total_norm(own.grad.flatten().split(CHUNK)) ** 2
        dist.all_reduce(squares)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(found, max_norm, squares.sqrt())
        return squares.sqrt()
