"""Expert parallelism (GShard, Lepikhin et al. 2020): experts live on different dp ranks, and tokens travel to them.

Consecutive dp ranks form an ep group. Rank j of its N ranks holds the experts [j E/N, (j+1) E/N) of each layer, and all
of the rest of the model. Each rank routes the tokens of its own samples, k rows for each token, sorted by expert:

    rows of rank 0  | expert 0 | 1 | 2 | 3 |   -> all-to-all ->   rank 0 holds experts 0 and 1: their rows of all ranks
    rows of rank 1  | expert 0 | 1 | 2 | 3 |                      rank 1 holds experts 2 and 3: their rows of all ranks

In an all-to-all, each rank sends a part to each other rank: as many rows as have chosen its experts. The results return
the same way. In backward, gradients go both ways, with the numbers of rows swapped.

Tokens may choose as they like, so some experts can get most of them, and the ranks of the others wait. Two remedies:

    --balance_loss  adds Switch's loss E sum_e f_e P_e of each layer and micro-batch to the loss: f_e is the fraction of
                    the rows that expert e got, P_e its mean score (Fedus et al. 2021)
    --balance_bias  adds a bias to the scores, for the choice alone. After each step it is raised for the experts with
                    less than the mean load, and lowered for the others (DeepSeek-V3, Liu et al. 2024)
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import model as llama
import process_group_manager as pgm
from data_parallel import Bucket, DataParallelBucket
from timeline import timeline
from utils import UserError


def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Sends the first sent[0] rows to rank 0 of the ep group, and so on. Returns received[0] rows of rank 0, ..."""
    on_wire = rows.contiguous().to("cpu" if dist.get_backend() == "gloo" else "cuda")  # gloo sends host memory only
    arrived = on_wire.new_empty(sum(received), *rows.shape[1:])
    with timeline.span("all-to-all"):
        dist.all_to_all_single(arrived, on_wire, received, sent, group=pgm.process_group_manager.ep_group)
    return arrived.to(rows.device)


class AllToAll(torch.autograd.Function):
    """Rows go to other ranks. In backward their gradients come back."""

    @staticmethod
    def forward(ctx, rows, sent, received):  # (sum of sent, D) -> (sum of received, D)
        ctx.sent, ctx.received = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.received, ctx.sent), None, None


class ExpertParallel(llama.Experts):
    """This rank's E/N experts of a layer. They run the rows of all ranks of the ep group that have chosen them."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """This rank's rows (N k, D), sorted by expert, counts[e] for expert e -> their results in the same order."""
        size = pgm.process_group_manager.ep_world_size
        equal = [len(self)] * size
        here = exchange(counts, equal, equal).view(size, -1)  # (ranks, own experts): the rows that arrive
        sent, received = counts.view(size, -1).sum(dim=1).tolist(), here.sum(dim=1).tolist()
        rows = AllToAll.apply(rows, sent, received)  # those of rank 0 come first
        experts = torch.arange(len(self), device=rows.device).repeat(size).repeat_interleave(here.flatten())
        order = experts.argsort(stable=True)
        results = super().run(rows.index_select(0, order), here.sum(dim=0))
        return AllToAll.apply(results.index_select(0, order.argsort()), received, sent)


def apply_expert_parallel(model: nn.Module) -> nn.Module:
    """Keeps this rank's experts of each layer, in place, while the model is on the meta device and has no weights."""
    grid = pgm.process_group_manager
    for layer in model.decoder_layers if grid.ep_world_size > 1 else ():
        experts = layer.mlp.experts
        count = len(experts) // grid.ep_world_size
        own = [*experts.items()][grid.ep_rank * count : (grid.ep_rank + 1) * count]
        layer.mlp.experts = ExpertParallel(dict(own), experts.num_experts)
    return model


class ExpertDataParallel(DataParallelBucket):
    """Wraps a model. Experts have buckets of their own, which are summed over the ranks that hold the same experts.

    An expert's gradient has summands of all tokens of its ep group. So the sum has those of all dp ranks' tokens, and
    is divided by the number of dp ranks, as all other gradients are.
    """

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        self.experts = {param for name, param in self.module.named_parameters() if ".experts." in name}
        super().initialize_buckets([param for param in params if param in self.experts], limit)
        super().initialize_buckets([param for param in params if param not in self.experts], limit)
        position = {param: i for i, param in enumerate(params)}
        self.buckets.sort(key=lambda bucket: position[bucket.params[-1]])  # in the order in which backward fills them

    def make_bucket(self, params: list[nn.Parameter]) -> Bucket:
        bucket = super().make_bucket(params)
        if params[0] in self.experts:
            bucket.process_group = pgm.process_group_manager.experts.all
        return bucket


class ExpertBalance:
    """Counts the rows that each expert of a step gets, and makes them even by --balance_loss and --balance_bias."""

    def __init__(self, args, model: nn.Module, device: torch.device):
        self.loss_weight, self.bias_step = args.balance_loss / args.gradient_accumulation_steps, args.balance_bias
        self.divides_tokens, self.loads = args.sequence_parallel, {}  # router -> (E,)
        for layer in model.decoder_layers.children():
            self.loads[layer.mlp.router] = torch.zeros(args.num_experts, dtype=torch.int64, device=device)
            layer.mlp.router.register_forward_hook(self.after_choice)

    def after_choice(self, router: nn.Module, args: tuple, output: tuple) -> None:
        """After a router's forward. The gradient of the scores gets that of the balance loss when backward has it.

        f_e and P_e are those of a micro-batch, of which cp and, with sequence parallelism, tp ranks have parts. The
        gradients of the weights are then averaged over cp and summed over tp.
        """
        scores, chosen = output  # (B, T, E), (B, T, k)
        counts, grid = chosen.flatten().bincount(minlength=scores.size(-1)), pgm.process_group_manager
        self.loads[router] += counts * torch.is_grad_enabled()  # with --recompute twice, all of them
        cp, tp = grid.cp_world_size, grid.tp_world_size if self.divides_tokens else 1
        if self.loss_weight and scores.requires_grad:
            self.sum_counts(counts, grid.cp_group)
            factor = scores.size(-1) / (chosen.numel() * cp * tp) / (scores[..., 0].numel() * tp)
            gradient = self.loss_weight * factor * counts.to(scores.dtype)
            scores.register_hook(lambda other: other + gradient)  # without `scores`, or it would keep itself alive

    def sum_counts(self, counts: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sums them over the ranks of `group`, and over those that have other tokens of the same texts."""
        for each in [group] + [pgm.process_group_manager.tp_group] * self.divides_tokens:
            dist.all_reduce(counts, group=each)

    def finish_step(self) -> float:
        """Moves the biases. Returns the largest load of an expert in this step, relative to the mean of its layer."""
        grid, loads = pgm.process_group_manager, torch.stack([*self.loads.values()])  # (layers, E)
        self.sum_counts(loads, grid.cp_dp_group)  # of the global batch, so the biases stay equal on all ranks
        mean = loads.sum(dim=1, keepdim=True) / loads.size(1)
        for (router, load), direction in zip(self.loads.items(), (mean - loads).sign()):
            router.bias_of_choice = router.bias_of_choice + self.bias_step * direction
            load.zero_()
        largest = (loads / mean).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # stages of a pipeline have other layers
        return largest.item()


def check_experts(args):
    """Returns the flags. Raises UserError for some that can't be had together."""
    experts = f"--num_experts {args.num_experts}"
    if not args.num_experts and (args.ep_size > 1 or args.balance_loss or args.balance_bias):
        raise UserError("--ep_size, --balance_loss and --balance_bias are for experts: use --num_experts with them")
    if args.num_experts % args.ep_size or args.dp_size % args.ep_size:
        raise UserError(f"--ep_size {args.ep_size} has to divide {experts} and --dp_size {args.dp_size}: change it")
    if 0 < args.num_experts < args.experts_per_token:
        raise UserError(f"--experts_per_token {args.experts_per_token} is more than {experts}: lower it")
    return args
