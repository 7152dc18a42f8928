"""Tensor parallelism: each matrix is split over the tp group, and so is the work (Megatron-LM, Shoeybi et al. 2019).

All ranks of a tp group read the same samples and hold the same activations (B, T, D) between blocks. Inside a block:

    x -> f -> column-parallel (q, k, v; gate, up): each rank computes some of the heads, or a part of the MLP's width
           -> row-parallel (out; down): each rank computes a partial sum of the whole output  -> g -> x

    f  Copy    forward: nothing      backward: all-reduce (each rank's gradient is a partial sum)
    g  Reduce  forward: all-reduce   backward: nothing

An all-reduce leaves the sum over all ranks on each of them. A decoder layer needs four per micro-batch: f and g, for
the attention and for the MLP. The embedding and the final projection are split along the vocabulary. The loss is
computed from the split logits, and the ranks exchange three numbers per token for it.

The model contains none of this: apply_tensor_parallel replaces modules from outside.
A size that tp_size does not divide (a vocabulary of 1022 over 4 ranks) is split unevenly, as torch.tensor_split does.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import model as llama
import process_group_manager as pgm
from utils import UserError


def split_over_tp(full: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This tp rank's part of a full tensor along `dim`; the tensor itself where `dim` is None (not split)."""
    grid = pgm.process_group_manager
    return full if dim is None else full.tensor_split(grid.tp_world_size, dim)[grid.tp_rank]


def all_reduce(tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
    """The sum (or maximum) over the tp group, in place, with equal bits on all ranks. `tensor` has to be contiguous.

    Activations are small messages, so the time depends on the number of rounds. gloo's ring needs 2 (n - 1) of them. If
    ranks exchange their values with a partner at distance 1, 2, 4, ..., log2(n) rounds are enough (recursive doubling,
    Thakur et al. 2005).
    """
    grid = pgm.process_group_manager
    if tensor.is_cuda or tensor.nbytes > 1 << 20 or grid.tp_world_size not in (1, 2, 4, 8, 16):
        dist.all_reduce(tensor, op, group=grid.tp_group)
        return
    received = torch.empty_like(tensor)
    for distance in (1, 2, 4, 8)[: grid.tp_world_size.bit_length() - 1]:
        partner = grid.tp_rank ^ distance
        sending = dist.isend(tensor, group=grid.tp_group, group_dst=partner)
        dist.recv(received, group=grid.tp_group, group_src=partner)
        sending.wait()
        combine = torch.add if op == dist.ReduceOp.SUM else torch.maximum
        combine(tensor, received, out=tensor)


class Copy(torch.autograd.Function):
    """f: the identity forward, an all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may use the incoming gradient elsewhere
        all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """g: an all-reduce forward, in place; the identity backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnParallelLinear(nn.Module):
    """y = x W^T with the rows of W (out/tp, in) split: each rank makes out/tp of the outputs.

    f comes in front of it, see copy_input: layers that read the same input (q, k and v) share one.
    """

    tp_dims = {"weight": 0}

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(split_over_tp(linear.weight, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out/tp)
        return llama.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """y = x W^T with the columns of W (out, in/tp) split. x is split as well, and g sums the partial products."""

    tp_dims = {"weight": 1}

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(split_over_tp(linear.weight, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in/tp) -> (..., out)
        return Reduce.apply(llama.linear(x, self.weight))


class VocabParallelEmbedding(nn.Module):
    """Each rank holds V/tp rows, looks up the ids among them, zero for all others. The sum over tp is the lookup."""

    tp_dims = {"weight": 0}

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(split_over_tp(embedding.weight, 0))
        self.vocab_size, self.dtype = embedding.num_embeddings, dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, D)
        local_ids, elsewhere = to_local_ids(input_ids, self.vocab_size)
        x = F.embedding(local_ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return Reduce.apply(x.to(self.dtype))  # exact in any dtype: all but one summand are zero


def to_local_ids(ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids relative to the first row of this rank, 0 for the ids of other ranks, and a mask of those ids."""
    grid = pgm.process_group_manager
    rows, left_over = divmod(vocab_size, grid.tp_world_size)  # torch.tensor_split gives the first ranks one row more
    first = grid.tp_rank * rows + min(grid.tp_rank, left_over)
    elsewhere = (ids < first) | (ids >= first + rows + (grid.tp_rank < left_over))
    return (ids - first).masked_fill(elsewhere, 0), elsewhere


class VocabParallelCrossEntropy(torch.autograd.Function):
    """log(sum_v exp(logit_v)) - logit_target of each token, from logits that are split along the vocabulary."""

    @staticmethod
    def forward(ctx, logits, target_ids, vocab_size):  # (N, V/tp), (N,) -> (N,)
        largest = logits.amax(dim=-1)  # (N,)
        all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        local_ids, elsewhere = to_local_ids(target_ids, vocab_size)
        target_logit = logits.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)  # (N,)
        exp = logits.exp_()
        sums = torch.stack([exp.sum(dim=-1), target_logit])  # (2, N): one all-reduce for both
        all_reduce(sums)
        sum_exp, target_logit = sums
        ctx.save_for_backward(exp.div_(sum_exp.unsqueeze(-1)), local_ids, elsewhere)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # (N,) -> (N, V/tp)
        softmax, local_ids, elsewhere = ctx.saved_tensors
        is_target = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        grad_logits = softmax.scatter_add(-1, local_ids.unsqueeze(-1), -is_target)
        return grad_logits * grad.unsqueeze(-1), None, None


def cross_entropy(logits: torch.Tensor, target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Mean over the tokens, in float32 or better: (B, T, V/tp), (B, T) -> scalar, the same on all tp ranks."""
    if pgm.process_group_manager.tp_world_size == 1:
        return llama.cross_entropy(logits, target_ids)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return VocabParallelCrossEntropy.apply(logits.flatten(0, 1), target_ids.flatten(), vocab_size).mean()


def log_probs(logits: torch.Tensor, target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """log p(target) of each token, in float32 or better: (B, T, V/tp), (B, T) -> (B, T), the same on all tp ranks."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    if pgm.process_group_manager.tp_world_size == 1:
        return -F.cross_entropy(logits, target_ids.flatten(), reduction="none").view_as(target_ids)
    return -VocabParallelCrossEntropy.apply(logits, target_ids.flatten(), vocab_size).view_as(target_ids)


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients by one number, so that their norm is at most `max_norm` (0: never). Returns the norm before.

    It is the norm of all gradients of the whole model: the root of the sum of their squares, over all ranks. What
    several ranks hold is counted once: a parameter that is not split on tp rank 0, a tied embedding on the first stage,
    and replicas on dp rank 0.
    """
    grid = pgm.process_group_manager
    split = {getattr(module, name) for module in model.modules() for name in getattr(module, "tp_dims", ())}
    params = {name: param for name, param in model.named_parameters() if param.grad is not None}
    rows = [torch.linalg.vector_norm(param.grad, dim=-1) for name, param in params.items()
            if (grid.pp_is_first_stage or name != "embedding.weight") and (grid.tp_rank == 0 or param in split)]
    squares = torch.nn.utils.get_total_norm(rows) ** 2 * (grid.dp_rank == 0)
    dist.all_reduce(squares, group=grid.grid_group)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params.values(), max_norm, squares.sqrt())
    return squares.sqrt()


def copy_input(module: nn.Module, args: tuple) -> tuple:
    """A hook that applies f to the input x (B, T, D) of a module, once for all column-parallel layers inside it."""
    return Copy.apply(args[0]), *args[1:]


def apply_tensor_parallel(model: nn.Module) -> nn.Module:
    """Splits a Llama over the tp group, in place, while it is on the meta device and has no weights yet.

    Raises UserError where tp_size does not divide the heads, the key/value heads or the MLP's width. All ranks do,
    whether it is that of trainers or of generators.
    """
    grid = pgm.process_group_manager
    sizes = {"tp_size": grid.trainers.size(-1), "generator_tp_size": grid.generators.size(-1)}
    for flag, name in itertools.product(sizes, ("num_attention_heads", "num_key_value_heads", "intermediate_size")):
        if (size := getattr(model.config, name)) % sizes[flag]:
            raise UserError(f"{name}={size} cannot be split over {flag}={sizes[flag]}: use one that divides {size}")
    if grid.tp_world_size == 1:
        return model
    model.embedding = VocabParallelEmbedding(model.embedding, model.dtype)
    for layer in model.decoder_layers:
        attention, mlp = layer.attention, layer.mlp
        attention.register_forward_pre_hook(copy_input)
        attention.q_proj = ColumnParallelLinear(attention.q_proj)
        attention.k_proj = ColumnParallelLinear(attention.k_proj)
        attention.v_proj = ColumnParallelLinear(attention.v_proj)
        attention.out_proj = RowParallelLinear(attention.out_proj)
        mlp.register_forward_pre_hook(copy_input)
        mlp.gate_proj = ColumnParallelLinear(mlp.gate_proj)
        mlp.up_proj = ColumnParallelLinear(mlp.up_proj)
        mlp.down_proj = RowParallelLinear(mlp.down_proj)
    model.final_proj = ColumnParallelLinear(model.final_proj)
    model.final_proj.register_forward_pre_hook(copy_input)
    model.tie_weights()
    return model
