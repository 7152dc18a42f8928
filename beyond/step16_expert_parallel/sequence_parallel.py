"""Sequence parallelism: tensor-parallel ranks divide the tokens wherever they do not divide the heads or the MLP
(Korthikanti et al. 2022).

With tensor parallelism alone, each of tp ranks holds the hidden states of all tokens between the blocks, and all of
them compute the same norms and residual sums. Here rank r holds the r-th part of the tokens there, T/tp of them:

    x (B, T/tp, D) -> norm -> f -> (B, T, D) -> column-parallel -> row-parallel -> (B, T, D) -> g -> (B, T/tp, D)

    f  Gather    forward: all-gather      backward: reduce-scatter
    g  Scatter   forward: reduce-scatter  backward: all-gather

An all-reduce is a reduce-scatter and an all-gather, so a layer sends as many bytes as before. The embedding's sum is a
reduce-scatter as well, and the stages of a pipeline send each other T/tp tokens.

What sees local tokens only has only a part of its gradient: the weights of the norms, which each tp rank holds whole.
Their gradients are summed over the tp ranks before the optimizer's step. The model contains none of this.
"""

import torch

import process_group_manager as pgm
from tensor_parallel import all_reduce
from utils import UserError
from zero import all_gather, reduce_scatter


def gather_tokens(x: torch.Tensor) -> torch.Tensor:  # (B, T/tp, D) -> (B, T, D)
    """The tokens of all tp ranks, in the order of ranks."""
    grid = pgm.process_group_manager
    parts = x.new_empty(grid.tp_world_size, *x.shape)  # (tp, B, T/tp, D): a rank's tokens are one message
    parts[grid.tp_rank] = x
    all_gather(parts.flatten(), [x.numel()] * len(parts), grid.tp_group).wait()
    return parts.transpose(0, 1).flatten(1, 2)


def scatter_tokens(x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T/tp, D)
    """The sum over the tp ranks, of which each receives its own tokens. `x` is the rank's summand."""
    grid = pgm.process_group_manager
    parts = x.unflatten(1, (grid.tp_world_size, -1)).transpose(0, 1).contiguous()  # (tp, B, T/tp, D)
    handle, (total, *others) = reduce_scatter(parts.flatten(), [parts[0].numel()] * len(parts), grid.tp_group)
    handle.wait()
    for other in others:
        total += other
    return total.view_as(parts[0])


class Gather(torch.autograd.Function):
    """f: an all-gather of the tokens forward, a reduce-scatter of their gradients backward."""

    @staticmethod
    def forward(ctx, x):  # (B, T/tp, D) -> (B, T, D)
        return gather_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return scatter_tokens(grad)


class Scatter(torch.autograd.Function):
    """g: a reduce-scatter of partial sums forward, an all-gather of gradients backward."""

    @staticmethod
    def forward(ctx, x):  # (B, T, D) -> (B, T/tp, D)
        return scatter_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_tokens(grad)


def sum_norm_gradients(model) -> None:
    """Sums the gradients of the weights that tp ranks hold whole, over these: each saw its own tokens.

    They are those of the norms. Called after finish_gradient_sync(), with one message for all.
    """
    kind = pgm.process_group_manager.kind
    gradients = [model.gradient(param) for name, param in model.module.named_parameters() if kind(name) == "whole"]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))


def check_sequence_parallel(args):
    """Returns the flags. Raises UserError where there is nothing to divide, or where it can't be divided."""
    if args.sequence_parallel and args.tp_size == 1:
        raise UserError("--sequence_parallel divides tokens over the tensor-parallel ranks, and --tp_size 1 is only "
                        "one: raise --tp_size, or leave --sequence_parallel out")
    if args.sequence_parallel and args.seq_len % args.tp_size:
        raise UserError(f"--sequence_parallel divides the {args.seq_len} tokens of a sample over --tp_size "
                        f"{args.tp_size} ranks: choose a --seq_len that is a multiple of {args.tp_size}")
    return args
