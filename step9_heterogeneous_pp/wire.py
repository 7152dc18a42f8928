"""What travels between ranks, made smaller: hidden states and their gradients between stages, gradients between owners.

    wire        bytes a number    what is lost
    float32     4                 nothing, of float32
    bfloat16    2                 16 of 24 bits of the mantissa: an error of 1/256 of each number at most
    int8        1, and 4 a row    1/254 of the largest number of its row

int8 has a scale a row, symmetric: the largest magnitude becomes 127 (absmax quantisation, Dettmers et al. 2022). A row
is what the last dimension counts: one position's hidden state, or ROW numbers of a flat buffer. A row with a NaN or an
infinity gets a scale that is none either, so all of it comes out non-finite and the loss shows it.

Legend: R rows, N numbers in each.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ROW = 1024  # scales then add 0.4 % to a flat buffer, and one large gradient coarsens no more than its 1023 neighbours


def parse_wire_dtype(flag: str, name: str | None) -> torch.dtype | None:
    """None: as it is. Raises ValueError where `name` is no choice."""
    if name is not None and name not in WIRE_DTYPES:
        raise ValueError(f"{flag}={name!r} is none of {', '.join(WIRE_DTYPES)}")
    return WIRE_DTYPES.get(name)


def empty_message(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for what encode() makes of a tensor of this shape."""
    if dtype != torch.int8:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(4 * math.prod(shape[:-1]) + math.prod(shape), dtype=torch.uint8, device=device)


def encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One contiguous message: x in `dtype`, x itself where it has it already.

    int8: bytes, first R float32 scales, which have to lie at a multiple of four, then R * N numbers.
    """
    if dtype != torch.int8:
        return x.to(dtype).contiguous()
    rows = x.reshape(-1, x.size(-1)).float()  # (R, N)
    scales = rows.abs().amax(dim=1, keepdim=True) / 127  # (R, 1); NaN and infinity win
    steps = rows / scales.masked_fill(scales == 0, 1)
    numbers = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)  # not finite: its scale says so
    return torch.cat([scales.flatten().view(torch.uint8), numbers.flatten().view(torch.uint8)])


def decode(message: torch.Tensor, shape: tuple[int, ...], wire_dtype: torch.dtype,
           dtype: torch.dtype) -> torch.Tensor:
    """The tensor of this shape that the message was made of, as far as it has kept it, in `dtype`."""
    if wire_dtype != torch.int8:
        return message.view(shape).to(dtype)
    scales = message[: 4 * math.prod(shape[:-1])].view(torch.float32)  # (R)
    numbers = message[scales.nbytes :].view(torch.int8).view(-1, shape[-1])  # (R, N)
    return (numbers * scales[:, None]).view(shape).to(dtype)


class CompressedAllReduce:
    """The sum of a flat buffer over a group of n ranks, in place, with few bytes on the wire. Starts when it is made.

    Each rank sums one n-th of the buffer: it gets the others' n-ths encoded (all-to-all), adds them in the order of the
    ranks, unrounded, and sends the sum encoded to all (all-gather). All decode the same bytes, its own sum too, so
    replicas keep the same bits. That is a reduce-scatter and an all-gather, as a ring's all-reduce is.
    gather() and then wait() have to be called, by all ranks for the same buffers in the same order.
    """

    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype):
        self.buffer, self.group, self.dtype = buffer, group, dtype
        self.num_ranks = dist.get_world_size(group)
        self.shape = (math.ceil(buffer.numel() / (self.num_ranks * ROW)), ROW)  # of an n-th, zeros behind the last
        parts = self.padded(buffer).view(self.num_ranks, *self.shape)
        self.outgoing = torch.cat([encode(part, dtype).flatten().view(torch.uint8) for part in parts])
        self.incoming = torch.empty_like(self.outgoing)
        self.handle = dist.all_to_all_single(self.incoming, self.outgoing, group=group, async_op=True)

    def padded(self, buffer: torch.Tensor) -> torch.Tensor:
        return F.pad(buffer, (0, self.num_ranks * math.prod(self.shape) - buffer.numel()))

    def decoded(self) -> list[torch.Tensor]:
        """What has come in, one (R, ROW) a rank."""
        wire = torch.uint8 if self.dtype == torch.int8 else self.dtype
        return [decode(message.view(wire), self.shape, self.dtype, self.buffer.dtype)
                for message in self.incoming.chunk(self.num_ranks)]

    def gather(self) -> None:
        """Waits for the others' parts, starts to send their sum."""
        self.handle.wait()
        total = sum(self.decoded())
        self.outgoing = encode(total, self.dtype).flatten().view(torch.uint8)
        self.incoming = torch.empty_like(self.incoming)
        messages = list(self.incoming.chunk(self.num_ranks))
        self.handle = dist.all_gather(messages, self.outgoing, group=self.group, async_op=True)

    def wait(self) -> None:
        self.handle.wait()
        self.buffer.copy_(torch.cat(self.decoded()).flatten()[: self.buffer.numel()])
