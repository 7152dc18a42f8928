"""Pipelines that take unlike numbers of samples of a step, whether or not these make whole micro-batches.

With micro-batches of at most 4 samples, a pipeline that takes 10 of a step's 17 has micro-batches of 4, 3 and 3, and
one that takes 7 has two of 4 and 3. The mean loss of a micro-batch of n samples weighs n / 17, so each sample counts
once, and the gradients are those of one process that takes all 17.

The executor sums criterion / M over the step's M micro-batches, so the plugin multiplies each mean with n M / 17, which
is 1 where all micro-batches are alike. Where rows have unlike numbers of targets, data/batches.py has weighted the mean
before: against the mean over the step's samples, whatever the sizes of its micro-batches.
"""

import itertools
from collections.abc import Callable, Iterator
from zlib import crc32

import torch

import process_group_manager as pgm
from dataloader import MicroBatches, deal_microbatches
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin


class SamplesPlugin(HeterogeneousParallelPlugin):
    """The plugin of step 9, whose pipelines take numbers of samples. `microbatch_size` is that of the largest ones.

    After set_pipelines each pipeline has whole micro-batches; deal() changes that.
    """

    def set_pipelines(self, pipelines: list, num_microbatches) -> None:
        super().set_pipelines(pipelines, num_microbatches)
        self.deal([self.microbatch_size * count for count in self.num_microbatches])

    def deal(self, samples: list[int]) -> None:
        """From the next optimizer step on, pipeline k takes samples[k] of its samples, in micro-batches of sizes that
        differ by one at most. Call it on all ranks with the same numbers, between two steps: a step's samples, all of
        them together, stay the same as long as the sum does. No message is sent.
        """
        assert len(samples) == len(self.pipelines) and min(samples) > 0, f"{samples} of {len(self.pipelines)} pipelines"
        self.samples, self.global_batch_size = list(samples), sum(samples)
        self.num_microbatches = [-(-count // self.microbatch_size) for count in samples]
        own = pgm.process_group_manager.dp_rank
        self.own_num_microbatches, self.train_batch_size = self.num_microbatches[own], samples[own]

    def own_microbatches(self) -> list[tuple[int, range]]:
        """Of a step: which of all its micro-batches this pipeline takes, in order, and which samples these have."""
        places, sizes = deal_microbatches(self.num_microbatches), [0] * sum(self.num_microbatches)
        for count, mine in zip(self.samples, places):
            for i, place in enumerate(mine):
                sizes[place] = -(-(count - i) // len(mine))
        ends = [0, *itertools.accumulate(sizes)]
        return [(place, range(ends[place], ends[place + 1])) for place in places[pgm.process_group_manager.dp_rank]]

    def prepare_dataloader(self, dataset, shuffle: bool = False, seed: int = 0,
                           collate_fn: Callable | None = None) -> "SamplesLoader":
        self.require_pipelines("prepare_dataloader")
        return SamplesLoader(self, dataset, shuffle, seed, collate_fn)

    def execute_pipeline(self, data_iter: Iterator[dict], model, criterion: Callable, *others, **options):
        def of_samples(output, batch) -> torch.Tensor:
            count = len(batch["input_ids"])
            return criterion(output, batch) * (count * sum(self.num_microbatches) / self.global_batch_size)

        return super().execute_pipeline(data_iter, model, of_samples, *others, **options)


class SamplesLoader:
    """Iterates over this pipeline's micro-batches as the plugin deals them when a step begins, from `first_step` on.

    Otherwise as HeterogeneousDataLoader. It reads in this process and never ahead.
    """

    def __init__(self, plugin: SamplesPlugin, dataset, shuffle: bool, seed: int, collate_fn: Callable | None):
        self.plugin, self.microbatches, self.num_samples = plugin, MicroBatches(dataset, collate_fn), len(dataset)
        self.shuffle, self.seed, self.first_step = shuffle, seed, 0
        self.steps_per_epoch = self.num_samples // plugin.global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the samples of each step in that epoch."""
        self.epoch, self.order = epoch, torch.arange(self.num_samples)
        if self.shuffle:
            self.order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.first_step, self.steps_per_epoch):
            first = step * self.plugin.global_batch_size
            for place, those in self.plugin.own_microbatches():
                numbers = self.order[first + those.start : first + those.stop].tolist()
                batch = self.microbatches[crc32(f"{self.seed} {self.epoch} {(step, place)}".encode()), numbers]
                yield {name: self.on_device(value) for name, value in batch.items()}

    def on_device(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if self.plugin.device.type == "cuda":  # from pinned memory, the copy overlaps with computing
            value = value.pin_memory()
        dtype = self.plugin.master_dtype if value.is_floating_point() else None
        return value.to(self.plugin.device, dtype, non_blocking=True)
