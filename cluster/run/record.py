"""What a run tells of itself: metrics.jsonl, TensorBoard's files and, on a terminal, how far it is.

A run is worth more than its records: what a full disk does not take is kept in memory, and written once there is room.

metrics.jsonl goes on over several runs of one training: steps count on, and none is there twice. Evaluations have a
file beside it, evaluation.jsonl: {"step": 20, "evaluation_loss": 3.51, "perplexity": 33.4} a line. Where hosts share no
disk, one rank of each writes the rows, so that they outlive the host of the rank that logs. config.json beside them has
the run's id: another run of that name may have left rows of the same steps on a host.

TensorBoard gets the loss of each step, and what each rank did and used in it: seconds of the step, those that it
computed and those that it waited for others or for the network, its memory, and how busy its CPU and GPU were. W&B gets
the latter, too; what RunLogger writes for W&B is not repeated there.

On a terminal one line is drawn anew while a step is computed; elsewhere each step has a line, RunLogger's:

    step 12/60 |####                | loss 3.4211 | evaluation 3.5120 | 214 tokens/s | 03:12 left
"""

import contextlib
import fnmatch
import functools
import io
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from metrics import RunLogger, open_metrics, peak_memory_gb
from ranks.collectives import gather
from ranks.disks import CANT_WRITE, Disks
from ranks.files import Rows, replace
from ranks.placement import home_rank, is_home
from tqdm import tqdm

METRICS, EVALUATIONS = "metrics.jsonl", "evaluation.jsonl"
BEFORE = "metrics.before{}.jsonl"  # rows of the runs before, until they are in the new file
ENOUGH = 1 << 20  # bytes that are free without which TensorBoard's files wait
BAR = "step {n_fmt}/{total_fmt} |{bar:20}| {desc}{remaining} left"  # as tqdm fills it in


class Step(NamedTuple):
    """An optimizer step that has just been made."""

    number: int  # from 1 on
    loss: float  # the mean over the global batch
    grad_norm: float  # of the whole model, before it was clipped
    learning_rate: float
    seconds: float
    compute_seconds: float | None  # those that this rank computed; None where they were not measured
    evaluation: float | None = None  # the loss on the validation split after it, where it was computed
    sample: str | None = None  # a text that the model wrote after it, on home_rank()


class Record:
    """A RunLogger that goes on after step `start`, and the same rows on the other disks. All ranks make one together.

    `before`: the flags of the run that it goes on from, {} of a new one; like `args`, with its run_id. `last`: the
    Commit of step `start`, where the ranks have it in memory; its row is written where none has written it.
    """

    def __init__(self, args, grid, disks: Disks, device: torch.device, num_steps: int, tokens_per_step: int, start: int,
                 before: dict, last=None):
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
        has_bar = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.progress = tqdm(total=num_steps, initial=start, bar_format=BAR, file=sys.stdout, ascii=" #",
                             disable=not (grid.is_logging_rank and start < num_steps and has_bar), dynamic_ncols=True,
                             mininterval=math.inf)
        self.progress.clear()
        self.words, self.board = {"loss": "", "evaluation": "", "speed": ""}, None
        self.device, self.start, self.num_steps = device, start, num_steps

    def forget_before(self) -> None:
        """Once all rows are in metrics.jsonl."""
        for name in [] if self.file.left else names_before(self.folder):
            os.remove(os.path.join(self.folder, name))

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float) -> None:
        with contextlib.nullcontext() if self.progress.disable else contextlib.redirect_stdout(io.StringIO()):
            self.logger.log(step, loss, grad_norm, learning_rate, seconds)
        self.progress.update()
        self.tell(loss=f"loss {loss:.4f}", speed=f"{self.tokens_per_step / seconds:,.0f} tokens/s")
        if self.file and not self.logger.enabled:
            row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
                   "trained_tokens": step * self.tokens_per_step, "step_seconds": seconds}
            self.file.write(json.dumps(row) + "\n")

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """On a terminal the bar is there inside of the block, in which nothing should be printed."""
        self.progress.refresh()
        yield
        self.progress.clear()

    def tell(self, **words: str) -> None:
        """What the bar says besides: of the `loss`, the last `evaluation` and the `speed`."""
        self.words.update(words)
        self.progress.set_description_str("".join(f"{each} | " for each in self.words.values() if each), refresh=False)

    def write(self, step: Step) -> Step:
        """Records a step that needs neither an evaluation nor a sample. Collective."""
        self.log(*step[:5])
        self.complete(step)
        return step

    def is_evaluation_due(self, step: int, every: int) -> bool:
        """Before the first step, after the last one, and after `every` ones (0: never), where none is recorded yet."""
        is_time = step in (0, self.num_steps) or every and step % every == 0
        return bool(is_time) and step not in self.evaluated_before

    def evaluated(self, step: int, loss: float) -> None:
        """Records the evaluation after that step; `loss` is the mean over the evaluation's target tokens."""
        values = {"evaluation_loss": loss, "perplexity": perplexity(loss)}
        if self.file:
            self.evaluations.write(json.dumps({"step": step, **values}) + "\n")
        if self.logger.enabled:
            self.tell(evaluation=f"evaluation {loss:.4f}")
            if self.logger.wandb:
                self.logger.wandb.log(values, step=step)
            print(f"evaluation after step {step}: loss {loss:.4f}, perplexity {values['perplexity']:.2f}", flush=True)

    def complete(self, step: Step) -> None:
        """After a step with its evaluation and its sample. Collective."""
        self.board = self.board or Board(self.folder, self.device, self.start)  # an older run's folder is renamed now
        self.board.log(step, self.tokens_per_step)

    def leave(self) -> None:
        """Closes the files for another Record of this process, which goes on with the same W&B run."""
        if self.file:
            self.file.close()
            self.evaluations.close()
            self.forget_before()
        if self.board:
            self.board.leave()

    def close(self) -> None:
        self.progress.close()
        self.logger.close()
        if self.board:
            self.board.close()
        self.leave()


def perplexity(loss: float) -> float:
    """exp(loss): among so many equally likely tokens the model would be as uncertain."""
    return math.exp(min(loss, 700.0))  # a larger one is no float


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
    return sorted(name for name in os.listdir(folder) if fnmatch.fnmatch(name, BEFORE.format("*")))


def is_of_another_run(folder: str, run_ids: set[str | None]) -> bool:
    """Whether config.json in the folder has a run_id, and none of these."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return json.load(file).get("run_id") not in {None, *run_ids}
    except (OSError, ValueError, AttributeError, TypeError):
        return False


class Board:
    """Writes to `folder`, on home_rank(), what all ranks send it. Without TensorBoard it writes nothing and says so.

    A run that is resumed goes on after step `start`.
    """

    def __init__(self, folder: str, device: torch.device, start: int = 0):
        self.folder, self.device, self.make, self.writer = folder, device, None, None
        self.busy = time.process_time()
        if not is_home():
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.make = functools.partial(SummaryWriter, folder, purge_step=start + 1 if start else None)
        except ImportError:
            print("no TensorBoard files: pip install tensorboard. metrics.jsonl has the losses", flush=True)

    def log(self, step: Step, tokens: int) -> None:
        """`tokens`: of the step, on all ranks. Collective."""
        everyone, samples = zip(*gather((self.values_of_this_rank(step), step.sample)))
        of_ranks = {f"{name}/rank{rank}": value for rank, each in enumerate(everyone) for name, value in each.items()}
        sample = {} if samples[home_rank()] is None else {"sample": samples[home_rank()]}
        run = getattr(sys.modules.get("wandb"), "run", None)  # with --use_wandb that of the rank that logs
        if run is not None:
            run.log({**of_ranks, **sample}, step=step.number)
        if self.make is None or shutil.disk_usage(self.folder).free < ENOUGH:
            return
        values = {name: getattr(step, name) for name in ("loss", "grad_norm", "learning_rate")}
        if step.evaluation is not None:
            values |= {"evaluation_loss": step.evaluation, "perplexity": perplexity(step.evaluation)}
        with self.ending_with_the_disk():
            self.writer = self.writer or self.make()
            for name, value in {**values, "tokens_per_second": tokens / step.seconds, **of_ranks}.items():
                self.writer.add_scalar(name, value, step.number)
            for name, text in sample.items():
                self.writer.add_text(name, text, step.number)

    @contextlib.contextmanager
    def ending_with_the_disk(self) -> Iterator[None]:
        """Where a file is not taken after all, TensorBoard gets no more; metrics.jsonl has the losses."""
        try:
            yield
        except OSError as error:
            print(f"TensorBoard's files end here: {error}", flush=True)
            self.make = self.writer = None

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
            with contextlib.suppress(ImportError, RuntimeError):  # it needs the package nvidia-ml-py
                values["gpu_percent"] = float(torch.cuda.utilization(self.device))
        return values

    def leave(self) -> None:
        with self.ending_with_the_disk():
            if self.writer:
                self.writer.close()

    def close(self) -> None:
        self.leave()
        if self.writer:
            print(f"TensorBoard: tensorboard --logdir {os.path.dirname(self.folder)}", flush=True)
