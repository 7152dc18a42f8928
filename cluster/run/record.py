"""What a run tells of itself: metrics.jsonl, evaluation.jsonl, TensorBoard's curves, a bar or lines while it trains.

A run is worth more than its records: what a full disk does not take is kept in memory, and written once there is room.

metrics.jsonl goes on over several runs of one training: steps count on, and none is there twice. Evaluations have a
file beside it, evaluation.jsonl: {"step": 20, "evaluation_loss": 3.51, "perplexity": 33.4} a line. Where hosts share no
disk, one rank of each writes the rows, so that they outlive the host of the rank that logs. config.json beside them has
the run's id: another run of that name may have left rows of the same steps on a host.

Whoever writes the rows of a disk writes TensorBoard's files beside them: the same numbers, samples of text, and what
each rank did and used in a step, by the names in times.py. W&B gets all of this, too, in the run of the rank that logs.
A run that goes on adds a file, whose curves go on after the step that it goes on from.
"""

import contextlib
import fcntl
import fnmatch
import glob
import json
import math
import os
import socket
import sys
import time
from typing import NamedTuple

import torch

from metrics import RunLogger, open_metrics, peak_memory_gb
from ranks.disks import CANT_WRITE, Disks
from ranks.files import Rows, replace
from ranks.placement import machines
from ranks.progress import Bar
from run.times import ABSENT, USED
from utils import UserError

METRICS, EVALUATIONS = "metrics.jsonl", "evaluation.jsonl"
KEPT = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "evaluation_loss", "perplexity")  # as curves
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

    `before`: the flags of the run that it goes on from, {} of a new one; like `args`, with its run_id. `branches`: this
    is another run than that. `last`: the Commit of step `start`, where the ranks have it in memory; its row is written
    where none has written it.
    """

    def __init__(self, args, grid, disks: Disks, num_steps: int, tokens_per_step: int, start: int, before: dict,
                 branches: bool = False, last=None):
        self.folder = folder = os.path.join(args.log_dir, args.run_name)
        self.tokens_per_step, self.num_steps = tokens_per_step, num_steps
        disks = Disks(folder, CANT_WRITE, needs_room=last is None, group=disks.group)  # not those of checkpoints
        is_logging = disks.gather(grid.is_logging_rank)
        self.writes = grid.is_logging_rank or disks.leads and not any(is_logging[rank] for rank in disks.mine)
        if args.use_wandb:  # one run of W&B for all parts of this one
            os.environ.setdefault("WANDB_RUN_ID", args.run_id)
            os.environ.setdefault("WANDB_RESUME", "allow")
            if not grid.is_logging_rank and "wandb" in sys.modules:  # as it was: the next one begins after collect()
                with contextlib.suppress(Exception):  # of many classes
                    sys.modules["wandb"].finish()
        is_of_it, rows, evaluations = self.collect(args, before or vars(args), start, disks)
        if last and (not rows or json.loads(rows[-1])["step"] < start):
            rows = [*rows, json.dumps({**last._asdict(), "trained_tokens": start * tokens_per_step}) + "\n"]
        self.evaluated_before = {json.loads(row)["step"] for row in evaluations}
        self.file = self.board = None
        with disks.together(CANT_WRITE):
            if is_of_it and rows and not branches:
                self.make_room()
            self.logger = RunLogger(args, grid, num_steps, tokens_per_step)  # which takes the folder for this run
            self.logger.memory = torch.tensor(peak_memory_gb())  # of this rank, until a step takes that of all
            if self.writes:
                self.write(args, grid, rows, evaluations, start, is_in_memory=last is not None)
        self.bar = Bar(grid.is_logging_rank, start, num_steps)
        self.hosts = " | ".join(f"rank {rank}: {host}" for rank, (host, _) in enumerate(machines()))

    def collect(self, args, before: dict, start: int, disks: Disks) -> tuple[bool, list[str], list[str]]:
        """Whether this rank's folder is that of the run that it goes on from, which may have had another name; and that
        run's rows up to step `start`, metrics and evaluations, of the disk with most of them. Only reads. Collective.
        """
        source, is_of_it, rows, evaluations = os.path.join(before["log_dir"], before["run_name"]), False, [], []
        with disks.together():
            if start and self.writes and not is_of_another_run(source, {args.run_id, before.get("run_id")}):
                rows = read_metrics(source, start, *names_before(source), METRICS)
                evaluations = read_metrics(source, start, EVALUATIONS)
                is_of_it = os.path.realpath(source) == os.path.realpath(self.folder)
        return is_of_it, *(max(disks.gather(each), key=len) for each in (rows, evaluations))

    def make_room(self) -> None:
        """Gives this run's old metrics.jsonl another name, once nobody else writes there; that needs no room on a full
        disk. Raises UserError, as open_metrics does, where a run in progress has it."""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, METRICS)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"a run in progress writes to {self.folder} ({error.strerror}): choose another "
                                "--run_name or --log_dir") from None
            os.rename(file.name, os.path.join(self.folder, BEFORE.format(len(names_before(self.folder)))))

    def write(self, args, grid, rows: list[str], evaluations: list[str], start: int, is_in_memory: bool) -> None:
        """Writes what is known of the steps before, and opens the files for those that follow."""
        self.board = Board(self.folder, start, [*rows, *evaluations])
        file = self.logger.metrics if grid.is_logging_rank else open_metrics(self.folder)
        self.file = self.logger.metrics = Rows(file.name, file)
        if not grid.is_logging_rank:
            with open(os.path.join(self.folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump({**vars(args), "topology": grid.topology}, file, indent=2)
        elif start and not rows:
            print(f"the metrics of the steps up to {start} are on none of these hosts", flush=True)
        self.file.write("".join(rows))
        self.forget_before()
        self.evaluations = Rows(os.path.join(self.folder, EVALUATIONS))
        with contextlib.suppress(*[OSError] * is_in_memory):
            if evaluations or os.path.exists(self.evaluations.name):  # those of later steps are made again
                replace(self.evaluations.name, "".join(evaluations))
        if self.logger.enabled and self.logger.wandb:  # an offline run is a folder by itself, which needs them all
            for row in sorted(map(json.loads, [*rows, *evaluations]), key=lambda row: row["step"]):
                if row["step"] >= self.logger.wandb.step:
                    self.logger.wandb.log(row, step=row["step"])

    def forget_before(self) -> None:
        """Once all rows are in metrics.jsonl."""
        with contextlib.suppress(OSError):
            for name in [] if self.file.left else names_before(self.folder):
                os.remove(os.path.join(self.folder, name))

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        with self.bar.end(step):
            self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        speed = self.tokens_per_step / seconds
        self.bar.tell(loss=f"loss {loss:.4f}", speed=f"{speed:,.0f} tokens/s")
        if self.board:
            self.board.add(step, {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                                  "tokens_per_second": speed})
        if self.file and not self.logger.enabled:
            row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                   "trained_tokens": step * self.tokens_per_step, "step_seconds": seconds}
            self.file.write(json.dumps(row) + "\n")

    def used(self, step: int, of_ranks: list[list[float]]) -> None:
        """What each rank did and used in a step: its seconds of forward and backward, then what USED names."""
        self.show(step, {f"{name}/rank{rank}": value for rank, (_, *values) in enumerate(of_ranks)
                         for name, value in zip(USED, values) if value != ABSENT})
        if self.hosts:  # once
            self.show(step, {"hosts": self.hosts})
            self.hosts = None

    def show(self, step: int, values: dict[str, float | str]) -> None:
        """In TensorBoard, and in W&B."""
        if self.board:
            self.board.add(step, values)
        if self.logger.enabled and self.logger.wandb:
            self.logger.wandb.log(values, step=step)

    def is_evaluation_due(self, step: int, every: int) -> bool:
        """Before the first step, after the last one, and after `every` ones (0: never), where none is recorded yet."""
        is_time = step in (0, self.num_steps) or every and step % every == 0
        return bool(is_time) and step not in self.evaluated_before

    def evaluated(self, step: int, loss: float) -> None:
        """Records the evaluation after that step; `loss` is the mean over the evaluation's target tokens."""
        values = {"evaluation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # a larger one is no float
        if self.file:
            self.evaluations.write(json.dumps({"step": step, **values}) + "\n")
        self.show(step, values)
        self.bar.tell(evaluation=f"evaluation {loss:.4f}")
        if self.logger.enabled:
            print(f"evaluation after step {step}: loss {loss:.4f}, perplexity {values['perplexity']:.2f}", flush=True)

    def sampled(self, step: int, text: str) -> None:
        """Records what the model wrote after that step."""
        self.show(step, {"sample": text})
        if self.logger.enabled:
            print(f"sample after step {step}: {text!r}", flush=True)

    def leave(self) -> None:
        """Closes the files for another Record of this process, which goes on with the same W&B run."""
        self.bar.close(stays=False)
        if self.file and not self.file.is_closed:
            self.board.close()
            self.file.close()
            self.evaluations.close()
            self.forget_before()

    def close(self) -> None:
        self.bar.close(stays=True)
        self.leave()
        try:
            self.logger.close()
        except Exception as error:  # of W&B, in many classes: the training has been made all the same
            print(f"W&B's run did not end well ({error}): make room in {self.folder}, `wandb sync` uploads the rest",
                  flush=True)


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


class Board:
    """TensorBoard's files in `folder`, for a run that goes on after step `start`.

    `rows`: lines of JSON about the steps before, for a disk that has no curves of these. Where tensorboard is missing
    or the disk does not take an event, this says so once and writes no more: metrics.jsonl has the losses.
    """

    def __init__(self, folder: str, start: int, rows: list[str]):
        self.folder, self.start, self.rows, self.records, self.has_ended = folder, start, rows, None, False

    def open(self) -> None:
        """At the first event, since an older run's folder of that name was renamed before."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        stem = os.path.join(self.folder, "events.out.tfevents.")
        has_curves = bool(glob.glob(f"{glob.escape(stem)}*"))
        self.records = RecordWriter(open(f"{stem}{time.time_ns()}.{socket.gethostname()}.{os.getpid()}", "wb"))
        self.write(file_version="brain.Event:2")
        self.write(step=self.start and self.start + 1, session_log=SessionLog(status=SessionLog.START))
        for row in () if has_curves else map(json.loads, self.rows):
            self.write_values(row["step"], {name: row[name] for name in KEPT if name in row})
        self.rows = ()

    def write(self, **fields) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write_values(self, step: int, values: dict[str, float | str]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import scalar, text

        parts = [(text if isinstance(value, str) else scalar)(name, value) for name, value in values.items()]
        self.write(step=step, summary=Summary(value=[each for part in parts for each in part.value]))

    def add(self, step: int, values: dict[str, float | str]) -> None:
        """Numbers and texts, by name, after optimizer step `step`."""
        if self.has_ended:
            return
        try:
            if self.records is None:
                self.open()
            self.write_values(step, values)
            self.records.flush()
        except (ImportError, OSError) as error:
            remedy = "pip install tensorboard" if isinstance(error, ImportError) else (
                f"make room in {self.folder}, and start anew")
            print(f"no more curves for TensorBoard ({error}): {remedy}. metrics.jsonl has the losses", flush=True)
            self.close()

    def close(self) -> None:
        self.has_ended = True
        with contextlib.suppress(OSError):  # of a full disk, of which add() has told
            if self.records:
                self.records.close()
