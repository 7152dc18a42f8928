"""What each rank did when, during one optimizer step: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Each rank records spans of time by the clock of its machine, which all ranks of one machine share. It is a process of
the trace. Its first track is what it computes or waits for, the others are what runs in the background meanwhile, such
as all-reduces of gradients.
"""

import contextlib
import json
import os
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist

from utils import UserError, writing


class Span(NamedTuple):
    kind: str
    microbatch: int | None
    start: int  # nanoseconds
    end: int
    in_background: bool = False
    peer: int | None = None  # the sender of what was received


class Timeline:
    """Records spans between start() and write(). Outside of these, its calls cost next to nothing."""

    def __init__(self):
        self.recording, self.spans = False, []
        self.threads = ThreadPoolExecutor(max_workers=64)  # more than run in the background at once

    def start(self) -> None:
        self.recording, self.spans = True, []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the GPU is idle, so that this event happens now
            self.zero, self.zero_at = self.now(), time.perf_counter_ns()

    @contextlib.contextmanager
    def span(self, kind: str, microbatch: int | None = None):
        """Records what runs inside of the block."""
        start = self.now() if self.recording else 0
        yield
        if self.recording:
            self.spans.append(Span(kind, microbatch, start, self.now()))

    def now(self):
        """Nanoseconds or, on CUDA, an event that happens when the GPU has done what was issued before.

        Waiting for the GPU here would change what is measured: it would be idle until it is given the next work.
        """
        if not torch.cuda.is_initialized():
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def background(self, handle, kind: str, microbatch: int | None = None, peer: int | None = None):
        """The handle of what runs in the background. While recording, its end is recorded, whenever that is."""
        if not self.recording:
            return handle
        if dist.get_backend() != "gloo":
            span = Span(kind, microbatch, self.now(), 0, True, peer)
            # torch calls this at once, on a stream that waits for NCCL's: the GPU's own stream goes on.
            handle.get_future().then(lambda _: self.spans.append(span._replace(end=self.now())))
            return handle
        span = Span(kind, microbatch, time.perf_counter_ns(), 0, True, peer)

        def watch() -> None:  # in a thread, as the end may come long before anyone waits for it
            handle.wait()
            self.spans.append(span._replace(end=time.perf_counter_ns()))

        return types.SimpleNamespace(wait=self.threads.submit(watch).result)

    def write(self, path: str, grid) -> None:
        """Collects the spans of all ranks, which call it together. The logging rank writes them to `path`."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

        def by_clock(moment) -> int:
            return moment if isinstance(moment, int) else self.zero_at + round(self.zero.elapsed_time(moment) * 1e6)

        place = (grid.global_rank, grid.dp_rank, grid.pp_rank, grid.tp_rank)
        spans = [span._replace(start=by_clock(span.start), end=by_clock(span.end)) for span in self.spans]
        everyone = [None] * grid.world_size
        dist.all_gather_object(everyone, (place, spans))
        self.recording, self.spans = False, []
        if grid.is_logging_rank:
            with writing(path), open(path, "w") as file:
                json.dump({"traceEvents": trace_events(everyone), "displayTimeUnit": "ms"}, file)
            print(f"timeline: {path}", flush=True)
            for pipeline in range(grid.dp_world_size):
                stages = {pp: spans for (_, dp, pp, _), spans in everyone if dp == pipeline}
                name = f"pipeline {pipeline}: " if grid.dp_world_size > 1 else ""
                print(name + describe_bubble([*stages.values()]), flush=True)


def trace_events(ranks: list[tuple[tuple[int, ...], list[Span]]]) -> list[dict]:
    """Chrome trace events, in microseconds since the first span. What runs in the background takes a free track."""
    events, origin = [], min(span.start for _, spans in ranks for span in spans)
    for (rank, *place), spans in ranks:
        name = "rank {}: dp {} pp {} tp {}".format(rank, *place)
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        free_at: list[int] = []  # when each background track becomes free
        for span in sorted(spans, key=lambda span: span.start):
            track = 0
            if span.in_background:
                track = next((i for i, free in enumerate(free_at, 1) if free <= span.start), len(free_at) + 1)
                free_at[track - 1 : track] = [span.end]
            name = span.kind if span.microbatch is None else f"{span.kind} {span.microbatch}"
            args = {key: value for key in ("microbatch", "peer") if (value := getattr(span, key)) is not None}
            events.append({"name": name, "cat": span.kind, "ph": "X", "pid": rank, "tid": track, "args": args,
                           "ts": (span.start - origin) / 1e3, "dur": (span.end - span.start) / 1e3})
    return events


def describe_bubble(stages: list[list[Span]]) -> str:
    """The share of a pipeline's time, from its first forward to its last backward, in which its stages did neither.

    Ideal: the same actions in their order, if a forward took one unit of time, a backward two, and a message none.
    """
    computed = sorted(((span, stage) for stage, spans in enumerate(stages) for span in spans
                       if span.kind in ("forward", "backward")), key=lambda pair: pair[0].start)
    units = [2 if span.kind == "backward" else 1 for span, _ in computed]
    free, ended = [0] * len(stages), {}  # when a stage is free, and when an action has ended, in units of time
    for (span, stage), duration in zip(computed, units):  # by their starts, so each one comes after what it needs
        neighbour = {"forward": stage - 1, "backward": stage + 1}[span.kind]
        needed = ended.get((span.kind, span.microbatch, neighbour), 0)
        free[stage] = ended[span.kind, span.microbatch, stage] = max(free[stage], needed) + duration
    window = max(span.end for span, _ in computed) - computed[0][0].start
    measured = 1 - sum(span.end - span.start for span, _ in computed) / (window * len(stages))
    ideal = 1 - sum(units) / (max(free) * len(stages))
    return f"bubble: {measured:.1%} measured, {ideal:.1%} ideal"


def check_profile_batch(batch: int, num_steps: int) -> None:
    """Raises UserError where there is no such step, or where the ranks are on machines whose clocks disagree."""
    if not 0 <= batch <= num_steps:
        raise UserError(f"--profile_batch {batch} is not among the steps 1 to {num_steps}")
    if batch and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < dist.get_world_size():
        raise UserError(f"--profile_batch {batch}: the clocks of several machines disagree; leave it out, or use "
                        "cluster/train_distributed.py, which compares them")


timeline = Timeline()
