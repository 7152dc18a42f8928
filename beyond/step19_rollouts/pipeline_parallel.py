"""Pipeline parallelism: the layers are divided into stages, and micro-batches pass through them one after the other.

Stage s receives hidden states (B, T, D) from stage s-1, runs its layers and sends the result to stage s+1. In backward,
gradients of the same shape travel in the other direction. The first stage holds the embedding, the last one the final
norm and the projection, so only the last stage computes the loss.

A schedule is data: for one stage, the order in which micro-batches go forward (F) and backward (B). All forward, all
backward (AFAB) with 4 stages and 4 micro-batches, one column per unit of time:

    stage 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
    stage 1   .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
    stage 2   .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
    stage 3   .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

Dots are idle time, the bubble: (p-1)/(m+p-1) of the whole, with p stages and m micro-batches.

In one forward, one backward (1F1B), stage s starts no further forward while p - s micro-batches wait for their
backward. The bubble is the same, but it holds the activations of at most p - s micro-batches instead of all m:

    stage 0   F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    stage 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    stage 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

One executor, run_schedule, runs any schedule. It waits only for what the next action needs. A receive is posted before
the computation that precedes it, and sends continue in the background. Forward and backward traffic use separate
process groups: NCCL runs the transfers of one group in order, and a forward send must not queue behind a backward
receive.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from model import get_cos_sin
from tensor_parallel import cross_entropy
from timeline import timeline
from utils import UserError


class Action(NamedTuple):
    kind: Literal["F", "B"]
    microbatch: int


def afab(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """All forward, all backward (GPipe, Huang et al. 2019): the activations of all m micro-batches are alive."""
    for i in range(num_microbatches):
        yield Action("F", i)
    for i in range(num_microbatches):
        yield Action("B", i)


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """One forward, one backward (PipeDream-Flush, Narayanan et al. 2021): at most p - stage activations are alive."""
    warm_up = min(num_stages - stage - 1, num_microbatches)
    for i in range(warm_up):
        yield Action("F", i)
    for i in range(warm_up, num_microbatches):  # steady state
        yield Action("F", i)
        yield Action("B", i - warm_up)
    for i in range(num_microbatches - warm_up, num_microbatches):  # cool-down
        yield Action("B", i)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b}


class PipelineParallel(nn.Module):
    """The part of a Llama on this rank's stage. Parameters keep their names: layer 5 is layer 5 on any stage.

    All stages hold equally many layers, or the first ones one more. Raises UserError for more stages than layers.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        grid = pgm.process_group_manager
        num_layers = model.config.num_hidden_layers
        if grid.pp_world_size > num_layers:
            raise UserError(f"pp_size={grid.pp_world_size} stages for num_hidden_layers={num_layers}: "
                            f"each stage needs a layer, use --pp_size {num_layers} or less")
        self.config, self.dtype = model.config, model.dtype
        holds_embedding = grid.pp_is_first_stage or grid.pp_is_last_stage and model.config.tie_word_embeddings
        self.embedding = model.embedding if holds_embedding else None
        layers = torch.arange(num_layers, device="cpu").tensor_split(grid.pp_world_size)[grid.pp_rank].tolist()
        self.decoder_layers = nn.ModuleDict({str(i): model.decoder_layers[i] for i in layers})
        self.final_norm = model.final_norm if grid.pp_is_last_stage else None
        self.final_proj = model.final_proj if grid.pp_is_last_stage else None
        connect_neighbours()

    def tie_weights(self) -> None:
        """The last stage's projection shares its weight with an embedding, a copy of that of the first stage."""
        if self.config.tie_word_embeddings and None not in (self.embedding, self.final_proj):
            self.final_proj.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) or hidden states (B, T, D) -> hidden states, on the last stage logits (B, T, V/tp)."""
        if pgm.process_group_manager.pp_is_first_stage:
            x = self.embedding(x).to(self.dtype)
        cos, sin = get_cos_sin(x.size(1), self.config.head_dim, x.dtype, x.device, **self.config.rope_parameters)
        for layer in self.decoder_layers.values():
            x = layer(x, cos, sin)
        return x if self.final_proj is None else self.final_proj(self.final_norm(x))


def connect_neighbours() -> None:
    """Opens the connections between neighbouring stages, one pair after the other.

    NCCL opens a connection when it is first used. Both sides then wait for each other and for their GPUs. If the
    first use were a receive that is posted early, two neighbours could each wait for the other for ever.
    """
    grid = pgm.process_group_manager
    token = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    for stage in range(grid.pp_world_size - 1):
        if grid.pp_rank == stage:
            dist.send(token, grid.pp_next_rank, group=grid.pp_group)
            dist.recv(token, grid.pp_next_rank, group=grid.pp_backward_group)
        elif grid.pp_rank == stage + 1:
            dist.recv(token, grid.pp_prev_rank, group=grid.pp_group)
            dist.send(token, grid.pp_prev_rank, group=grid.pp_backward_group)


class StageCommunication:
    """The transfers of one stage. What an action needs is received early, and its result is sent in the background.

    gloo can only send tensors in host memory, so on CUDA over gloo they are copied there and back.
    """

    def __init__(self, tensor_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = tensor_shape, dtype, device
        self.wire_device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.receives_ahead = 2 if dist.get_backend() == "gloo" else 1  # over NCCL, 2 would keep sends waiting
        grid = pgm.process_group_manager
        self.source = {"F": grid.pp_prev_rank, "B": grid.pp_next_rank}
        self.destination = {"F": grid.pp_next_rank, "B": grid.pp_prev_rank}
        self.group = {"F": grid.pp_group, "B": grid.pp_backward_group}
        self.receiving: dict[Action, tuple] = {}
        self.sending: deque[tuple] = deque()

    def post_receive(self, action: Action) -> None:
        if self.source[action.kind] is not None and action not in self.receiving:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.wire_device)
            source, group = self.source[action.kind], self.group[action.kind]
            handle = dist.irecv(buffer, source, group=group)
            self.receiving[action] = (timeline.background(handle, "receive", action.microbatch, source), buffer)

    def receive(self, action: Action) -> torch.Tensor | None:
        """Waits for the input (F) or the gradient of the output (B) of a micro-batch. None at the pipeline's ends."""
        if action not in self.receiving:
            return None
        handle, buffer = self.receiving.pop(action)
        with timeline.span("wait", action.microbatch):
            handle.wait()
        return buffer.to(self.device)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        if self.destination[action.kind] is None:
            return
        tensor = tensor.detach().to(self.wire_device).contiguous()
        destination, group = self.destination[action.kind], self.group[action.kind]
        self.sending.append((dist.isend(tensor, destination, group=group), tensor))  # the tensor lives until it is sent
        self.finish(2 * pgm.process_group_manager.pp_world_size)

    def finish(self, unfinished: int = 0) -> None:
        """Waits until no more than so many sends, the newest ones, are unfinished. Lets go what has been sent."""
        while len(self.sending) > unfinished or self.sending and self.sending[0][0].is_completed():
            handle, _ = self.sending.popleft()
            handle.wait()


def next_token_loss(out: torch.Tensor, batch: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    """The loss of step 8, of logits (B, T, V/tp)."""
    return cross_entropy(out, batch["target_ids"], vocab_size)


def forward_microbatch(model: nn.Module, data_loader, received: torch.Tensor | None, compute_loss=next_token_loss):
    """The stage's input, a leaf of its own graph, and its output, which on the last stage is the loss."""
    grid, stage = pgm.process_group_manager, model.module
    batch = next(data_loader) if grid.pp_is_first_stage or grid.pp_is_last_stage else None
    x = batch["input_ids"] if grid.pp_is_first_stage else received.requires_grad_()
    out = model(x)
    if grid.pp_is_last_stage:
        out = compute_loss(out, batch, stage.config.vocab_size) / data_loader.gradient_accumulation_steps
    return x, out


def backward_microbatch(x: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None) -> torch.Tensor | None:
    """Backward from `out`, whose gradient was `received` unless it is the loss. Returns that of x, None for ids."""
    torch.autograd.backward(out, received)
    return x.grad


def run_schedule(schedule, model: nn.Module, data_loader, tensor_shape, device: torch.device,
                 compute_loss=next_token_loss) -> torch.Tensor:
    """Runs an optimizer step's micro-batches through this stage, as `schedule` orders. Without gradients: forward only.

    `tensor_shape` is that of the hidden states, (B, T, D). Returns the mean loss on the last stage, zero on the others.
    Then `model.peak_live_activations` is the most micro-batches whose activations were alive at once.
    """
    grid, num_microbatches = pgm.process_group_manager, data_loader.gradient_accumulation_steps
    actions = [action for action in schedule(grid.pp_rank, grid.pp_world_size, num_microbatches)
               if action.kind == "F" or torch.is_grad_enabled()]
    communication = StageCommunication(tensor_shape, model.module.dtype, device)
    total_loss = torch.zeros((), device=device)
    alive: dict[int, tuple] = {}  # micro-batch -> what its backward needs
    model.peak_live_activations = 0
    for k, action in enumerate(actions):
        for upcoming in actions[k : k + 1 + communication.receives_ahead]:
            communication.post_receive(upcoming)
        i, received = action.microbatch, communication.receive(action)
        if action.kind == "F":
            with timeline.span("forward", i):
                x, out = forward_microbatch(model, data_loader, received, compute_loss)
            communication.send(action, out)
            if torch.is_grad_enabled():
                alive[i] = (x, out)
            model.peak_live_activations = max(model.peak_live_activations, len(alive))
            if grid.pp_is_last_stage:
                total_loss = total_loss + out.detach()
        else:
            model.require_backward_grad_sync = i == num_microbatches - 1
            with timeline.span("backward", i):
                gradient = backward_microbatch(*alive.pop(i), received)
            communication.send(action, gradient)
    communication.finish()
    if torch.is_grad_enabled():
        model.finish_gradient_sync()
        sum_tied_gradients(model.module)
    return total_loss


def sum_tied_gradients(stage: PipelineParallel) -> None:
    """Sums the gradient of a tied embedding, which the first stage holds and, for its projection, the last one too."""
    if stage.config.tie_word_embeddings and stage.embedding is not None:
        dist.all_reduce(stage.embedding.weight.grad, group=pgm.process_group_manager.pp_ends_group)
