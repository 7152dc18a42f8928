"""TensorBoard's files: the loss of each step, and what each rank did and used in it. W&B gets the latter, too.

Of each rank: seconds of the step, those that it computed and those that it waited for others or for the network, its
memory, and how busy its CPU and GPU were. What RunLogger writes for W&B is not repeated there.
"""

import os
import resource
import sys
import time

import torch

from training.common import gather
from training.loop import Step
from training.machine_facts import home_rank, is_home
from training.record import perplexity


class Board:
    """Writes to `folder`, on home_rank(), what all ranks send it. Without TensorBoard it writes nothing and says so.

    A run that is resumed goes on after step `start`.
    """

    def __init__(self, folder: str, device: torch.device, start: int = 0):
        self.device, self.writer, self.busy = device, None, time.process_time()
        if not is_home():
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder, purge_step=start + 1 if start else None)
        except ImportError:
            print("no TensorBoard files: pip install tensorboard. metrics.jsonl has the losses", flush=True)

    def log(self, step: Step, tokens: int, evaluation: float | None = None, sample: str | None = None) -> None:
        """`tokens`: of the step, on all ranks. Collective.

        `evaluation`: the loss of an evaluation after this step. `sample`: a text of the model's; home_rank() has it.
        """
        everyone, samples = zip(*gather((self.values_of_this_rank(step), sample)))
        sample = samples[home_rank()]
        self.log_to_wandb(step.number, everyone, sample)
        if self.writer is None:
            return
        if evaluation is not None:
            self.writer.add_scalar("evaluation_loss", evaluation, step.number)
            self.writer.add_scalar("perplexity", perplexity(evaluation), step.number)
        if sample is not None:
            self.writer.add_text("sample", sample, step.number)
        for name in ("loss", "grad_norm", "learning_rate"):
            self.writer.add_scalar(name, getattr(step, name), step.number)
        self.writer.add_scalar("tokens_per_second", tokens / step.seconds, step.number)
        for rank, values in enumerate(everyone):
            for name, value in values.items():
                self.writer.add_scalar(f"{name}/rank{rank}", value, step.number)

    def log_to_wandb(self, number: int, everyone: tuple[dict[str, float], ...], sample: str | None) -> None:
        """In the process that has a run of W&B: that of the rank that logs, with --use_wandb."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            values = {f"{name}/rank{rank}": value for rank, each in enumerate(everyone) for name, value in each.items()}
            run.log(values if sample is None else {**values, "sample": sample}, step=number)

    def values_of_this_rank(self, step: Step) -> dict[str, float]:
        """Seconds, gigabytes, and percent: 100 percent of the CPU is one core. What is unknown is left out."""
        busy_before, self.busy = self.busy, time.process_time()
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        values = {"step_seconds": step.seconds, "cpu_memory_gb": peak / 1e9,
                  "cpu_percent": 100 * (self.busy - busy_before) / step.seconds}
        if step.compute_seconds is not None:
            values["compute_seconds"] = step.compute_seconds
            values["wait_seconds"] = max(step.seconds - step.compute_seconds, 0.0)
        if self.device.type == "cuda":
            values["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            try:
                values["gpu_percent"] = float(torch.cuda.utilization(self.device))
            except (ImportError, RuntimeError):
                pass  # it needs the package nvidia-ml-py
        return values

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            print(f"TensorBoard: tensorboard --logdir {os.path.dirname(self.writer.log_dir)}", flush=True)
