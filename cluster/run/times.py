"""Where the time of each rank goes: in a table at the end, with the peak memory; in a picture for one step.

The picture, or timeline, of several machines needs one clock, and theirs disagree and run at different speeds.
Each rank compares its clock with rank 0's before and after the step (Cristian 1989). It asks for the time and assumes
that the answer was given in the middle of the round trip, which is wrong by half of that trip at most. The quickest of
several trips counts, and between the two comparisons the offset is interpolated.
"""

import contextlib
import copy
import functools
import os
import socket
import statistics
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from metrics import peak_memory_gb
from ranks.collectives import gather, say
from ranks.join import print_table
from ranks.memory import memory_of_process
from timeline import Timeline, timeline
from utils import UserError

MEASURE_EVERY = {"cpu": 1, "cuda": 10}  # steps: timing what a GPU computes means waiting for it
KINDS = ("forward", "backward", "optimizer")  # of what a rank computes; else it is idle
# Of a step, with memory in GB now (of a GPU: at most so far); 100 percent of a CPU is one core.
USED = ("compute_seconds", "wait_seconds", "cpu_memory_gb", "cpu_percent", "gpu_memory_gb", "gpu_percent")
ABSENT = -1.0


class StepTimes:
    """Where this rank's time goes: seconds of forward, backward, optimizer, and of the whole step."""

    def __init__(self, device: torch.device):
        self.device, self.measured, self.work, self.used = device, [], 0.0, []

    def start(self, batch: int, profile: bool = False, began: float | None = None) -> None:
        """Starts to time step `batch`, from 0 on. `profile`: also for timeline.write(); then this is collective.
        `began`: when the step did, where that was in another generation."""
        timeline.recording, timeline.spans = batch % MEASURE_EVERY[self.device.type] == 0, []
        # Without a picture nobody looks at transfers, and a thread would have to wait for each of their handles.
        timeline.background = functools.partial(Timeline.background, timeline) if profile else lambda handle, *_: handle
        if profile:
            self.clock = compare_clocks()
            timeline.start()
        self.began, self.busy = began or time.perf_counter(), time.process_time()

    def stop(self) -> float:
        """Seconds of the step. Afterwards `work` is those of forward and backward, 0 where they were not measured, and
        `used` what USED names, or ABSENT."""
        step_seconds, self.work = time.perf_counter() - self.began, 0.0
        self.used = [ABSENT, ABSENT, memory_of_process() / 1e9 or ABSENT,
                     100 * (time.process_time() - self.busy) / step_seconds, ABSENT, ABSENT]
        if self.device.type == "cuda":
            self.used[4] = torch.cuda.max_memory_allocated(self.device) / 1e9
        if not timeline.recording:
            return step_seconds
        if self.device.type == "cuda":
            with contextlib.suppress(ImportError, RuntimeError):  # it needs the package nvidia-ml-py
                self.used[5] = float(torch.cuda.utilization(self.device))
        spent = Counter(step=step_seconds)
        for span in timeline.spans:
            if not span.in_background:
                is_host = isinstance(span.start, int)  # else CUDA events, which have happened: the loss is known
                seconds = (span.end - span.start) / 1e9 if is_host else span.start.elapsed_time(span.end) / 1e3
                spent[span.kind] += seconds
        self.work = spent["forward"] + spent["backward"]
        computed = sum(spent[kind] for kind in KINDS)
        spent["idle"] = step_seconds - computed
        self.used[:2] = computed, max(spent["idle"], 0.0)
        self.measured.append(spent)
        return step_seconds

    def print(self) -> None:
        """Of each rank: the mean milliseconds of a step by what they went to, and peak memory. Collective.

        The first step, which warms up, does not count. A rank is idle while it waits for others, or for the network.
        """
        heads, row = [*KINDS, "idle", "step"], None
        if steps := self.measured[1:] or self.measured:  # a GPU may have measured none, where a CPU has
            means = [statistics.fmean(spent[kind] for spent in steps) for kind in heads]
            row = [socket.gethostname(), *(f"{1e3 * seconds:.1f}" for seconds in means), f"{peak_memory_gb():.2f}"]
        if any(rows := gather(row)):
            say("milliseconds of a step, mean, and peak memory")
            print_table(["rank", "host", *heads, "GB"], [[rank, *row] for rank, row in enumerate(rows) if row])


class ClockOffset(NamedTuple):
    """`offset`: what to add to this rank's clock to get rank 0's. `error`: by how much that can be wrong at most. `at`:
    when it was measured, by this rank's clock. All in nanoseconds.
    """

    offset: int
    error: int
    at: int


def compare_clocks(rounds: int = 10) -> ClockOffset:
    """This rank's clock against rank 0's. All ranks call it together."""
    message = torch.zeros(1, dtype=torch.int64, device="cpu" if dist.get_backend() == "gloo" else "cuda")
    best = None
    for rank in range(1, dist.get_world_size()):
        for _ in range(rounds):
            if dist.get_rank() == 0:
                dist.recv(message, rank)
                message.item()  # NCCL's recv returns before the message is there
                dist.send(message.fill_(time.perf_counter_ns()), rank)
            elif dist.get_rank() == rank:
                asked = time.perf_counter_ns()
                dist.send(message, 0)
                dist.recv(message, 0)
                theirs, answered = message.item(), time.perf_counter_ns()
                middle, error = (asked + answered) // 2, (answered - asked) // 2
                if best is None or error < best.error:
                    best = ClockOffset(theirs - middle, error, middle)
    return best or ClockOffset(0, 0, time.perf_counter_ns())


def write_timeline(args, before: ClockOffset, writes: bool) -> None:
    """Writes timeline_batch<N>_all.json, as metrics.jsonl: on each disk, by one rank. The rank that logs says so.

    `before`: the step began. `writes`: this rank does. Collective.
    """
    grid = pgm.process_group_manager
    stem = os.path.join(args.log_dir, args.run_name, f"timeline_batch{args.profile_batch}")
    after = compare_clocks()
    drift = (after.offset - before.offset) / (after.at - before.at)
    errors = sorted(gather(max(before.error, after.error)))  # the sum of two ranks' is that between their clocks
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # events have a time once they have happened

    def by_rank_0(moment) -> int:
        at = moment if isinstance(moment, int) else timeline.zero_at + round(timeline.zero.elapsed_time(moment) * 1e6)
        return at + before.offset + round(drift * (at - before.at))

    timeline.spans = [span._replace(start=by_rank_0(span.start), end=by_rank_0(span.end)) for span in timeline.spans]
    (writing := copy.copy(grid)).is_logging_rank = writes
    picture = f"picture: python tools/timeline_picture.py {stem}_all.json {stem}.png"
    try:
        with contextlib.redirect_stdout(sys.stdout if grid.is_logging_rank else None):
            timeline.write(f"{stem}_all.json", writing)
    except UserError as error:
        picture = f"{error}. The run goes on"
        with contextlib.suppress(OSError):  # a part of it, which no picture can be made of
            os.remove(f"{stem}_all.json")
        if not grid.is_logging_rank:
            print(picture, flush=True)
    if grid.is_logging_rank:
        print(f"the clocks of two ranks differ by at most {sum(errors[-2:]) / 1e3:.0f} microseconds", flush=True)
        print(picture, flush=True)
