"""What a run tells of itself: metrics.jsonl, evaluation.jsonl, TensorBoard's curves, a bar or lines while it trains.

A run is worth more than its records: what a full disk does not take is kept in memory, and written once there is room.

metrics.jsonl goes on over several runs of one training: steps count on, and none is there twice. Evaluations have a
file beside it, evaluation.jsonl: {"step": 20, "evaluation_loss": 3.51, "perplexity": 33.4} a line. Each rank keeps all
rows in memory, with seconds by its own clock, and each checkpoint has those up to its step, so whoever goes on from
there has them. Where hosts share no disk, one rank of each writes these files. config.json beside them has the run's
id: the folder of another run of that name gets another name.

Whoever writes the rows of a disk writes TensorBoard's files beside them: the same numbers, samples of text, and what
each rank did and used in a step, by the names in times.py. W&B gets all of this, too, in the run of the rank that logs.
A run that goes on adds a file, whose curves go on after the step that it goes on from.
"""

import atexit
import contextlib
import fcntl
import glob
import json
import math
import os
import socket
import sys
import time

import torch

from metrics import RunLogger, open_metrics, peak_memory_gb
from ranks.disks import CANT_WRITE, Disks
from ranks.files import read_json
from ranks.placement import machines
from ranks.progress import Bar
from run.times import ABSENT, USED
from utils import UserError

METRICS, EVALUATIONS = "metrics.jsonl", "evaluation.jsonl"
NO_CURVES = ("step", "trained_tokens", "tokens_per_second_per_rank", "memory_gb", "step_seconds")  # of a row


class Record:
    """What a training tells of itself after step `start`. All ranks make one together.

    `lines`: the rows of the steps before, JSON, in their order; those of the steps that follow are added to this list.
    `is_in_memory`: the ranks go on with what they hold, also where a disk is full.
    """

    def __init__(self, args, grid, disks: Disks, num_steps: int, tokens_per_step: int, start: int, lines: list[str],
                 is_in_memory: bool):
        self.folder, self.lines = os.path.join(args.log_dir, args.run_name), lines
        self.on_disk, self.sinks = [], []
        if args.use_wandb:  # one run of W&B for all parts of this one
            os.environ.setdefault("WANDB_RUN_ID", args.run_id)
            os.environ.setdefault("WANDB_RESUME", "allow")
            if not grid.is_logging_rank and "wandb" in sys.modules:  # as it was: the next one begins after gather()
                with contextlib.suppress(Exception):  # of many classes
                    sys.modules["wandb"].finish()
        disks = Disks(self.folder, CANT_WRITE, not is_in_memory, disks.group)  # not those of the checkpoints
        is_logging = disks.gather(grid.is_logging_rank)
        has_logging_rank = any(is_logging[rank] for rank in disks.mine)
        self.writes = grid.is_logging_rank if has_logging_rank else disks.leads
        self.evaluated_before = {row["step"] for row in map(json.loads, lines) if "evaluation_loss" in row}
        with disks.together(CANT_WRITE):
            if self.writes and lines:
                self.empty_own(args.run_id)
            self.logger = RunLogger(args, grid, num_steps, tokens_per_step)  # which takes the folder for this run
            self.logger.memory = torch.tensor(peak_memory_gb())  # of this rank, until a step takes that of all
            if self.writes:
                self.open(args, grid, start)
        self.bar = Bar(grid.is_logging_rank, start, num_steps)
        self.hosts = " | ".join(f"rank {rank}: {host}" for rank, (host, _) in enumerate(machines()))

    def empty_own(self, run_id: str) -> None:
        """Where the metrics in the folder are this run's own, takes the rows out, so that they have room to be written
        anew, without those of steps that are made again. From a run in progress nothing is taken: open_metrics says so.
        """
        with contextlib.suppress(OSError, UserError):
            if read_json(os.path.join(self.folder, "config.json"), lambda config: config["run_id"]) == run_id:
                with open(os.path.join(self.folder, METRICS), "r+") as metrics:
                    fcntl.flock(metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    metrics.truncate()

    def open(self, args, grid, start: int) -> None:
        """The sinks of a rank that writes. They begin with what is known of the steps before."""
        metrics = self.logger.metrics if grid.is_logging_rank else open_metrics(self.folder)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(evaluations := os.path.join(self.folder, EVALUATIONS), 0)  # as empty as the metrics
        self.on_disk = [Rows(metrics.name, "loss", self.lines, metrics),
                        Rows(evaluations, "evaluation_loss", self.lines),
                        Board(self.folder, start, self.lines)]
        if not grid.is_logging_rank:
            with open(os.path.join(self.folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump({**vars(args), "topology": grid.topology}, file, indent=2)
            return
        if start and not self.lines:
            print(f"the checkpoint of step {start} has no metrics of the steps before", flush=True)
        if self.logger.wandb:
            self.sinks.append(Wandb(self.folder, self.logger.wandb, self.lines))
        self.logger.metrics, self.logger.wandb = open(os.devnull, "w"), None  # it prints, and the sinks have the rows

    def add(self, row: dict) -> None:
        """Keeps another row, and shows it."""
        self.lines.append(json.dumps(row) + "\n")
        self.show(row["step"], row)

    def show(self, step: int, values: dict[str, float | str]) -> None:
        """In TensorBoard and in W&B; a row in the files, too."""
        for sink in (*self.on_disk, *self.sinks):
            sink.show(step, values)

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        with self.bar.end(step):
            self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        speed = self.logger.tokens_per_step / seconds
        self.bar.tell(loss=f"loss {loss:.4f}", speed=f"{speed:,.0f} tokens/s")
        self.add({"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                  "trained_tokens": step * self.logger.tokens_per_step, "tokens_per_second": speed,
                  "tokens_per_second_per_rank": speed / self.logger.world_size,
                  "memory_gb": self.logger.memory.item(), "step_seconds": seconds})

    def used(self, step: int, of_ranks: list[list[float]]) -> None:
        """What each rank did and used in a step: its seconds of forward and backward, then what USED names."""
        self.show(step, {f"{name}/rank{rank}": value for rank, (_, *values) in enumerate(of_ranks)
                         for name, value in zip(USED, values) if value != ABSENT})
        if self.hosts:  # once
            self.show(step, {"hosts": self.hosts})
            self.hosts = None

    def is_evaluation_due(self, step: int, every: int) -> bool:
        """Before the first step, after the last one, and after `every` ones (0: never), where none is recorded yet."""
        is_time = step in (0, self.logger.num_steps) or every and step % every == 0
        return bool(is_time) and step not in self.evaluated_before

    def evaluated(self, step: int, loss: float) -> None:
        """Records the evaluation after that step; `loss` is the mean over the evaluation's target tokens."""
        perplexity = math.exp(min(loss, 700.0))  # a larger one is no float
        self.add({"step": step, "evaluation_loss": loss, "perplexity": perplexity})
        self.bar.tell(evaluation=f"evaluation {loss:.4f}")
        if self.logger.enabled:
            print(f"evaluation after step {step}: loss {loss:.4f}, perplexity {perplexity:.2f}", flush=True)

    def sampled(self, step: int, text: str) -> None:
        """Records what the model wrote after that step."""
        self.show(step, {"sample": text})
        if self.logger.enabled:
            print(f"sample after step {step}: {text!r}", flush=True)

    def leave(self) -> None:
        """Closes the files for another Record of this process, which goes on with the same W&B run."""
        self.bar.close(stays=False)
        atexit.unregister(self.leave)
        while self.on_disk:
            self.on_disk.pop().close()

    def close(self) -> None:
        self.bar.close(stays=True)
        self.leave()
        for sink in self.sinks:
            sink.close()
        if self.logger.enabled:
            print(f"metrics: {os.path.join(self.folder, METRICS)}", flush=True)


class Rows:
    """A file of those rows that have a `key`: of `lines` first, then one at a time. It outlives a full disk: that is
    said once, and each later row tries again.

    `file`: where it is open already; else the first row opens it.
    """

    def __init__(self, name: str, key: str, lines: list[str], file=None):
        self.name, self.key, self.file, self.is_full = name, key, file, False
        self.left = "".join(line for line in lines if key in json.loads(line)).encode()
        self.write()

    def show(self, step: int, values: dict[str, float | str]) -> None:
        if self.key in values:
            self.left += (json.dumps(values) + "\n").encode()
            self.write()

    def write(self) -> None:
        try:
            while self.left:  # a disk that is nearly full takes a part of it
                self.file = self.file or open(self.name, "ab", buffering=0)
                self.left = self.left[os.write(self.file.fileno(), self.left):]
            self.is_full = False
        except OSError as error:
            if not self.is_full:
                print(f"{self.name}: {error.strerror}: the run goes on, and what it can't write there is written once "
                      "there is room", flush=True)
            self.is_full = True

    def close(self) -> None:
        self.write()
        if self.left:
            print(f"{self.name}: the disk is full still, so the last rows are lost, {len(self.left)} bytes: make room, "
                  "or choose another --log_dir", flush=True)
        if self.file:
            with contextlib.suppress(OSError):  # of a disk in the network, which may say so now only
                self.file.close()


class Wandb:
    """The `run` of W&B. It gets those of the rows `lines` that it lacks: an offline one is a folder by itself."""

    def __init__(self, folder: str, run, lines: list[str]):
        self.folder, self.run = folder, run
        for row in map(json.loads, lines):
            if row["step"] >= run.step:
                run.log(row, step=row["step"])

    def show(self, step: int, values: dict[str, float | str]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        try:
            self.run.finish()
        except Exception as error:  # in many classes: the training has been made all the same
            print(f"W&B's run did not end well ({error}): make room in {self.folder}, `wandb sync` uploads the rest",
                  flush=True)


class Board:
    """TensorBoard's files in `folder`, for a run that goes on after step `start`.

    `lines`: the rows of the steps before, for a disk that has no curves of these. Where tensorboard is missing or the
    disk does not take an event, this says so once and writes no more: metrics.jsonl has the losses.
    """

    def __init__(self, folder: str, start: int, lines: list[str]):
        self.folder, self.start, self.lines, self.records, self.has_ended = folder, start, [*lines], None, False

    def open(self) -> None:
        """At the first event: a run that has made all steps before leaves no file."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        stem = os.path.join(self.folder, "events.out.tfevents.")
        has_curves = bool(glob.glob(f"{glob.escape(stem)}*"))
        self.records = RecordWriter(open(f"{stem}{time.time_ns()}.{socket.gethostname()}.{os.getpid()}", "wb"))
        self.write(file_version="brain.Event:2")
        self.write(step=self.start and self.start + 1, session_log=SessionLog(status=SessionLog.START))
        for row in () if has_curves else map(json.loads, self.lines):
            self.show(row["step"], row)
        self.lines = ()

    @contextlib.contextmanager
    def ending_at_an_error(self):
        try:
            yield
        except (ImportError, OSError) as error:
            remedy = "pip install tensorboard" if isinstance(error, ImportError) else (
                f"make room in {self.folder}, and start anew")
            print(f"no more curves for TensorBoard ({error}): {remedy}. metrics.jsonl has the losses", flush=True)
            self.close()

    def write(self, **fields) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.records.flush()

    def show(self, step: int, values: dict[str, float | str]) -> None:
        """Numbers and texts, by name, after optimizer step `step`."""
        if self.has_ended:
            return
        with self.ending_at_an_error():
            if self.records is None:
                self.open()
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard.summary import scalar, text

            parts = [(text if isinstance(value, str) else scalar)(name, value) for name, value in values.items()
                     if name not in NO_CURVES]
            self.write(step=step, summary=Summary(value=[each for part in parts for each in part.value]))

    def close(self) -> None:
        self.has_ended = True
        with contextlib.suppress(OSError):  # of a full disk, of which show() has told
            if self.records:
                self.records.close()
