"""The samples of a run, epoch after epoch, in an order that neither the length of the run nor its topology changes.

The samples of the corpus are shuffled in blocks of BLOCK: a run of a few steps then encodes only the blocks that it
reads, and a longer one, or one that goes on after a checkpoint, reads the same samples first. An epoch ends with a
whole optimizer step; what is left over is not read.
"""

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from data.encoded import RowSamples
from utils import UserError

BLOCK = 1024  # samples
KEPT = 4  # blocks whose order is remembered


class Epochs(Dataset):
    """Items of up to T + 1 tokens: those of optimizer step k are k * global_batch and the following ones.

    Where samples have unlike numbers of targets, an item is (sample, number of all targets of its optimizer step).
    `numbers`: of the samples that are read. `is_all`: whether an epoch ends with them; else the run ends before, and
    `steps_per_epoch` is None. Raises UserError for samples that are fewer than a step needs.
    """

    def __init__(self, samples: Dataset, numbers: Sequence[int], global_batch: int, seed: int, is_all: bool):
        self.samples, self.numbers, self.global_batch, self.seed = samples, numbers, global_batch, seed
        if (count := len(numbers)) < global_batch:
            raise UserError(f"the data set has {count} samples, fewer than the {global_batch} of one step: lower "
                            "--batch_size or the number of micro-batches, or add data")
        self.steps_per_epoch = count // global_batch if is_all else None
        self.samples_per_epoch = self.steps_per_epoch * global_batch if is_all else count
        self.num_samples = self.samples_per_epoch  # of the run: set_steps() changes it

    def set_steps(self, num_steps: int) -> None:
        self.num_samples = num_steps * self.global_batch

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> torch.Tensor | tuple[torch.Tensor, int]:
        sample = self.samples[self.position_of(i)]
        return (sample, self.num_targets(i // self.global_batch)) if isinstance(self.samples, RowSamples) else sample

    @functools.lru_cache(1)
    def num_targets(self, step: int) -> int:
        """Of optimizer step `step`, from 0 on."""
        mine = range(step * self.global_batch, (step + 1) * self.global_batch)
        return sum(self.samples.num_targets(self.position_of(i)) for i in mine)

    def position_of(self, i: int) -> int:
        """Which of the corpus's samples is item i."""
        epoch, position = divmod(i, self.samples_per_epoch)
        block, place = divmod(position, BLOCK)
        return self.numbers[block * BLOCK + self.order(epoch, block)[place]]

    @functools.lru_cache(KEPT)
    def order(self, epoch: int, block: int) -> list[int]:
        """In which the samples of a block are read."""
        size = min(BLOCK, len(self.numbers) - block * BLOCK)
        generator = torch.Generator().manual_seed((self.seed + epoch << 20) + block)
        return torch.randperm(size, generator=generator).tolist()
