"""What the model knows and writes during training, though no single rank may hold it: forward passes through pipelines.

The loss on the validation split: the pipelines share the micro-batches as they share those of a step, by their numbers
of micro-batches. The loss is the sum over all targets by their number, in float64, so that it does not depend on who
computes what.

A sample of text: for each new token, all stages run the text so far once, and the last stage chooses the likeliest
next token. There is no cache of keys and values, so this is for short texts; generate.py writes long ones, from a
checkpoint.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

import process_group_manager as pgm
from data.batches import select
from dataloader import deal_microbatches, load_tokenizer
from model import cast_weights_once
from models.causal import forward
from ranks.collectives import gather, once
from ranks.placement import home_rank
from utils import UserError


def outputs(plugin, model, batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[tuple[dict, object]]:
    """Each micro-batch of this pipeline, with what this rank's stage makes of it.

    A stage sends in the background, and takes up the next micro-batch meanwhile.
    """
    communication = plugin.communication(model.module.dtype, plugin.device)
    for i, batch in enumerate(batches):
        yield batch, forward(model.module, communication, i, batch)
    communication.finish()


class Evaluator:
    """Of the model that plugin.configure() returned. All ranks make one together, with the same samples.

    `collate` makes a micro-batch of a list of samples, `criterion(output, batch)` is its mean loss. A mixture of
    experts' router loss is not counted. `num_batches`: only the first so many micro-batches (None: all).
    """

    def __init__(self, plugin, model, samples, collate: Callable, criterion: Callable, num_batches: int | None = None):
        self.plugin, self.model, self.samples, self.collate = plugin, model, samples, collate
        self.criterion = criterion
        self.microbatches = [*BatchSampler(range(len(samples)), plugin.microbatch_size, drop_last=False)][:num_batches]

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
        grid, was_training = pgm.process_group_manager, self.model.training
        total = torch.zeros(2, dtype=torch.float64, device=self.plugin.device)  # of the targets' losses; the targets
        self.model.eval()
        try:
            with torch.autocast(self.plugin.device.type, enabled=False), cast_weights_once():
                for batch, out in outputs(self.plugin, self.model, self.batches()):
                    if grid.pp_is_last_stage:
                        chosen, targets = select(out, batch)
                        if (count := targets["target_ids"].numel()) > 0:
                            total[0] += self.criterion(chosen, targets).double() * count
                            total[1] += count
        finally:
            self.model.train(was_training)
        total *= grid.tp_rank == 0  # the ranks of a tp group have the same loss: count it once
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


class Sampler:
    """Writes `num_tokens` tokens after `prompt`. All ranks make one together; home_rank() has the tokenizer."""

    def __init__(self, plugin, model, tokenizer_name: str, prompt: str, seq_len: int, num_tokens: int = 24):
        def encode() -> list[int]:
            self.tokenizer = load_tokenizer(tokenizer_name)
            return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]

        self.plugin, self.model, self.tokenizer = plugin, model, None
        self.ids = once(home_rank(), encode)
        self.num_tokens = min(num_tokens, seq_len - len(self.ids))
        if not self.ids or self.num_tokens < 1:
            raise UserError(f"--prompt {prompt!r} has {len(self.ids)} tokens: it needs at least one, and fewer than "
                            f"the --seq_len of {seq_len}")

    def sample(self) -> str:
        """The prompt and what follows it. Collective."""
        ids = torch.tensor([self.ids], device=self.plugin.device)
        self.model.eval()
        for _ in range(self.num_tokens):
            ids = torch.cat([ids, self.next_token(ids)], dim=1)
        self.model.train()
        text = self.tokenizer and self.tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)
        return gather(text)[home_rank()]

    @torch.no_grad()
    def next_token(self, ids: torch.Tensor) -> torch.Tensor:
        """(1, T) -> (1, 1), the same on all ranks. Every pipeline computes it."""
        grid = pgm.process_group_manager
        [(_, out)] = outputs(self.plugin, self.model, [{"input_ids": ids}])
        chosen = torch.zeros(1, 1, dtype=torch.int64, device=self.plugin.device)
        if grid.pp_is_last_stage:
            logits = getattr(out, "logits", out)[:, -1].float()  # (1, V), or (1, V/tp) of our Llama
            if logits.shape[1] < self.model.module.config.vocab_size:
                parts = [None] * grid.tp_world_size
                dist.all_gather_object(parts, logits.cpu(), group=grid.tp_group)
                logits = torch.cat(parts, dim=1)
            chosen += logits.argmax().item()
        dist.broadcast(chosen, grid.ranks[0][-1, 0].item())
        return chosen
