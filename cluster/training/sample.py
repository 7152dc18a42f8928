"""A sample of text during training, from a model that no single rank may hold: forward passes through the pipeline.

For each new token, all stages run the text so far once, and the last stage chooses the likeliest next token. There is
no cache of keys and values, so this is for short texts; generate.py writes long ones, from a checkpoint.
"""

import torch
import torch.distributed as dist

import process_group_manager as pgm
from dataloader import load_tokenizer
from pipeline_parallel import Action
from training.machine_facts import home_rank, is_home
from utils import UserError


class Sampler:
    """Writes `num_tokens` tokens after `prompt`. All ranks make one together; home_rank() has the tokenizer."""

    def __init__(self, plugin, model, tokenizer_name: str, prompt: str, seq_len: int, num_tokens: int = 24):
        self.plugin, self.model, self.tokenizer, ids = plugin, model, None, None
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
        grid, stage, action = pgm.process_group_manager, self.model.module, Action("F", 0)
        communication, batch = self.plugin.communication(stage.dtype, self.plugin.device), {"input_ids": ids}
        communication.post_receive(action, stage.hidden_shape(**batch))
        out = stage(communication.receive(action), **batch)
        communication.send(action, out if isinstance(out, torch.Tensor) else None)
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
