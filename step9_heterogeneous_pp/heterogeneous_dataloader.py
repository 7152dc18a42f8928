"""Unequal shares of one global batch: the samples that one process would read in that step, each by one pipeline.

A step's micro-batches are dealt like cards: one to each pipeline in turn, as long as it has room. Three pipelines with
3, 2 and 3 of the micro-batches 0 to 7:

    pipeline 0   0  3  6
    pipeline 1   1  4
    pipeline 2   2  5  7          with equal numbers these are step 8's shares
"""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset


def deal_microbatches(num_microbatches: list[int]) -> list[list[int]]:
    """For each pipeline its micro-batches of the step's 0 to sum(num_microbatches) - 1."""
    turns = [(turn, pipeline) for pipeline, count in enumerate(num_microbatches) for turn in range(count)]
    hands: list[list[int]] = [[] for _ in num_microbatches]
    for microbatch, (_, pipeline) in enumerate(sorted(turns)):
        hands[pipeline].append(microbatch)
    return hands


class HeterogeneousDataLoader(DataLoader):
    """One epoch of this pipeline's micro-batches of a map-style `dataset`, on `device`; floats take `dtype`.

    Step k of an epoch reads samples [k*G, (k+1)*G) of the data set, or of its permutation by `seed` and epoch where
    `shuffle`, with the global batch G = microbatch_size * sum(num_microbatches). What is left at the end is dropped.
    `steps_per_epoch` optimizer steps are `len(loader)` micro-batches here. Raises ValueError for less than one step.
    """

    def __init__(self, dataset: Dataset, microbatch_size: int, num_microbatches: list[int], pipeline: int,
                 device: torch.device, dtype: torch.dtype, shuffle: bool = False, seed: int = 0,
                 collate_fn: Callable | None = None, num_workers: int = 0):
        self.size, self.total, self.epoch = microbatch_size, sum(num_microbatches), 0
        self.mine = deal_microbatches(num_microbatches)[pipeline]
        self.steps_per_epoch = len(dataset) // (self.size * self.total)
        self.shuffled, self.seed, self.target, self.dtype = shuffle, seed, device, dtype
        if self.steps_per_epoch == 0:
            raise ValueError(f"the data set has {len(dataset)} samples, fewer than a global batch of microbatch_size="
                             f"{self.size} x {self.total} micro-batches: lower these, or take more data")
        super().__init__(dataset, batch_sampler=Places(self), collate_fn=collate_fn, num_workers=num_workers,
                         pin_memory=device.type == "cuda")

    def set_epoch(self, epoch: int) -> None:
        """Another permutation for another epoch, the same on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in super().__iter__():
            yield {name: self.move(value) for name, value in dict(batch).items()}

    def move(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.target, self.dtype if value.is_floating_point() else None, non_blocking=True)


class Places:
    """The indices of each of this pipeline's micro-batches, in the order of its steps."""

    def __init__(self, loader: HeterogeneousDataLoader):
        self.loader = loader

    def __len__(self) -> int:
        return self.loader.steps_per_epoch * len(self.loader.mine)

    def __iter__(self) -> Iterator[list[int]]:
        loader, order = self.loader, range(len(self.loader.dataset))
        if loader.shuffled:
            generator = torch.Generator().manual_seed(loader.seed + loader.epoch)
            order = torch.randperm(len(loader.dataset), generator=generator).tolist()
        for step in range(loader.steps_per_epoch):
            for microbatch in loader.mine:
                first = (step * loader.total + microbatch) * loader.size
                yield list(order[first : first + loader.size])
