"""Pipelines that take unlike numbers of samples of a step, whether or not these make whole micro-batches.

With micro-batches of at most 4 samples, a pipeline that takes 10 of a step's 17 has micro-batches of 4, 3 and 3, and
one that takes 7 has two of 4 and 3. The mean loss of a micro-batch of n samples weighs n / 17, so each sample counts
once, and the gradients are those of one process that takes all 17.

The executor sums criterion / M over the step's M micro-batches, so the plugin multiplies each mean with n M / 17, which
is 1 where all micro-batches are alike. Where rows have unlike numbers of targets, data/batches.py has weighted the mean
before: against the mean over the step's samples, whatever the sizes of its micro-batches.

Where machines become slower or faster while a run trains, samples move from one pipeline to another: see rebalance().
"""

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch

import process_group_manager as pgm
from dataloader import deal_microbatches
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from models.loss import has_router_loss
from planning.rebalancing import EARLY, Rebalancing
from ranks.collectives import say


class SamplesPlugin(HeterogeneousParallelPlugin):
    """The plugin of step 9, whose pipelines take numbers of samples. `microbatch_size` is that of the largest ones."""

    optimizer_class = torch.optim.AdamW
    unfinished = None  # what a step has left that could not be made, see local_steps.py
    rebalancing: Rebalancing | None = None  # None: the samples stay where they are

    def set_pipelines(self, pipelines: list, samples: list[int]) -> None:
        super().set_pipelines(pipelines, [-(-count // self.microbatch_size) for count in samples])
        self.deal(samples)

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

    def own_microbatches(self) -> list[range]:
        """Which of a step's samples this pipeline's micro-batches have, in order."""
        places, sizes = deal_microbatches(self.num_microbatches), [0] * sum(self.num_microbatches)
        for count, mine in zip(self.samples, places):
            for i, place in enumerate(mine):
                sizes[place] = -(-(count - i) // len(mine))
        ends = [0, *itertools.accumulate(sizes)]
        return [range(ends[place], ends[place + 1]) for place in places[pgm.process_group_manager.dp_rank]]

    def batches(self, dataset, collate: Callable, first_step: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """This pipeline's micro-batches from a step on, as they are dealt when each step begins.

        The samples of a step follow those of the step before. `collate` makes a micro-batch of a list of them. They are
        read in this process and never ahead.
        """
        size = self.global_batch_size
        for first in range(first_step * size, len(dataset) - size + 1, size):
            for those in self.own_microbatches():
                batch = collate([dataset[first + i] for i in those])
                yield {name: self.on_device(value) for name, value in batch.items()}

    def rebalance(self, args, step: int, agreement) -> None:
        """Moves samples where that is decided. Call it after each step, on all ranks.

        Each rank measures anyway how many seconds of a step it computes, and at the end of each step all tell each
        other: `agreement`. So all ranks decide the same from the same numbers, without another message, and nothing is
        sent: each pipeline reads other samples from the next step on.
        """
        if self.rebalancing is None:
            return
        before, work = self.samples, [numbers[0] for numbers in agreement.of_ranks]
        if after := self.rebalancing.follow(step, agreement.longest_step, [
                [max(work[rank] for rank in row) for row in block.tolist()]
                for block in pgm.process_group_manager.ranks]):
            old, new = (",".join(map(str, samples)) for samples in (before, after))
            say(f"after step {step} work moves to faster machines: samples {old} -> {new}")
            self.deal(after)
            args.num_microbatches, args.samples = [self.num_microbatches], after

    def before_saving(self, model, optimizer) -> None:
        """What pipelines do before a checkpoint is saved: one of them has all that is saved."""

    def on_device(self, value: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":  # from pinned memory, the copy overlaps with computing
            value = value.pin_memory()
        dtype = self.master_dtype if value.is_floating_point() else None
        return value.to(self.device, dtype, non_blocking=True)

    def execute_pipeline(self, data_iter: Iterator[dict], model, criterion: Callable, *others, **options):
        def of_samples(output, batch) -> torch.Tensor:
            count = len(batch["input_ids"])
            return criterion(output, batch) * (count * sum(self.num_microbatches) / self.global_batch_size)

        return super().execute_pipeline(data_iter, model, of_samples, *others, **options)


def add_replan_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replan", choices=["auto", "off"],
                        help="auto: where machines become slower or faster, samples move while the run trains "
                             "(default: auto, but what --num_microbatches says stays)")


def rebalancing_of(args, layout, config) -> Rebalancing | None:
    """Decides when samples move between pipelines while a run trains; None where they stay. `config`: the model's."""
    keeps_all = layout.setting.schedule == "afab"
    has_own_sizes = args.local_steps and args.num_microbatches
    stay = args.equal_shares or keeps_all or has_router_loss(config) or has_own_sizes
    is_asked, is_default = args.replan == "auto", args.replan is None and not args.num_microbatches
    if len(layout.samples) > 1 and not stay and (is_asked or is_default):
        unit = layout.samples[0] // layout.local_steps[0] if layout.local_steps else 1
        early = 1 if layout.local_steps and args.local_steps > EARLY else EARLY  # in rounds of so many steps
        return Rebalancing(layout.samples, layout.micro_batch_size, unit, early)
    if is_asked:
        say("--replan auto: nothing can move here. Samples move between pipelines, but not with --pp_engine afab, "
            "which keeps the activations of all, nor with the loss of a router, --equal_shares, or local steps "
            "of which --num_microbatches says the size")
    return None
