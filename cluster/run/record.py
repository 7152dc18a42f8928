"""What a run tells of itself: metrics.jsonl and evaluation.jsonl.

A run is worth more than its records: what a full disk does not take is kept in memory, and written once there is room.

metrics.jsonl goes on over several runs of one training: steps count on, and none is there twice. Evaluations have a
file beside it, evaluation.jsonl: {"step": 20, "evaluation_loss": 3.51, "perplexity": 33.4} a line. Where hosts share no
disk, one rank of each writes the rows, so that they outlive the host of the rank that logs. config.json beside them has
the run's id: another run of that name may have left rows of the same steps on a host.
"""

import contextlib
import fnmatch
import json
import math
import os
from typing import NamedTuple

import torch

from metrics import RunLogger, open_metrics, peak_memory_gb
from ranks.disks import CANT_WRITE, Disks
from ranks.files import Rows, replace

METRICS, EVALUATIONS = "metrics.jsonl", "evaluation.jsonl"
BEFORE = "metrics.before{}.jsonl"  # rows of the runs before, until they are in the new file


class Step(NamedTuple):
    """An optimizer step that has just been made."""

    number: int  # from 1 on
    loss: float  # the mean over the global batch
    grad_norm: float  # of the whole model, before it was clipped
    learning_rate: float
    seconds: float


class Record:
    """A RunLogger that goes on after step `start`, and the same rows on the other disks. All ranks make one together.

    `before`: the flags of the run that it goes on from, {} of a new one; like `args`, with its run_id. `last`: the
    Commit of step `start`, where the ranks have it in memory; its row is written where none has written it.
    """

    def __init__(self, args, grid, disks: Disks, num_steps: int, tokens_per_step: int, start: int, before: dict,
                 last=None):
        self.folder = folder = os.path.join(args.log_dir, args.run_name)
        disks = Disks(folder, CANT_WRITE, needs_room=last is None, group=disks.group)  # not those of checkpoints
        is_logging = disks.gather(grid.is_logging_rank)
        writes = grid.is_logging_rank or disks.leads and not any(is_logging[rank] for rank in disks.mine.ranks)
        rows, evaluations, before = [], [], before or vars(args)
        source = os.path.join(before["log_dir"], before["run_name"])  # what goes on may have had another name
        run_ids = {flags.get("run_id") for flags in (vars(args), before)}
        with disks.together():
            if start and writes and not is_of_another_run(source, run_ids):
                rows = read_metrics(source, start, *names_before(source), METRICS)
                evaluations = read_metrics(source, start, EVALUATIONS)
                if rows and os.path.realpath(source) == os.path.realpath(folder):  # room for a new metrics.jsonl
                    name = BEFORE.format(len(names_before(folder)))  # which needs no room on a full disk
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(os.path.join(folder, METRICS), os.path.join(folder, name))
        rows, evaluations = (max(disks.gather(each), key=len) if start else [] for each in (rows, evaluations))
        if last and (not rows or json.loads(rows[-1])["step"] < start):
            rows = [*rows, json.dumps({**last._asdict(), "trained_tokens": start * tokens_per_step}) + "\n"]
        self.evaluated_before = {json.loads(row)["step"] for row in evaluations}
        with disks.together():
            self.logger, self.tokens_per_step = RunLogger(args, grid, num_steps, tokens_per_step), tokens_per_step
            self.logger.memory = torch.tensor(peak_memory_gb())  # of this rank, until a step takes that of all
            self.file = None
            if writes:
                file = self.logger.metrics if grid.is_logging_rank else open_metrics(folder)
                self.file = self.logger.metrics = Rows(file.name, file)
                if not grid.is_logging_rank:
                    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                        json.dump({**vars(args), "topology": grid.topology}, file, indent=2)
                elif start and not rows:
                    print(f"the metrics of the steps up to {start} are on none of these hosts", flush=True)
                self.file.write("".join(rows))
                self.forget_before()
                self.evaluations = Rows(os.path.join(folder, EVALUATIONS))
                with contextlib.suppress(*[OSError] * (last is not None)):
                    if evaluations or os.path.exists(self.evaluations.name):  # those of later steps are made again
                        replace(self.evaluations.name, "".join(evaluations))
        self.num_steps = num_steps

    def forget_before(self) -> None:
        """Once all rows are in metrics.jsonl."""
        for name in [] if self.file.left else names_before(self.folder):
            os.remove(os.path.join(self.folder, name))

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        if self.file and not self.logger.enabled:
            row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                   "trained_tokens": step * self.tokens_per_step, "step_seconds": seconds}
            self.file.write(json.dumps(row) + "\n")

    def is_evaluation_due(self, step: int, every: int) -> bool:
        """Before the first step, after the last one, and after `every` ones (0: never), where none is recorded yet."""
        is_time = step in (0, self.num_steps) or every and step % every == 0
        return bool(is_time) and step not in self.evaluated_before

    def evaluated(self, step: int, loss: float) -> None:
        """Records the evaluation after that step; `loss` is the mean over the evaluation's target tokens."""
        values = {"evaluation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # a larger one is no float
        if self.file:
            self.evaluations.write(json.dumps({"step": step, **values}) + "\n")
        if self.logger.enabled:
            if self.logger.wandb:
                self.logger.wandb.log(values, step=step)
            print(f"evaluation after step {step}: loss {loss:.4f}, perplexity {values['perplexity']:.2f}", flush=True)

    def leave(self) -> None:
        """Closes the files for another Record of this process, which goes on with the same W&B run."""
        if self.file:
            self.file.close()
            self.evaluations.close()
            self.forget_before()

    def close(self) -> None:
        self.logger.close()
        self.leave()


def read_metrics(folder: str, last: int, *names: str) -> list[str]:
    """The lines of the steps up to `last`, each once, in order. A line that is cut off does not count."""
    rows = {}
    for name in names:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if 0 <= (step := json.loads(line)["step"]) <= last and line.endswith("\n"):
                        rows[step] = line
    return [rows[step] for step in sorted(rows)]


def names_before(folder: str) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else ()  # that of a run which goes on here may be gone
    return sorted(name for name in names if fnmatch.fnmatch(name, BEFORE.format("*")))


def is_of_another_run(folder: str, run_ids: set[str | None]) -> bool:
    """Whether config.json in the folder has a run_id, and none of these."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file).get("run_id") not in {None, *run_ids}
    except (OSError, ValueError, AttributeError, TypeError):
        return False
