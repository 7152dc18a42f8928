"""metrics.jsonl over several runs of one training: steps count on, and none is there twice.

Evaluations have a file beside it, evaluation.jsonl: {"step": 20, "evaluation_loss": 3.51, "perplexity": 33.4} a line.
Where hosts share no disk, one rank of each writes the rows, so that they outlive the host of the rank that logs.
config.json beside them has the run's id: another run of that name may have left rows of the same steps on a host.
"""

import contextlib
import io
import json
import math
import os

from metrics import RunLogger, open_metrics, peak_memory_gb
from checkpoints.disks import Disks
from training.progress import Progress

EVALUATIONS = "evaluation.jsonl"
BEFORE = "metrics.before.jsonl"  # rows of the runs before, until they are in the new file


class Record:
    """A RunLogger that goes on after step `start`, and the same rows on the other disks. All ranks make one together.

    `before`: the flags of the run that it goes on from; like `args`, with its run_id.
    """

    def __init__(self, args, grid, disks: Disks, num_steps: int, tokens_per_step: int, start: int,
                 before: dict | None):
        folder = source = os.path.join(args.log_dir, args.run_name)
        is_logging = disks.gather(grid.is_logging_rank)
        writes = grid.is_logging_rank or disks.leads and not any(is_logging[rank] for rank in disks.mine.ranks)
        rows, evaluations = [], []
        if before:  # the training that goes on may have had another name
            source = os.path.join(before["log_dir"], before["run_name"])
        if start and writes and not is_of_another_run(source, {flags.get("run_id") for flags in (vars(args), before)}):
            rows, evaluations = read_rows(source, start), read_rows(source, start, (EVALUATIONS,))
            if os.path.realpath(source) == os.path.realpath(folder):
                set_aside(folder)
        rows, evaluations = (max(disks.gather(each), key=len) if start else [] for each in (rows, evaluations))
        self.logger, self.tokens_per_step = RunLogger(args, grid, num_steps, tokens_per_step), tokens_per_step
        self.logger.memory, self.file = peak_memory_gb(), None  # of this rank, until a step takes that of all
        if writes:
            self.file = self.logger.metrics if grid.is_logging_rank else open_metrics(folder)
            if not grid.is_logging_rank:
                with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                    json.dump({**vars(args), "topology": grid.topology}, file, indent=2)
            elif start and not rows:
                print(f"the metrics of the steps up to {start} are on none of these hosts", flush=True)
            self.file.writelines(rows)
            if start and os.path.exists(path := os.path.join(folder, BEFORE)):
                os.remove(path)
            self.evaluations = os.path.join(folder, EVALUATIONS)
            if evaluations or os.path.exists(self.evaluations):  # those of later steps are made again
                with open(self.evaluations, "w", encoding="utf-8") as file:
                    file.writelines(evaluations)
        self.progress = Progress(num_steps, start, grid.is_logging_rank)

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        with contextlib.redirect_stdout(io.StringIO()) if self.progress.is_bar else contextlib.nullcontext():
            self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        self.progress.step(step, loss, self.tokens_per_step / seconds)
        if self.file and not self.logger.enabled:
            row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                   "trained_tokens": step * self.tokens_per_step, "step_seconds": seconds}
            self.file.write(json.dumps(row) + "\n")

    def evaluated(self, step: int, loss: float) -> None:
        """Records the evaluation after that step; `loss` is the mean over the evaluation's target tokens."""
        values = {"evaluation_loss": loss, "perplexity": perplexity(loss)}
        if self.file:
            with open(self.evaluations, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        if self.logger.enabled:
            self.progress.evaluated(loss)
            if self.logger.wandb:
                self.logger.wandb.log(values, step=step)
            print(f"evaluation after step {step}: loss {loss:.4f}, perplexity {values['perplexity']:.2f}", flush=True)

    def close(self) -> None:
        self.progress.close()
        self.logger.close()
        if self.file and not self.logger.enabled:
            self.file.close()


def perplexity(loss: float) -> float:
    """exp(loss): among so many equally likely tokens the model would be as uncertain."""
    return math.exp(min(loss, 700.0))  # a larger one is no float


def read_rows(folder: str, last: int, names: tuple[str, ...] = (BEFORE, "metrics.jsonl")) -> list[str]:
    """The lines of the steps up to `last`, each once, in order. A line that is cut off does not count."""
    rows = {}
    for name in names:
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = file.readlines()
        except OSError:
            continue
        for line in lines:
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if line.endswith("\n") and 0 <= step <= last:
                rows[step] = line
    return [rows[step] for step in sorted(rows)]


def is_of_another_run(folder: str, run_ids: set[str | None]) -> bool:
    """Whether config.json in the folder has a run_id, and none of these."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file).get("run_id") not in {None, *run_ids}
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def set_aside(folder: str) -> None:
    """Makes room for a new metrics.jsonl. The old rows stay in BEFORE until then."""
    old, before = os.path.join(folder, "metrics.jsonl"), os.path.join(folder, BEFORE)
    if not os.path.exists(old):
        return
    kept = read_rows(folder, 1 << 60)
    with open(f"{before}.unfinished", "w", encoding="utf-8") as file:
        file.writelines(kept)
    os.replace(f"{before}.unfinished", before)
    os.remove(old)
