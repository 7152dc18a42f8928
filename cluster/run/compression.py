"""Smaller messages: for hidden states and their gradients between stages, and for gradients between owners.

    wire dtype  bytes per number     error at most
    float32     4                    none, for float32
    bfloat16    2                    1/256 of the number
    int8        1, plus 4 per row    1/254 of the largest number of its row

int8 has one scale per row, which maps the largest magnitude to 127 (absmax quantisation, Dettmers et al. 2022). A row
is the hidden state of one token, or ROW numbers of a flat buffer. Where it has a NaN or an infinity, all of it is
decoded as not finite, and the loss shows it. R is the number of rows, N the length of each.
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data_parallel import Bucket
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from models.loss import has_router_loss
from pipeline_parallel import Action, StageCommunication
from planning.machines import WIRE_DTYPES
from timeline import timeline
from utils import UserError

ROW = 1024  # scales add 0.4 % to the bytes, and one large gradient coarsens only its 1023 neighbours


def compress(plugin: HeterogeneousParallelPlugin, config, wire_dtype: str | None = None,
             gradient_wire_dtype: str | None = None) -> None:
    """From now on the plugin's stages send hidden states and their gradients in `wire_dtype` ("float32", "bfloat16" or
    "int8"), and the owners of parameters send gradients in `gradient_wire_dtype`. None leaves them as they are.

    Call it before configure. `config` is the model's. Raises UserError for int8 where the sums of a router's loss
    travel with the hidden states.
    """
    if wire_dtype == "int8" and has_router_loss(config):
        raise UserError("wire_dtype int8 is too coarse for the sums of a router's loss, which go with hidden states: "
                        "use bfloat16, or set output_router_logits=False in the model's configuration")
    if wire_dtype:
        plugin.communication = functools.partial(CompressedCommunication, wire_dtype=WIRE_DTYPES[wire_dtype])
    if gradient_wire_dtype and WIRE_DTYPES[gradient_wire_dtype] != plugin.master_dtype:
        plugin.bucket_class = functools.partial(CompressedBucket, wire_dtype=WIRE_DTYPES[gradient_wire_dtype],
                                                under_way=[])


def message_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The length of what encode() returns for a tensor of this shape."""
    return math.prod(shape) * dtype.itemsize + 4 * math.prod(shape[:-1]) * (dtype == torch.int8)


def encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One message of bytes: x in `dtype`. For int8 R float32 scales, then R * N numbers."""
    if dtype != torch.int8:
        return x.to(dtype).flatten().view(torch.uint8)
    rows = x.reshape(-1, x.size(-1)).float()  # (R, N)
    scales = rows.abs().amax(dim=1, keepdim=True) / 127  # (R, 1), not finite where the row is not
    steps = rows / scales.masked_fill(scales == 0, 1)
    numbers = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.flatten().view(torch.uint8), numbers.flatten().view(torch.uint8)])


def decode(message: torch.Tensor, shape: tuple[int, ...], wire_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of this shape that was encoded, up to rounding, in `dtype`."""
    if wire_dtype != torch.int8:
        return message.view(wire_dtype).view(shape).to(dtype)
    scales = message[: 4 * math.prod(shape[:-1])].view(torch.float32)  # (R)
    numbers = message[scales.nbytes :].view(torch.int8).view(-1, shape[-1])  # (R, N)
    return (numbers * scales[:, None]).view(shape).to(dtype)


class CompressedCommunication(StageCommunication):
    """The transfers of one stage, in `wire_dtype`. `dtype` is that of the hidden states (B, T, D)."""

    def __init__(self, dtype: torch.dtype, device: torch.device, wire_dtype: torch.dtype):
        super().__init__(torch.uint8, device)
        self.hidden_dtype, self.wire_dtype, self.shapes = dtype, wire_dtype, {}

    def post_receive(self, action: Action, shape: tuple[int, int, int]) -> None:
        self.shapes[action] = shape
        super().post_receive(action, (message_bytes(shape, self.wire_dtype),))

    def receive(self, action: Action) -> torch.Tensor | None:
        shape, message = self.shapes.pop(action, None), super().receive(action)
        return None if message is None else decode(message, shape, self.wire_dtype, self.hidden_dtype)

    def send(self, action: Action, tensor: torch.Tensor | None) -> None:
        if self.destination[action.kind] is not None:
            super().send(action, encode(tensor.detach(), self.wire_dtype))


class CompressedAllReduce:
    """The sum of a flat buffer over a group of n ranks, in place, with small messages. It starts when it is made.

    Each rank receives one n-th of all buffers, encoded (all-to-all), sums them unrounded in the order of the ranks, and
    sends the encoded sum to all (all-gather). All ranks decode the same bytes, so replicas stay equal in every bit. All
    have to call gather() and then wait(), for the same buffers in the same order.
    """

    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype):
        self.buffer, self.group, self.dtype, n = buffer, group, dtype, dist.get_world_size(group)
        self.shape = (math.ceil(buffer.numel() / (n * ROW)), ROW)  # of an n-th, with zeros at the end of the last one
        parts = F.pad(buffer, (0, n * math.prod(self.shape) - buffer.numel())).view(n, *self.shape)
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else buffer.device
        self.outgoing = torch.cat([encode(part, dtype) for part in parts]).to(self.wire)
        self.incoming = torch.empty_like(self.outgoing)
        self.handle = dist.all_to_all_single(self.incoming, self.outgoing, group=group, async_op=True)

    def decoded(self) -> list[torch.Tensor]:
        """Waits for the messages of all ranks: one (R, N) tensor per rank."""
        self.handle.wait()
        return [decode(message.to(self.buffer.device), self.shape, self.dtype, self.buffer.dtype)
                for message in self.incoming.chunk(dist.get_world_size(self.group))]

    def gather(self) -> None:
        self.outgoing = encode(sum(self.decoded()), self.dtype).to(self.wire)
        self.incoming = torch.empty_like(self.incoming)
        messages = list(self.incoming.chunk(dist.get_world_size(self.group)))
        self.handle = dist.all_gather(messages, self.outgoing, group=self.group, async_op=True)

    def wait(self) -> None:
        self.buffer.copy_(torch.cat(self.decoded()).flatten()[: self.buffer.numel()])


class CompressedBucket(Bucket):
    """A bucket of gradients that are summed by a CompressedAllReduce. `under_way`: those of all buckets, in order."""

    def __init__(self, params: list, process_group: dist.ProcessGroup, wire_dtype: torch.dtype, under_way: list):
        super().__init__(params, process_group)
        self.wire_dtype, self.under_way = wire_dtype, under_way

    def sync_gradient(self) -> None:
        self.handle = CompressedAllReduce(self.grad_data, self.process_group, self.wire_dtype)
        self.under_way.append(self.handle)

    def wait(self) -> None:
        """Waits. The second halves of all buckets start first, so that they travel while this one is decoded."""
        with timeline.span("wait"):
            while self.under_way:
                self.under_way.pop(0).gather()
        super().wait()
