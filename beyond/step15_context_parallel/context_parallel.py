"""Context parallelism: each rank holds a part of every text, and keys and values go around a ring (Liu et al. 2023).

With P cp ranks, each holds T/P tokens of each sample, whose positions travel with them. Norms, projections and the MLP
treat each token by itself. Only attention looks at other tokens, so only there the ranks communicate. Queries stay
where they are. Keys and values are handed on to the next rank, hop by hop, and each rank attends to the ones it has:

    hop 0   rank 0: its own   rank 1: its own   rank 2: its own    meanwhile they travel to the next rank
    hop 1   rank 0: those of 2      1: those of 0     2: those of 1
    hop 2   rank 0: those of 1      1: those of 2     2: those of 0

Each hop gives an output and the logarithm of the denominator of its softmax, by which merge() joins two outputs. In
backward, keys and values go around once more, and their gradients with them, one hop further: home. No rank ever holds
the scores of all T x T pairs, nor the keys of more than two ranks.

Attention is causal, so a pair of query and key counts only if the key is not the later one. The text is cut into 2P
chunks, of which each rank holds two:

    zigzag      rank r: r and 2P-1-r     an early and a late one: at each hop all ranks compute equally many pairs
    contiguous  rank r: 2r and 2r+1      rank 0 has one block to compute, rank P-1 has P, and the others wait for it
"""

from collections.abc import Iterator

import torch
import torch.nn as nn

import process_group_manager as pgm
from timeline import timeline
from utils import UserError
from zero import Exchange

aten = torch.ops.aten  # scaled_dot_product_attention does not return its denominators, but the kernels below it do
LAYOUTS = ["zigzag", "contiguous"]
Block = tuple[slice, slice, bool]  # some of a rank's queries, the keys that all of them see, whether causally


def local_positions(layout: str, seq_len: int) -> torch.Tensor:
    """The positions in a text of the tokens that this cp rank holds, (T/cp,), in ascending order."""
    rank, size = pgm.process_group_manager.cp_rank, pgm.process_group_manager.cp_world_size
    chunks = torch.arange(seq_len).tensor_split(2 * size)
    first, second = (2 * rank, 2 * rank + 1) if layout == "contiguous" else (rank, 2 * size - 1 - rank)
    return torch.cat([chunks[first], chunks[second]])


def visible(layout: str, rank: int, source: int, length: int) -> Block | None:
    """Which queries of cp rank `rank` see which keys of `source`, of `length` tokens each. None where none sees any.

    Zigzag: the first chunk of a lower rank is earlier than both own ones, and its second one later. Of a higher rank,
    both are earlier than the second own one and later than the first.
    """
    everything, first_half, second_half = slice(None), slice(length // 2), slice(length // 2, None)
    if source == rank:
        return everything, everything, True
    if layout == "contiguous":
        return (everything, everything, False) if source < rank else None
    return (everything, first_half, False) if source < rank else (second_half, everything, False)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (B, H, m, hd), keys and values (B, K, n, hd) -> the output (B, H, m, hd) and its lse (B, H, m).

    lse is the logarithm of the softmax's denominator, the sum of exp(score) over the keys.
    """
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def attend_backward(grad, q, k, v, out, lse, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v. `out` and `lse` are those over all keys: so are the probabilities, exp(score - lse).

    k and v may be any of these keys, and each part of them gives its part of the gradients.
    """
    if q.is_cuda:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the dropout's random state
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, is_causal, unused, unused)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal)


def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Makes `out` and `lse` those over both sets of keys, in place: the mean of both, weighted by the denominators.

    With the logarithms a and b of the denominators, the weight of the other is e^b / (e^a + e^b) = sigmoid(b - a).
    Neither sum is computed: e^a overflows where scores are large.
    """
    out -= torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out)
    lse.copy_(torch.logaddexp(lse, other_lse))


class Message:
    """`tensor` on its way to the next cp rank, while one of its kind arrives from the rank before. Over NCCL, one call.

    """

    def __init__(self, tensor: torch.Tensor, kind: str):
        grid = pgm.process_group_manager
        rank, size = grid.cp_rank, grid.cp_world_size
        sent, received, self.arriving = [None] * size, [None] * size, torch.empty_like(tensor)
        sent[(rank + 1) % size], received[(rank - 1) % size] = tensor, self.arriving
        self.handle = timeline.background(Exchange(sent, received, grid.cp_group), kind)

    def wait(self) -> torch.Tensor:
        with timeline.span("wait"):
            self.handle.wait()
        return self.arriving


def go_around(keys_values: torch.Tensor, layout: str) -> Iterator[tuple[torch.Tensor, Block | None]]:
    """Yields the keys and values (2, B, K, T/cp, hd) of each rank of the ring, its own first, while the next arrive."""
    rank, size = pgm.process_group_manager.cp_rank, pgm.process_group_manager.cp_world_size
    for hop in range(size):
        message = Message(keys_values, "keys and values") if hop < size - 1 else None
        yield keys_values, visible(layout, rank, (rank - hop) % size, keys_values.size(3))
        if message:
            keys_values = message.wait()


class RingAttention(torch.autograd.Function):
    """Forward: P - 1 hops of keys and values. Backward: as many, and P hops of their gradients.

    Sums over blocks, and thus the gradients that travel, are in float32 or better.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout):  # (B, H, T/cp, hd), (B, K, T/cp, hd) twice -> (B, H, T/cp, hd)
        own, out = torch.stack([k, v]), None
        for (k, v), block in go_around(own, layout):
            if block is None:
                continue
            queries, keys, is_causal = block
            part, part_lse = attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], is_causal)
            if out is None:
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.layout = layout
        return out

    @staticmethod
    def backward(ctx, grad):
        q, own, out, lse = ctx.saved_tensors
        grad_q, gradients = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(own, dtype=lse.dtype)
        message = None
        for (k, v), block in go_around(own, ctx.layout):
            if block:
                queries, keys, is_causal = block
                part_q, *parts = attend_backward(grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                                                 out[:, :, queries], lse[:, :, queries], is_causal)
                grad_q[:, :, queries] += part_q
            if message:
                gradients = message.wait()  # of the keys and values that are here: what other ranks added so far
            if block:
                for total, part in zip(gradients, parts):
                    total[:, :, keys] += part
            message = Message(gradients, "gradients of keys and values")
        return grad_q.to(q.dtype), *message.wait().to(own.dtype), None


def apply_context_parallel(model: nn.Module, layout: str, seq_len: int, device: torch.device) -> nn.Module:
    """Replaces the attention of each layer by that of the ring. Raises UserError for what can't be divided or computed.

    """
    grid = pgm.process_group_manager
    parts = 2 * grid.cp_world_size * grid.tp_world_size
    if grid.cp_world_size == 1:
        return model
    if seq_len % parts:
        raise UserError(f"--seq_len {seq_len} can't be cut into 2 x cp_size={grid.cp_world_size} x tp_size="
                        f"{grid.tp_world_size} equal parts: use a multiple of {parts}")
    if device.type == "cuda" and model.dtype != torch.bfloat16:
        raise UserError(f"--cp_size {grid.cp_world_size} with activations in {model.dtype}: the kernel for CUDA that "
                        "returns denominators computes in bfloat16: use --dtype bfloat16, or --device cpu")

    @torch.compiler.disable  # messages can't be compiled
    def attend_around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return RingAttention.apply(q, k, v, layout)

    for layer in model.decoder_layers:
        layer.attention.attend = attend_around
    return model
