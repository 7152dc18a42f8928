"""The samples of a run, epoch after epoch, in an order that neither the length of the run nor its topology changes.

The samples of the corpus are shuffled in blocks of BLOCK: a run of a few steps then encodes only the blocks that it
reads, and a longer one, or one that goes on after a checkpoint, reads the same samples first. An epoch ends with a
whole optimizer step; what is left over is not read.
"""

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from utils import UserError

BLOCK = 1024  # samples
KEPT = 4  # blocks whose order is remembered


class Epochs(Dataset):
    """Items of T + 1 token ids: those of optimizer step k are k * global_batch and the following ones.

    `places`: of the samples that are read (None: all). `steps_per_epoch` is None where the run ends before its first
    epoch does. Raises UserError for samples that are fewer than a step needs.
    """

    def __init__(self, samples: Dataset, global_batch: int, seed: int, is_all: bool = True,
                 places: Sequence[int] | None = None):
        self.samples, self.seed, self.places = samples, seed, range(len(samples)) if places is None else places
        if (count := len(self.places)) < global_batch:
            raise UserError(f"the data set has {count} samples, fewer than the {global_batch} of one step: lower "
                            "--batch_size or the number of micro-batches, or add data")
        self.steps_per_epoch = count // global_batch if is_all else None
        self.samples_per_epoch = self.steps_per_epoch * global_batch if is_all else count
        self.num_samples = self.samples_per_epoch  # of the run: set_steps() changes it
        self.global_batch = global_batch

    def set_steps(self, num_steps: int) -> None:
        self.num_samples = num_steps * self.global_batch

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> torch.Tensor:  # (T + 1,)
        return self.samples[self.position_of(i)]

    def position_of(self, i: int) -> int:
        """Which of the corpus's samples is item i."""
        epoch, position = divmod(i, self.samples_per_epoch)
        block, place = divmod(position, BLOCK)
        return self.places[block * BLOCK + self.order(epoch, block)[place]]

    @functools.lru_cache(KEPT)
    def order(self, epoch: int, block: int) -> list[int]:
        """In which the samples of a block are read."""
        size = min(BLOCK, len(self.places) - block * BLOCK)
        generator = torch.Generator().manual_seed((self.seed + epoch << 20) + block)
        return torch.randperm(size, generator=generator).tolist()
