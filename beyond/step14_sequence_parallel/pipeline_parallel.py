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

Zero bubble (ZB-H1) divides backward, which takes about as long as two forwards, into two actions: B computes the
gradient of the stage's input, W those of its weights (see weight_gradients.py). The stage before waits for B only, and
W fills what would be idle time. With F, B and W of one unit each, the bubble is (p-1)/(3m+p-1) instead of
(p-1)/(m+p-1), and no stage holds the activations of more than p micro-batches:

    stage 0   F0 F1 F2 F3 .  .  .  B0 W0 B1 W1 B2 W2 B3 W3
    stage 1   .  F0 F1 F2 .  .  B0 F3 B1 W0 B2 W1 B3 W2 W3
    stage 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 B3 W1 W2 W3
    stage 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3

A rank can hold several chunks of the model, see virtual_stages.py.

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
import weight_gradients
from model import get_cos_sin
from tensor_parallel import cross_entropy
from timeline import timeline
from utils import UserError


class Action(NamedTuple):
    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0  # of the rank's chunks of the model, see virtual_stages.py


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


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al. 2023): 1F1B, each W `stage` micro-batches after its B (stage 0: in B). At most p are alive."""
    actions = one_f_one_b(stage, num_stages, num_microbatches)
    return postpone_weight_gradients(actions, stage) if stage > 0 else actions


def postpone_weight_gradients(actions: Iterator[Action], delay: int) -> Iterator[Action]:
    """Divides each backward of a schedule: its W comes after as many further B as `delay` says."""
    waiting = deque()
    for action in actions:
        yield action
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "zb": zero_bubble}


class PipelineParallel(nn.Module):
    """The part of a Llama on this rank: its chunks, each a virtual stage. Layer 5 is layer 5 on any of them.

    All virtual stages hold equally many layers, or the first ones one more. Raises UserError for more than layers.
    """

    def __init__(self, model: nn.Module, num_chunks: int = 1):
        super().__init__()
        grid = pgm.process_group_manager
        num_layers, num_stages = model.config.num_hidden_layers, grid.pp_world_size * num_chunks
        if num_stages > num_layers:
            raise UserError(f"pp_size={grid.pp_world_size} x virtual_stages={num_chunks} for num_hidden_layers="
                            f"{num_layers}: each virtual stage needs a layer, lower --pp_size or --virtual_stages")
        self.config, self.dtype = model.config, model.dtype
        holds_embedding = grid.pp_is_first_stage or grid.pp_is_last_stage and model.config.tie_word_embeddings
        self.embedding = model.embedding if holds_embedding else None
        stages = torch.arange(num_layers, device="cpu").tensor_split(num_stages)
        self.chunks = [layers.tolist() for layers in stages[grid.pp_rank :: grid.pp_world_size]]
        self.decoder_layers = nn.ModuleDict({str(i): model.decoder_layers[i] for layers in self.chunks for i in layers})
        self.final_norm = model.final_norm if grid.pp_is_last_stage else None
        self.final_proj = model.final_proj if grid.pp_is_last_stage else None
        connect_neighbours(num_chunks)

    def is_first(self, chunk: int) -> bool:
        return pgm.process_group_manager.pp_is_first_stage and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return pgm.process_group_manager.pp_is_last_stage and chunk == len(self.chunks) - 1

    def tie_weights(self) -> None:
        """The last stage's projection shares its weight with an embedding, a copy of that of the first stage."""
        if self.config.tie_word_embeddings and None not in (self.embedding, self.final_proj):
            self.final_proj.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, chunk: int, seq_len: int) -> torch.Tensor:
        """Token ids (B, T) or hidden states -> hidden states (B, T or T/tp, D), on the last one logits (B, T, V/tp)."""
        if self.is_first(chunk):
            x = self.embedding(x).to(self.dtype)
        cos, sin = get_cos_sin(seq_len, self.config.head_dim, x.dtype, x.device, **self.config.rope_parameters)
        for i in self.chunks[chunk]:
            x = self.decoder_layers[str(i)](x, cos, sin)
        return self.final_proj(self.final_norm(x)) if self.is_last(chunk) else x


def connect_neighbours(num_chunks: int) -> None:
    """Opens the connections between neighbouring stages, one pair after the other, and those between replicas.

    NCCL opens a connection when it is first used. Both sides then wait for each other and for their GPUs. If the
    first use were a receive that is posted early, two neighbours could each wait for the other for ever. With chunks
    the same holds for an all-reduce: one chunk's gradients are summed while another chunk waits for its messages.
    """
    grid = pgm.process_group_manager
    token = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    links = [(*pair, grid.pp_group, grid.pp_backward_group) for pair in zip(grid.pp_ranks, grid.pp_ranks[1:])]
    if num_chunks > 1:
        links.append((grid.pp_ranks[-1], grid.pp_ranks[0], grid.pp_wrap_group, grid.pp_wrap_backward_group))
    for sender, receiver, group, backward_group in links:
        if grid.global_rank == sender:
            dist.send(token, receiver, group=group)
            dist.recv(token, receiver, group=backward_group)
        elif grid.global_rank == receiver:
            dist.recv(token, sender, group=group)
            dist.send(token, sender, group=backward_group)
    for group in grid.replicas:
        dist.all_reduce(token, group=group)
        shards = token.new_zeros(group.size())  # messages of ZeRO go between all pairs of replicas
        dist.all_to_all_single(torch.empty_like(shards), shards, group=group)


class StageCommunication:
    """The transfers of one stage. What an action needs is received early, and its result is sent in the background.

    gloo can only send tensors in host memory, so on CUDA over gloo they are copied there and back.
    """

    def __init__(self, tensor_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, num_chunks: int):
        self.shape, self.dtype, self.device, self.num_chunks = tensor_shape, dtype, device, num_chunks
        self.wire_device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.receives_ahead = 2 if dist.get_backend() == "gloo" else 1  # over NCCL, 2 would keep sends waiting
        self.receiving: dict[Action, tuple] = {}
        self.sending: deque[tuple] = deque()

    def route(self, action: Action, direction: int) -> tuple[int | None, dist.ProcessGroup]:
        """The rank that needs the result of an action (direction 1) or that sends what it needs (-1), and the group.

        A forward's result goes to the next virtual stage, a backward's to the one before. Between the last rank and
        the first one it is another group. With two ranks, each sends forward results to the other and receives some
        from it: in a single group over NCCL, each one's send could wait behind its own receive.
        """
        grid, hop = pgm.process_group_manager, direction if action.kind == "F" else -direction
        chunk, stage = divmod(action.chunk * grid.pp_world_size + grid.pp_rank + hop, grid.pp_world_size)
        groups = {"F": (grid.pp_group, grid.pp_wrap_group), "B": (grid.pp_backward_group, grid.pp_wrap_backward_group)}
        rank = grid.pp_ranks[stage] if 0 <= chunk < self.num_chunks else None
        return rank, groups[action.kind][chunk != action.chunk]

    def post_receive(self, action: Action) -> None:
        source, group = self.route(action, -1)
        if source is not None and action not in self.receiving:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.wire_device)
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
        destination, group = self.route(action, 1)
        if destination is None:
            return
        tensor = tensor.detach().to(self.wire_device).contiguous()
        self.sending.append((dist.isend(tensor, destination, group=group), tensor))  # the tensor lives until it is sent
        self.finish(2 * pgm.process_group_manager.pp_world_size * self.num_chunks)  # more than are alive at once

    def finish(self, unfinished: int = 0) -> None:
        """Waits until no more than so many sends, the newest ones, are unfinished. Lets go what has been sent."""
        while len(self.sending) > unfinished or self.sending and self.sending[0][0].is_completed():
            handle, _ = self.sending.popleft()
            handle.wait()


def forward_microbatch(model: nn.Module, chunk: int, data_loader, received: torch.Tensor | None):
    """The chunk's input, a leaf of its own graph, and its output, which on the last stage is the loss."""
    stage = model.module
    batch = next(data_loader) if stage.is_first(chunk) or stage.is_last(chunk) else None
    x = batch["input_ids"] if stage.is_first(chunk) else received.requires_grad_()
    out = model(x, chunk, data_loader.dataset.seq_len)
    if stage.is_last(chunk):
        out = cross_entropy(out, batch["target_ids"], stage.config.vocab_size) / data_loader.gradient_accumulation_steps
    return x, out


def backward_microbatch(x: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None) -> torch.Tensor | None:
    """Backward from `out`, whose gradient was `received` unless it is the loss. Returns that of x, None for ids."""
    torch.autograd.backward(out, received)
    return x.grad


def run_schedule(schedule, model: nn.Module, data_loader, tensor_shape, device: torch.device) -> torch.Tensor:
    """Runs an optimizer step's micro-batches through this stage, as `schedule` orders. Without gradients: forward only.

    `tensor_shape` is that of the hidden states, (B, T or T/tp, D). Returns the mean loss on the last stage, else zero.
    Then `model.peak_live_activations` is the most micro-batches whose activations were alive at once, in all chunks.
    """
    grid, num_microbatches = pgm.process_group_manager, data_loader.gradient_accumulation_steps
    actions = [action for action in schedule(grid.pp_rank, grid.pp_world_size, num_microbatches)
               if action.kind == "F" or torch.is_grad_enabled()]
    stage = model.module
    communication = StageCommunication(tensor_shape, stage.dtype, device, len(stage.chunks))
    total_loss = torch.zeros((), device=device)
    alive: dict[tuple[int, int], tuple | list] = {}  # (micro-batch, chunk) -> what its B needs, then what its W needs
    model.peak_live_activations = 0
    weight_gradients.postpone(any(action.kind == "W" for action in actions))
    for k, action in enumerate(actions):
        for upcoming in (action for action in actions[k : k + 1 + communication.receives_ahead] if action.kind != "W"):
            communication.post_receive(upcoming)
        _, i, chunk = action
        model.require_backward_grad_sync = i == num_microbatches - 1
        received = communication.receive(action)
        if action.kind == "F":
            with timeline.span("forward", i, chunk):
                x, out = forward_microbatch(model, chunk, data_loader, received)
            communication.send(action, out)
            if torch.is_grad_enabled():
                alive[i, chunk] = (x, out)
            model.peak_live_activations = max(model.peak_live_activations, len(alive))
            if stage.is_last(chunk):
                total_loss = total_loss + out.detach()
        elif action.kind == "B":
            with timeline.span("backward", i, chunk):
                gradient = backward_microbatch(*alive.pop((i, chunk)), received)
            communication.send(action, gradient)
            if (postponed := weight_gradients.take()) is not None:
                alive[i, chunk] = postponed
        else:
            with timeline.span("weight gradients", i, chunk):
                weight_gradients.add_weight_gradients(alive.pop((i, chunk)), model)
    weight_gradients.postpone(False)
    communication.finish()
    if torch.is_grad_enabled():
        model.finish_gradient_sync()
        sum_tied_gradients(model)
    return total_loss


def sum_tied_gradients(model) -> None:
    """Sums the gradient of a tied embedding, which the first stage holds and, for its projection, the last one too."""
    stage = model.module
    if stage.config.tie_word_embeddings and stage.embedding is not None:
        dist.all_reduce(model.gradient(stage.embedding.weight), group=pgm.process_group_manager.pp_ends_group)
