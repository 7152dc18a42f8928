"""The loss on the validation split, from a model that no single rank may hold: forward passes through the pipelines.

The pipelines share the micro-batches as they share those of a step, by their numbers of micro-batches. The loss is the
sum over all targets by their number, in float64, so that it does not depend on who computes what.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import process_group_manager as pgm
from dataloader import deal_microbatches
from model import cast_weights_once
from pipeline_parallel import Action
from timeline import timeline
from data.load import select


class Evaluator:
    """Of the model that plugin.configure() returned. All ranks make one together, with the same samples.

    `collate` makes a micro-batch of a list of samples, `criterion(output, batch)` is its mean loss. A mixture of
    experts' router loss is not counted. `num_batches`: only the first so many micro-batches (None: all).
    """

    def __init__(self, plugin, model, samples, collate: Callable, criterion: Callable, num_batches: int | None = None):
        self.plugin, self.model, self.samples, self.collate = plugin, model, samples, collate
        self.criterion, size = criterion, plugin.microbatch_size
        count = min(len(samples), num_batches * size) if num_batches else len(samples)
        microbatches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        turns = deal_microbatches(plugin.num_microbatches)[pgm.process_group_manager.dp_rank]
        self.mine = [each for i, each in enumerate(microbatches) if i % sum(plugin.num_microbatches) in turns]

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for mine in self.mine:  # without a DataLoader, which would draw from the generator of the training
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
            action = Action("F", i)
            communication.post_receive(action, stage.hidden_shape(**batch))
            out = stage(communication.receive(action), **batch)
            communication.send(action, out if isinstance(out, torch.Tensor) else None)
            if grid.pp_is_last_stage:
                chosen, targets = select(out, batch)
                if (count := targets["target_ids"].numel()) > 0:
                    total[0] += self.criterion(chosen, targets).double() * count
                    total[1] += count
        communication.finish()
        return total * (grid.tp_rank == 0)  # the ranks of a tp group have the same loss: count it once
