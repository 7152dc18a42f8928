"""What the model knows and writes during training, though no single rank may hold it: forward passes through pipelines.

The loss on the validation split: the pipelines share the micro-batches as they share those of a step, by their numbers
of micro-batches. The loss is the sum over all targets by their number, in float64, so that it does not depend on who
computes what.

A sample of text: for each new token, all stages run the text so far once, and the last stage chooses the likeliest
next token. There is no cache of keys and values, so this is for short texts; generate.py writes long ones, from a
checkpoint.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import process_group_manager as pgm
from data.batches import select
from dataloader import deal_microbatches, load_tokenizer
from model import cast_weights_once
from models.forward import forward
from ranks.placement import home_rank, is_home
from timeline import timeline
from utils import UserError


class Evaluator:
    """Of the model that plugin.configure() returned. All ranks make one together, with the same samples.

    `collate` makes a micro-batch of a list of samples, `criterion(output, batch)` is its mean loss. A mixture of
    experts' router loss is not counted. `num_batches`: only the first so many micro-batches (None: all).
    """

    def __init__(self, plugin, model, samples, collate: Callable, criterion: Callable, num_batches: int | None = None):
        self.plugin, self.model, self.samples, self.collate = plugin, model, samples, collate
        self.criterion, size = criterion, plugin.microbatch_size
        count = min(len(samples), num_batches * size) if num_batches else len(samples)
        self.microbatches = [range(first, min(first + size, count)) for first in range(0, count, size)]

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        numbers = self.plugin.num_microbatches
        turns = deal_microbatches(numbers)[pgm.process_group_manager.dp_rank]
        for i, mine in enumerate(self.microbatches):  # a DataLoader would draw from the generator of the training
            if i % sum(numbers) in turns:
                batch = self.collate([self.samples[i] for i in mine])
                yield {name: value.to(self.plugin.device) for name, value in batch.items()}

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of a target, on every rank. Collective.

        Dropout is off meanwhile. No generator is drawn from, so that the training goes on as without it.
        """
        was_training, was_recording = self.model.training, timeline.recording
        self.model.eval()
        timeline.recording = False
        try:
            with torch.autocast(self.plugin.device.type, enabled=False), cast_weights_once():
                total = self.forward_all()
        finally:
            timeline.recording = was_recording
            self.model.train(was_training)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def forward_all(self) -> torch.Tensor:
        """(2,) in float64: the sum of the losses of the targets that this rank counts, and their number.

        A stage sends in the background, and takes up the next micro-batch meanwhile.
        """
        grid, stage = pgm.process_group_manager, self.model.module
        communication = self.plugin.communication(stage.dtype, self.plugin.device)
        total = torch.zeros(2, dtype=torch.float64, device=self.plugin.device)
        for i, batch in enumerate(self.batches()):
            out = forward(stage, communication, i, batch)
            if grid.pp_is_last_stage:
                chosen, targets = select(out, batch)
                if (count := targets["target_ids"].numel()) > 0:
                    total[0] += self.criterion(chosen, targets).double() * count
                    total[1] += count
        communication.finish()
        return total * (grid.tp_rank == 0)  # the ranks of a tp group have the same loss: count it once


class Sampler:
    """Writes `num_tokens` tokens after `prompt`. All ranks make one together; home_rank() has the tokenizer."""

    def __init__(self, plugin, model, tokenizer_name: str, prompt: str, seq_len: int, num_tokens: int = 24):
        self.plugin, self.model, self.tokenizer, ids = plugin, model, None, None
        with pgm.together():
            if is_home():
                self.tokenizer = load_tokenizer(tokenizer_name)
                ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        box = [ids]
        dist.broadcast_object_list(box, home_rank())
        self.ids, self.num_tokens = box[0], min(num_tokens, seq_len - len(box[0]))
        if not self.ids or self.num_tokens < 1:
            raise UserError(f"--prompt {prompt!r} has {len(self.ids)} tokens: it needs at least one, and fewer than "
                            f"the --seq_len of {seq_len}")

    def sample(self) -> str | None:
        """The prompt and what follows it, on home_rank(). Collective."""
        ids = torch.tensor([self.ids], device=self.plugin.device)
        self.model.eval()
        for _ in range(self.num_tokens):
            ids = torch.cat([ids, self.next_token(ids)], dim=1)
        self.model.train()
        return self.tokenizer.decode(ids[0].tolist(), skip_special_tokens=True) if self.tokenizer else None

    @torch.no_grad()
    def next_token(self, ids: torch.Tensor) -> torch.Tensor:
        """(1, T) -> (1, 1), the same on all ranks. Every pipeline computes it."""
        grid, stage = pgm.process_group_manager, self.model.module
        communication = self.plugin.communication(stage.dtype, self.plugin.device)
        out = forward(stage, communication, 0, {"input_ids": ids})
        communication.finish()
        chosen = torch.zeros(1, 1, dtype=torch.int64, device=self.plugin.device)
        if grid.pp_is_last_stage:
            chosen += likeliest(getattr(out, "logits", out)[:, -1].float(), stage.config.vocab_size)
        dist.broadcast(chosen, grid.ranks[0][-1, 0].item())
        return chosen


def likeliest(logits: torch.Tensor, vocab_size: int) -> int:
    """The id with the largest of the logits (1, V), or (1, V/tp) where our Llama's are split over the tp group."""
    value, place = (each.item() for each in logits.max(-1))
    if logits.shape[1] == vocab_size:
        return place
    grid = pgm.process_group_manager
    rows, left_over = divmod(vocab_size, grid.tp_world_size)
    found = [None] * grid.tp_world_size
    dist.all_gather_object(found, (value, grid.tp_rank * rows + min(grid.tp_rank, left_over) + place),
                           group=grid.tp_group)
    return max(found)[1]
