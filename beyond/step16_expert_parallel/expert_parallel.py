"""Expert parallelism: the experts of a layer live on different data-parallel ranks, and tokens travel to them and back
(GShard, Lepikhin et al. 2020).

Consecutive dp ranks form an ep group. Rank j of a group of N holds the experts [j E/N, (j+1) E/N) of each layer, and all
of the rest of the model. Each rank routes the tokens of its own samples, k rows for each token, sorted by expert:

    rows of rank 0  | expert 0 | 1 | 2 | 3 |   -> all-to-all ->   rank 0 holds experts 0 and 1: their rows of all ranks
    rows of rank 1  | expert 0 | 1 | 2 | 3 |                      rank 1 holds experts 2 and 3: their rows of all ranks

In an all-to-all each rank sends a part to each other rank: here as many rows as its tokens chose, which it tells first.
The results go the same way back. Backward sends gradients along the same two ways, with the numbers of rows swapped.

An expert has sum the gradients of all tokens of its ep group, so data parallelism adds up only those of the ranks that
hold the same expert, one in each group. Everything else is averaged over all dp ranks, as before.

Balance: tokens may choose as they like, so some experts may get most of them, and the other ranks wait. Two remedies:

    --balance_loss  Switch's loss E * sum_e f_e P_e of a layer and micro-batch, with the fraction f_e of the rows that
                    expert e got and its mean score P_e, is added to the loss (Fedus et al. 2021)
    --balance_bias  DeepSeek-V3's bias: it is added to the scores for the choice alone, and after each step raised for
                    the experts with less than the mean load and lowered for the others (Liu et al. 2024)
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import model as llama
import process_group_manager as pgm
from data_parallel import Bucket, DataParallelBucket
from tensor_parallel import ColumnParallelLinear, Copy, Reduce, RowParallelLinear
from timeline import timeline
from utils import UserError


def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Sends the first sent[0] rows (numbers, D) to rank 0 of the ep group, the next sent[1] to rank 1, and so on.

    Returns received[0] rows of rank 0, then received[1] of rank 1, and so on. gloo sends from host memory only.
    """
    wire_device = "cpu" if dist.get_backend() == "gloo" else rows.device
    arrived = torch.empty(sum(received), *rows.shape[1:], dtype=rows.dtype, device=wire_device)
    with timeline.span("all-to-all"):
        dist.all_to_all_single(arrived, rows.to(wire_device).contiguous(), received, sent,
                               group=pgm.process_group_manager.ep_group)
    return arrived.to(rows.device)


class AllToAll(torch.autograd.Function):
    """Rows go to other ranks; in backward their gradients come back, so the numbers of rows are swapped."""

    @staticmethod
    def forward(ctx, rows, sent, received):  # (sum of sent, D) -> (sum of received, D)
        ctx.sent, ctx.received = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.received, ctx.sent), None, None


class ExpertParallel(llama.Experts):
    """The experts of this rank, E/N of them. It runs the rows of all ranks of its ep group that have chosen one."""

    def __init__(self, experts: llama.Experts):
        grid = pgm.process_group_manager
        count = len(experts) // grid.ep_world_size
        names = [*experts][grid.ep_rank * count : (grid.ep_rank + 1) * count]
        super().__init__({name: experts[name] for name in names}, experts.num_experts)

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(N k, D) rows of this rank, sorted by expert, counts[e] for expert e -> their results in the same order."""
        size = pgm.process_group_manager.ep_world_size
        equal = [len(self)] * size
        here = exchange(counts, equal, equal).view(size, -1)  # (N, E/N): how many rows each rank has for each expert
        sent, received = counts.view(size, -1).sum(1).tolist(), here.sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received)  # sorted by rank and then by expert
        experts = torch.arange(len(self), device=rows.device).repeat(size)
        order = experts.repeat_interleave(here.flatten()).argsort(stable=True)  # sorts them by expert
        rows = super().run(rows.index_select(0, order), here.sum(0))
        rows = torch.empty_like(rows).index_copy(0, order, rows)
        return AllToAll.apply(rows, received, sent)


class Partial:
    """Takes the place of g behind a single expert: the partial sums of all experts are added up together."""

    apply = staticmethod(lambda x: x)


def split_experts(experts: llama.Experts) -> None:
    """Splits each expert over the tp group, as an MLP is, with one f in front of all of them and one g behind them.

    The router is not split, so f is not in front of it: each tp rank has all of its gradient. What the tp ranks have
    parts of is the gradient of what goes into the experts, and of the weights, by which partial sums are multiplied.
    """
    for expert in experts.values():
        expert.gate_proj = ColumnParallelLinear(expert.gate_proj)
        expert.up_proj = ColumnParallelLinear(expert.up_proj)
        expert.down_proj = RowParallelLinear(expert.down_proj, Partial)

    def apply_f(module: nn.Module, args: tuple) -> tuple:
        x, weights, chosen = args
        return Copy.apply(x), Copy.apply(weights), chosen

    def apply_g(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(output)

    experts.register_forward_pre_hook(apply_f)
    experts.register_forward_hook(apply_g)


def apply_expert_parallel(model: nn.Module) -> nn.Module:
    """Keeps of each layer's experts those of this rank, in place, while the model is on the meta device.

    Experts are split over the tp group as well.
    """
    grid = pgm.process_group_manager
    for layer in model.decoder_layers if model.config.num_experts else ():
        if grid.ep_world_size > 1:
            layer.mlp.experts = ExpertParallel(layer.mlp.experts)
        if grid.tp_world_size > 1:
            split_experts(layer.mlp.experts)
    return model


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    return {param for module in model.modules() if isinstance(module, ExpertParallel) for param in module.parameters()}


class ExpertDataParallel(DataParallelBucket):
    """Wraps a model with expert parallelism. Experts have buckets of their own, over the ranks with the same experts.

    The gradient of an expert is the sum over the tokens of its ep group, so the divisor is the number of all dp ranks.
    """

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        self.experts, position = expert_parameters(self.module), {param: i for i, param in enumerate(params)}
        super().initialize_buckets([param for param in params if param in self.experts], limit)
        super().initialize_buckets([param for param in params if param not in self.experts], limit)
        self.buckets.sort(key=lambda bucket: position[bucket.params[-1]])  # in the order in which backward fills them

    def make_bucket(self, params: list[nn.Parameter]) -> Bucket:
        bucket = super().make_bucket(params)
        if params[0] in self.experts:
            bucket.process_group = pgm.process_group_manager.expert_dp_group
        return bucket


class AddBalanceLoss(torch.autograd.Function):
    """The scores as they are. Backward adds to their gradient that of Switch's loss, times `weight`.

    Its derivative by the score of expert e is E f_e / N for each of the N tokens. The fractions f_e are constants.
    """

    @staticmethod
    def forward(ctx, scores, fractions, weight):  # (N, E), (E,) -> (N, E)
        ctx.grad = fractions * (weight * scores.size(1) / scores.size(0))
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.grad, None, None


class Balance:
    """Counts the rows that each expert of a layer gets, `load` (E,), and adds the layer's balance loss to the loss."""

    def __init__(self, num_experts: int, weight: float, device: torch.device):
        self.load, self.weight = torch.zeros(num_experts, dtype=torch.int64, device=device), weight

    def __call__(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts = chosen.flatten().bincount(minlength=len(self.load))
        self.load += counts  # with --recompute, all are counted twice
        return AddBalanceLoss.apply(scores, counts.to(scores.dtype) / chosen.numel(), self.weight)


class ExpertBalance:
    """Balances the experts of the stage `model`."""

    def __init__(self, args, model: nn.Module, device: torch.device):
        self.routers, self.bias_step = [layer.mlp.router for layer in model.decoder_layers.children()], args.balance_bias
        for router in self.routers:
            # backward adds up the gradients of all micro-batches, as with the loss
            weight = args.balance_loss / args.gradient_accumulation_steps
            router.balance = Balance(args.num_experts, weight, device)

    def finish_step(self) -> float:
        """Updates the biases. Returns the largest load of an expert in this step, relative to the mean of its layer."""
        loads = torch.stack([router.balance.load for router in self.routers])  # (layers, E)
        dist.all_reduce(loads, group=pgm.process_group_manager.cp_dp_group)  # of the global batch, equal on all ranks
        mean = loads.sum(dim=1, keepdim=True) / loads.size(1)
        for router, load, direction in zip(self.routers, loads, (mean - loads).sign()):
            router.balance.load.zero_()
            if self.bias_step:
                router.choice_bias = router.choice_bias + self.bias_step * direction
        largest = (loads / mean).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # over the stages of a pipeline
        return largest.item()


def check_experts(args):
    """Returns the flags. Raises UserError for some that can't be had together."""
    if args.ep_size > 1 and not args.num_experts:
        raise UserError(f"--ep_size {args.ep_size} divides experts, and there are none: use --num_experts")
    for name, size in (("num_experts", args.num_experts), ("dp_size", args.dp_size)):
        if size % args.ep_size:
            raise UserError(f"--ep_size {args.ep_size} has to divide --{name} {size}: change one of the two")
    if not args.num_experts:
        if args.balance_loss or args.balance_bias:
            raise UserError("--balance_loss and --balance_bias balance experts, and there are none: use --num_experts")
        return args
    if args.experts_per_token > args.num_experts:
        raise UserError(f"--experts_per_token {args.experts_per_token} of --num_experts {args.num_experts}: a token can "
                        "choose each expert only once, lower it")
    if args.pp_size > 1 and args.pp_engine.endswith("zb"):
        raise UserError(f"--num_experts {args.num_experts} with --pp_engine {args.pp_engine}: the W of an expert has as "
                        "many rows as chose it, so it does not fill the time of the schedule: use 1f1b or interleaved")
    reasons = {
        "sequence_parallel": "the router has to see all tokens on each tp rank",
        "cp_size": "the gradients of experts are summed over dp ranks alone",
        "zero": "it divides the same parameters over all dp ranks, which hold different experts"}
    for name, reason in reasons.items():
        if (value := getattr(args, name, 0)) > (name == "cp_size"):
            raise UserError(f"--num_experts {args.num_experts} with --{name} {value}: {reason}, leave one of them out")
    return args
