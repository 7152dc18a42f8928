"""Context parallelism: each rank holds a part of every text, and keys and values go around a ring (Liu et al. 2023).

Norms, projections and the MLP treat each token by itself. Only attention looks at other tokens, so only there the ranks
communicate. Queries stay where they are. Keys and values are handed on, and a rank attends to those that it has:

    hop 0   rank 0: its own         rank 1: its own         rank 2: its own         while they travel to the next rank
    hop 1   rank 0: those of 2      rank 1: those of 0      rank 2: those of 1
    hop 2   rank 0: those of 1      rank 1: those of 2      rank 2: those of 0

Each hop gives an output and the logarithm of its softmax's denominator (lse), with which merge() joins two outputs. In
backward they go around again, and their gradients with them, one hop further: home. No rank ever holds T x T scores.

Attention is causal: a query sees the keys up to its own. With P ranks a text has 2P chunks, and each rank holds two:

    zigzag      r and 2P-1-r    an early and a late one: at each hop, all ranks compute equally many scores
    contiguous  2r and 2r+1     rank 0 computes one block of scores and rank P-1 computes P: the others wait for it
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn as nn

import process_group_manager as pgm
from timeline import timeline
from utils import UserError
from zero import Exchange

aten = torch.ops.aten  # its kernels return lse as well, which scaled_dot_product_attention drops


def local_positions(layout: str, seq_len: int) -> torch.Tensor:
    """The positions in a text of the tokens that this cp rank holds: (T/cp,), in ascending order."""
    rank, size = pgm.process_group_manager.cp_rank, pgm.process_group_manager.cp_world_size
    chunks = torch.arange(seq_len).tensor_split(2 * size)
    first, second = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (2 * rank, 2 * rank + 1)
    return torch.cat([chunks[first], chunks[second]])


def visible(layout: str, rank: int, source: int, length: int) -> tuple[slice, slice, bool] | None:
    """Which queries of cp rank `rank` see which keys of `source`, `length` tokens each, and whether causally; or None.

    Zigzag: a lower rank's first chunk is before both own ones and its second after; a higher rank's are between them.
    """
    everything, half = slice(None), length // 2
    if source == rank:
        return everything, everything, True
    if layout == "zigzag":
        return (everything, slice(half), False) if source < rank else (slice(half, None), everything, False)
    return (everything, everything, False) if source < rank else None


def attend(q, k, v, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (B, H, m, hd), keys and values (B, K, n, hd) -> the output (B, H, m, hd) and its lse (B, H, m)."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def attend_backward(grad, q, k, v, out, lse, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys contribute to the gradients of q, k and v, if `out` and `lse` are those over all keys."""
    if q.is_cuda:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of dropout
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, is_causal, unused, unused)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal)


def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Makes `out` and `lse` those over both sets of keys, in place: the mean of the outputs, weighted by denominators.

    With the logarithms a and b, the other's weight is e^b / (e^a + e^b) = sigmoid(b - a), which never overflows.
    """
    out -= torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out)
    lse.copy_(torch.logaddexp(lse, other_lse))


class Message:
    """`tensor` goes to the next cp rank, and its like comes from the one before, in the background."""

    def __init__(self, tensor: torch.Tensor, kind: str):
        grid, self.arriving = pgm.process_group_manager, torch.empty_like(tensor)
        sent, received = [None] * grid.cp_world_size, [None] * grid.cp_world_size
        sent[(grid.cp_rank + 1) % grid.cp_world_size], received[grid.cp_rank - 1] = tensor, self.arriving
        self.handle = timeline.background(Exchange(sent, received, grid.cp_group), kind)

    def wait(self) -> torch.Tensor:
        with timeline.span("wait"):
            self.handle.wait()
        return self.arriving


def go_around(keys_values: torch.Tensor, layout: str) -> Iterator[tuple]:
    """Yields the keys and values of each cp rank, its own first, and what is visible of them. The next ones arrive."""
    rank, size = pgm.process_group_manager.cp_rank, pgm.process_group_manager.cp_world_size
    for hop in range(size):
        message = Message(keys_values, "keys and values") if hop < size - 1 else None
        yield keys_values, visible(layout, rank, (rank - hop) % size, keys_values.size(-2))
        if message:
            keys_values = message.wait()


class RingAttention(torch.autograd.Function):
    """Forward: P - 1 hops of keys and values. Backward: as many once more, and P hops of their gradients."""

    @staticmethod
    def forward(ctx, layout, q, k, v):  # (B, H, T/cp, hd), (B, K, T/cp, hd) twice -> (B, H, T/cp, hd)
        own, dtype = torch.stack([k, v]), torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.zeros_like(q, dtype=dtype), torch.full_like(q[..., 0], -torch.inf, dtype=dtype)  # of no keys
        for (k, v), block in go_around(own, layout):
            if block:
                queries, keys, is_causal = block
                part = attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], is_causal)
                merge(out[:, :, queries], lse[:, :, queries], *part)
        ctx.layout, out = layout, out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, own, out, lse = ctx.saved_tensors
        message, grad_q, gradients = None, torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(own, dtype=lse.dtype)
        for (k, v), block in go_around(own, ctx.layout):
            if block:
                queries, keys, is_causal = block
                part_q, *parts = attend_backward(grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                                                 out[:, :, queries], lse[:, :, queries], is_causal)
                grad_q[:, :, queries] += part_q
            if message:
                gradients = message.wait()  # to which the ranks before have added theirs
            if block:
                gradients[:, :, :, keys] += torch.stack(parts)
            message = Message(gradients, "gradients of keys and values")
        return None, grad_q.to(q.dtype), *message.wait().to(own.dtype)


def apply_context_parallel(model: nn.Module, layout: str, seq_len: int, device: torch.device) -> None:
    """Replaces each layer's attention. Raises UserError for texts that can't be cut, and where a kernel is missing."""
    grid = pgm.process_group_manager
    if seq_len % (parts := 2 * grid.cp_world_size * grid.tp_world_size):
        raise UserError(f"--seq_len {seq_len} can't be cut into 2 x cp_size={grid.cp_world_size} x tp_size="
                        f"{grid.tp_world_size} equal parts: use a multiple of {parts}")
    if device.type == "cuda" and model.dtype != torch.bfloat16:
        raise UserError(f"--cp_size {grid.cp_world_size} on CUDA has a kernel for bfloat16, but not for {model.dtype}: "
                        "use --dtype bfloat16")

    attend_around = torch.compiler.disable(RingAttention.apply)  # messages can't be compiled
    for layer in model.decoder_layers:
        layer.attention.attend = functools.partial(attend_around, layout)
