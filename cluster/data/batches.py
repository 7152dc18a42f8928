"""The data of a run as people have it: flags, training and validation samples, and a loss in which all targets count.

In chats and answers, micro-batches hold unlike numbers of targets, the tokens that the loss counts. The loss of an
optimizer step is the sum over all its targets by their number N, whichever micro-batch or pipeline they are in. The
mean of the micro-batches' means is another number: a short answer's tokens would count more than a long one's.

A micro-batch of B samples counts B / G in a step of G samples, see run/samples.py. So where it has n targets, its
mean is weighted with (n / B) / (N / G): what a sample has here, by what one of the step has. All ranks know N from the
samples, without communication.

Samples of unlike lengths are padded on the right. No attention mask is needed: attention is causal, so that no token
sees what comes after it, and the outputs at the padding are no targets.
"""

import argparse
import math
import types
from collections.abc import Callable

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

from data.encoded import load_samples
from data.epochs import BLOCK, Epochs
from utils import UserError, number, positive_int, zero_or_more

NO_TARGET = -100  # in target_ids; the value that torch's and transformers' losses leave out too

fraction = number(float, lambda value: 0 < value < 1, "between 0 and 1, both excluded")


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """What train_distributed.py has beside --dataset_name."""
    parser.add_argument("--packing", choices=["auto", "on", "off"], default="auto",
                        help="on: rows one after the other, cut into samples of --seq_len tokens; off: a sample a row, "
                             "padded to the longest of its micro-batch; auto: on for text, off for chats and answers")
    parser.add_argument("--validation_split", type=fraction, metavar="FRACTION",
                        help="so many of the samples, the same ones in each run, are never trained on: the loss on "
                             "them is computed")
    parser.add_argument("--eval_every", type=zero_or_more, default=0, metavar="STEPS",
                        help="evaluate every so many steps, too (default, 0: only before the first step and after "
                             "the last)")
    parser.add_argument("--eval_batches", type=positive_int, metavar="N",
                        help="evaluate on the first N micro-batches of the validation split (default: on all)")


def check_data_flags(args) -> None:
    """Raises UserError for flags that do not go together."""
    if not args.validation_split:
        if given := [name for name in ("eval_every", "eval_batches") if getattr(args, name)]:
            raise UserError(f"--{', --'.join(given)} without a validation split: add --validation_split 0.05, or leave "
                            "it out")


class Data:
    """What a run of `num_steps` steps (None: of whole epochs) reads. All ranks make it together.

    `train`: an Epochs. `evaluation`: the validation samples, or None. `read`: see encoded.load_samples.
    No more of the data set is encoded than is read; with a validation split all, because the split is drawn from all
    of it: a corpus may be sorted by its age, or by its kind.
    Raises UserError, on every rank, as load_samples, split and Epochs do.
    """

    def __init__(self, args, tokenizer: str, vocab_size: int, global_batch: int, num_steps: int | None = None,
                 max_steps_per_epoch: int | None = None):
        limit = max_steps_per_epoch and max_steps_per_epoch * global_batch
        wanted = limit or num_steps and -(-num_steps * global_batch // BLOCK) * BLOCK  # None: all
        samples = load_samples(args, tokenizer, vocab_size, None if args.validation_split else wanted, args.packing)
        self.read, self.evaluation, numbers = samples.read, None, range(len(samples))
        is_all = args.validation_split or wanted == limit or len(samples) < wanted
        if args.validation_split:
            kept = split(len(samples), args.validation_split)
            numbers = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
            self.evaluation, numbers = Subset(samples, sorted(numbers[:kept])), numbers[kept:]
        self.train = Epochs(samples, numbers[:limit], global_batch, args.seed, bool(is_all))

    def collate(self, items: list) -> dict[str, torch.Tensor]:
        """A micro-batch of items of `train`: as pad() and, for rows, the scalar loss_weight; see the head of this
        module."""
        if isinstance(items[0], torch.Tensor):
            return pad(items)
        batch, num_targets = pad([row for row, _ in items]), items[0][1]
        own, num_alike = (batch["target_ids"] != NO_TARGET).sum(), self.train.global_batch / len(items)
        return {**batch, "loss_weight": own.double() * num_alike / num_targets}


def split(count: int, part: float) -> int:
    """How many of `count` samples are for validation. Raises UserError where it would be none or all."""
    kept = math.floor(count * part + 0.5)
    if kept == 0:
        raise UserError(f"--validation_split {part} of {count} samples is an empty validation split: choose "
                        f"{min(0.5, math.ceil(1e4 / count) / 1e4):g} or more, or add data")
    if kept == count:
        raise UserError(f"--validation_split {part} of {count} samples leaves nothing to train on: choose less, or add "
                        "data")
    return kept


def pad(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Samples of 2 tokens or more -> inputs and targets, (B, T) each, where T + 1 is the length of the longest one.

    In a sample, tokens that are no targets are complemented, as in rows.py.
    """
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)  # (B, T + 1); the complement of 0
    targets = tokens.masked_fill(tokens < 0, NO_TARGET)
    return {"input_ids": torch.maximum(tokens, -1 - tokens)[:, :-1].contiguous(),
            "target_ids": targets[:, 1:].contiguous()}


def select(output, batch: dict[str, torch.Tensor], router_scale: torch.Tensor | None = None):
    """The positions with targets, n of them, as one sample: output and batch for a criterion, logits (1, n, V or V/tp).

    `output` is logits (B, T, V or V/tp) or a ModelOutput with them. The loss of its router is multiplied by
    `router_scale`, and left out for None.
    """
    is_target = batch["target_ids"] != NO_TARGET  # (B, T)
    chosen = {"target_ids": batch["target_ids"][is_target][None]}  # (1, n)
    if isinstance(output, torch.Tensor):
        return output[is_target][None], chosen
    router_loss = getattr(output, "aux_loss", None)
    if router_loss is not None:
        router_loss = None if router_scale is None else router_loss * router_scale
    return types.SimpleNamespace(logits=output.logits[is_target][None], aux_loss=router_loss), chosen


def weighted(criterion: Callable) -> Callable:
    """A criterion that takes micro-batches with a loss_weight, and gives `criterion` those positions with targets.

    The router's loss of a mixture of experts counts by samples, as without weights. A micro-batch without a target has
    the loss 0 and gradients of zeros. One without a loss_weight is left to `criterion`.
    """
    def weighted_criterion(output, batch) -> torch.Tensor:
        if "loss_weight" not in batch:
            return criterion(output, batch)
        weight = batch["loss_weight"]
        chosen, targets = select(output, batch, 1 / weight)  # its product with the weight leaves the router's loss
        if targets["target_ids"].numel() == 0:
            logits = output if isinstance(output, torch.Tensor) else output.logits
            return logits.to(torch.promote_types(logits.dtype, torch.float32)).sum() * 0
        return criterion(chosen, targets) * weight

    return weighted_criterion
