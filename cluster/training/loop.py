"""The training loop of the scripts that train on all machines together, and where the time of each rank goes."""

import functools
import itertools
import math
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from metrics import peak_memory_gb
from model import Llama, cross_entropy, init_weights
from timeline import Timeline, timeline
from training.clocks import CommonClock
from training.common import gather, print_table
from training.machine_facts import is_home
from training.record import Record
from utils import UserError, make_scheduler, recompute_layers

MEASURE_EVERY = {"cpu": 1, "cuda": 10}  # steps: timing what a GPU computes means waiting for it
KINDS = ("forward", "backward", "optimizer")


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


class StepTimes:
    """Where this rank's time goes: seconds of forward, backward, optimizer, and of the whole step."""

    def __init__(self, device: torch.device):
        self.device, self.measured = device, []

    def start(self, batch: int, profile: bool = False) -> None:
        """Starts to time step `batch`, from 0 on. `profile`: also for timeline.write(); then this is collective."""
        timeline.recording, timeline.spans = batch % MEASURE_EVERY[self.device.type] == 0, []
        # Without a picture nobody looks at transfers, and a thread would have to wait for each of their handles.
        timeline.background = functools.partial(Timeline.background, timeline) if profile else lambda handle, *_: handle
        if profile:
            self.clock = CommonClock(self.device)
            timeline.start()
        self.began = time.perf_counter()

    def stop(self) -> tuple[float, float | None]:
        """Seconds of the step, and those that this rank computed; None where they were not measured."""
        step_seconds = time.perf_counter() - self.began
        if not timeline.recording:
            return step_seconds, None
        spent = Counter(step=step_seconds)
        for span in timeline.spans:
            if not span.in_background:
                is_host = isinstance(span.start, int)  # else CUDA events, which have happened: the loss is known
                seconds = (span.end - span.start) / 1e9 if is_host else span.start.elapsed_time(span.end) / 1e3
                spent[span.kind] += seconds
        spent["compute"] = sum(spent[kind] for kind in KINDS)
        self.measured.append(spent)
        return step_seconds, spent["compute"]

    def print(self) -> None:
        """Of each rank: the mean milliseconds of a step by what they went to, and peak memory. Collective.

        The first step, which warms up, does not count. A rank is idle while it waits for others, or for the network.
        """
        if not (steps := self.measured[1:] or self.measured):
            return
        mean = {kind: 1e3 * statistics.fmean(spent[kind] for spent in steps) for kind in (*KINDS, "compute", "step")}
        mean["idle"] = mean["step"] - mean["compute"]
        heads = [*KINDS, "idle", "step"]
        rows = gather([socket.gethostname(), *(f"{mean[kind]:.1f}" for kind in heads), f"{peak_memory_gb():.2f}"])
        if dist.get_rank() == 0:
            print("milliseconds of a step, mean, and peak memory")
        print_table(["rank", "host", *heads, "GB"], [[rank, *row] for rank, row in enumerate(rows)])


def train(args, plugin, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader, criterion: Callable,
          num_steps: int, run, make_run_ready: Callable, steps_per_epoch: int | None, evaluator=None) -> Iterator[Step]:
    """Trains what plugin.configure returned until step `num_steps`; yields each step when it is done. Collective.

    `loader`: of the whole run's samples, unshuffled; what was trained before a resume is skipped. `run`: see run.py of
    checkpoints/; make_run_ready(scheduler) calls run.begin(). `evaluator`: an Evaluator, used before the first step, after
    the last one, and after every args.eval_every ones. Writes metrics, and the timeline of step args.profile_batch.
    In the end rank 0 prints where the time of each rank went. Raises UserError for a --profile_batch that is no step,
    and for a loss that is not finite.
    """
    grid = pgm.process_group_manager
    if not -1 <= args.profile_batch < num_steps:
        raise UserError(f"--profile_batch {args.profile_batch} is not among the steps 0 to {num_steps - 1}: choose "
                        "one of them, or -1 for none")
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    make_run_ready(scheduler)
    record = Record(args, grid, run.disks, num_steps, plugin.global_batch_size * args.seq_len, run.start,
                    run.found and run.found.state["flags"])
    if run.start >= num_steps and is_home():
        print(f"nothing to do: {run.found.path} is that of step {run.start}, of {num_steps}", flush=True)
    del loader.microbatches[: run.start * plugin.own_num_microbatches]
    batches, times, first_bad = iter(loader), StepTimes(plugin.device), FirstBadLoss(criterion)
    stops = is_last = False
    if evaluator and run.start == 0:
        record.evaluated(0, evaluator.evaluate())
    for batch in range(run.start, num_steps):
        with run.watch.lost_peers():
            times.start(batch, profile=batch == args.profile_batch)
            torch.manual_seed(args.seed + 1000 * grid.dp_rank + grid.pp_rank + 1_000_000 * batch)  # of dropout
            loss = plugin.execute_pipeline(batches, model, first_bad, optimizer)
            with timeline.span("gradient norm"):
                grad_norm = plugin.clip_grad_norm(model, args.max_grad_norm)
            learning_rate = scheduler.get_last_lr()[0]
            with run.watch.lock:
                with timeline.span("optimizer"):
                    optimizer.step()
                scheduler.step()
                run.step = batch + 1
            step = Step(run.step, loss.item(), grad_norm.item(), learning_rate, *times.stop())  # waits for a GPU
            if not math.isfinite(step.loss + step.grad_norm):
                raise UserError(first_bad.message(step, model, run))
            record.log(*step[:5])
            if batch == args.profile_batch:
                write_timeline(args, times.clock)
            stops, is_last = run.watch.ask_all(), step.number == num_steps
            if evaluator and not stops and (is_last or args.eval_every and step.number % args.eval_every == 0):
                step = step._replace(evaluation=evaluator.evaluate())
                record.evaluated(step.number, step.evaluation)
                stops = run.watch.ask_all()  # an evaluation may take longer than a step
            is_end = bool(steps_per_epoch) and step.number % steps_per_epoch == 0
            step = step._replace(sample=run.after_step(step.number, stops, is_end, is_last))
        yield step
        if stops:
            break
    with run.watch.lost_peers():
        record.close()
        times.print()
        run.end(stops and not is_last)


class FirstBadLoss:
    """The criterion, which also notes whether a micro-batch's loss is not finite: it says which rank had it first."""

    def __init__(self, criterion: Callable):
        self.criterion, self.total = criterion, 0.0

    def __call__(self, output, batch) -> torch.Tensor:
        loss = self.criterion(output, batch)
        self.total = self.total + loss.detach()  # not finite where one of them is not
        return loss

    def message(self, step: Step, model: torch.nn.Module, run) -> str:
        """What went wrong, where, and what is left. Collective."""
        bad = not math.isfinite(float(self.total))
        if not any(everyone := gather(bad)):  # then it came with the gradients
            everyone = gather(any(not param.grad.isfinite().all() for param in model.parameters()
                                  if param.grad is not None))
        ranks = ", ".join(str(rank) for rank, is_bad in enumerate(everyone) if is_bad) or "unknown"
        last = run.checkpointer.last()
        return (f"step {step.number} has the loss {step.loss} and the gradient norm {step.grad_norm}, first on rank "
                f"{ranks}: the training stops, and saves nothing. The last good checkpoint is "
                f"{last or 'none, as none was saved'}. Lower --learning_rate, and go on with --resume auto")


def endless(loader) -> Iterator[dict[str, torch.Tensor]]:
    """Epoch after epoch of micro-batches, each shuffled in its own way where the loader shuffles."""
    for epoch in itertools.count(1):
        loader.set_epoch(epoch)
        yield from loader


def write_timeline(args, clock: CommonClock) -> None:
    """Writes timeline_batch<N>_all.json and, with matplotlib, .png, on the rank that logs. Collective."""
    grid = pgm.process_group_manager
    stem = os.path.join(args.log_dir, args.run_name, f"timeline_batch{args.profile_batch}")
    error = clock.end()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # events have a time once they have happened

    def by_rank_0(moment) -> int:
        at = moment if isinstance(moment, int) else timeline.zero_at + round(timeline.zero.elapsed_time(moment) * 1e6)
        return clock.by_rank_0(at)

    timeline.spans = [span._replace(start=by_rank_0(span.start), end=by_rank_0(span.end)) for span in timeline.spans]
    timeline.write(f"{stem}_all.json", grid)
    if grid.is_logging_rank:
        print(f"the clocks of two ranks differ by at most {error:.0f} microseconds", flush=True)
        try:
            from timeline_picture import draw

            draw(f"{stem}_all.json", f"{stem}.png")
            print(f"picture: {stem}.png", flush=True)
        except ImportError as error:
            print(f"no picture of the timeline: {error}; pip install matplotlib", flush=True)
    dist.barrier()  # drawing takes a second, which is no part of the next step


def make_llama(config, seed: int, device: torch.device, dtype: torch.dtype, recompute: bool = False) -> Llama:
    """The whole model on this rank, with its initial weights."""
    with torch.device("meta"):
        model = Llama(config, dtype)
    init_weights(model, seed, device, lambda full, dim: full)
    if recompute:
        recompute_layers(model.decoder_layers)
    return model


def one_microbatch(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward of one micro-batch, (B, T), on this rank by itself; the loss. Gradients are added."""
    loss = cross_entropy(model(batch["input_ids"]), batch["target_ids"])
    loss.backward()
    return loss.detach()


def seconds_of_microbatch(model: Llama, batch_size: int, seq_len: int, device: torch.device) -> float:
    """The mean over a second of micro-batches, timed on all ranks at once, as ranks may share a machine. Collective."""
    ids, seconds = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device), []
    dist.barrier()
    while len(seconds) < 3 or sum(seconds) < 1.0:
        start = time.perf_counter()
        one_microbatch(model, {"input_ids": ids, "target_ids": ids}).item()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return statistics.fmean(seconds[1:])  # the first one warms up
