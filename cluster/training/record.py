"""metrics.jsonl over several runs of one training: steps count on, and none is there twice.

Where hosts share no disk, one rank of each writes the rows, so that they outlive the host of the rank that logs.
"""

import json
import os

from metrics import RunLogger, open_metrics, peak_memory_gb
from training.disks import Disks

BEFORE = "metrics.before.jsonl"  # rows of the runs before, until they are in the new file


class Record:
    """A RunLogger that goes on after step `start`, and the same rows on the other disks. All ranks make one together.

    `before`: the flags of the run that it goes on from.
    """

    def __init__(self, args, grid, disks: Disks, num_steps: int, tokens_per_step: int, start: int,
                 before: dict | None):
        folder = source = os.path.join(args.log_dir, args.run_name)
        is_logging = disks.gather(grid.is_logging_rank)
        writes = grid.is_logging_rank or disks.leads and not any(is_logging[rank] for rank in disks.mine.ranks)
        rows = []
        if before:  # the training that goes on may have had another name
            source = os.path.join(before["log_dir"], before["run_name"])
        if start and writes:
            rows = read_rows(source, start)
            if os.path.realpath(source) == os.path.realpath(folder):
                set_aside(folder)
        rows = max(disks.gather(rows), key=len) if start else []
        self.logger, self.tokens_per_step = RunLogger(args, grid, num_steps, tokens_per_step), tokens_per_step
        self.logger.memory, self.file = peak_memory_gb(), None  # of this rank, until a step takes that of all
        if writes:
            self.file = self.logger.metrics if grid.is_logging_rank else open_metrics(folder)
            self.file.writelines(rows)
            if start and os.path.exists(path := os.path.join(folder, BEFORE)):
                os.remove(path)

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        if self.file and not self.logger.enabled:
            row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                   "trained_tokens": step * self.tokens_per_step, "step_seconds": seconds}
            self.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self.logger.close()
        if self.file and not self.logger.enabled:
            self.file.close()


def read_rows(folder: str, last: int) -> list[str]:
    """The lines of the steps up to `last`, each once, in order. A line that is cut off does not count."""
    rows = {}
    for name in (BEFORE, "metrics.jsonl"):
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
            if line.endswith("\n") and 0 < step <= last:
                rows[step] = line
    return [rows[step] for step in sorted(rows)]


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
