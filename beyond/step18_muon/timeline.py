"""What each rank did when, during one optimizer step: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Each rank records spans of time by the clock of its machine, which all ranks of one machine share. It is a process of
the trace. Its first track is what it computes or waits for, the others are what runs in the background meanwhile, such
as all-reduces of gradients.
"""

import contextlib
import json
import os
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from utils import UserError


class Span(NamedTuple):
    kind: str
    microbatch: int | None
    start: int  # nanoseconds
    end: int
    in_background: bool = False
    peer: int | None = None  # the sender of what was received
    chunk: int = 0  # of the rank's chunks of the model


class Timeline:
    """Records spans between start() and write(). Outside of these, its calls cost next to nothing."""

    def __init__(self):
        self.recording, self.spans = False, []

    def start(self) -> None:
        self.recording, self.spans = True, []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the GPU is idle, so that this event happens now
            self.zero, self.zero_at = self.now(), time.perf_counter_ns()

    @contextlib.contextmanager
    def span(self, kind: str, microbatch: int | None = None, chunk: int = 0):
        """Records what runs inside of the block."""
        start = self.now() if self.recording else 0
        yield
        if self.recording:
            self.spans.append(Span(kind, microbatch, start, self.now(), chunk=chunk))

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
        """The handle of what runs in the background; while recording, a wrapper that records when it ends."""
        return WatchedHandle(handle, kind, microbatch, peer) if self.recording else handle

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
            with open(path, "w") as file:
                json.dump({"traceEvents": trace_events(everyone), "displayTimeUnit": "ms"}, file)
            print(f"timeline: {path}", flush=True)
            for pipeline in range(grid.dp_world_size):
                stages = {pp: spans for (_, dp, pp, _), spans in everyone if dp == pipeline}
                name = f"pipeline {pipeline}: " if grid.dp_world_size > 1 else ""
                print(name + describe_bubble([*stages.values()]), flush=True)


class WatchedHandle:
    """A handle whose end is recorded. It may end long before anyone waits for it, so over gloo a thread waits for it.

    With NCCL, wait() returns at once: the GPU waits, and the end is when it goes on.
    """

    def __init__(self, handle, kind: str, microbatch: int | None, peer: int | None):
        self.handle, self.error, self.thread = handle, None, None
        is_gloo = dist.get_backend() == "gloo"
        self.span = Span(kind, microbatch, time.perf_counter_ns() if is_gloo else timeline.now(), 0, True, peer)
        if is_gloo:
            self.thread = threading.Thread(target=self.finish)
            self.thread.start()

    def finish(self) -> None:
        try:
            self.handle.wait()
        except RuntimeError as error:
            self.error = error
        timeline.spans.append(self.span._replace(end=time.perf_counter_ns() if self.thread else timeline.now()))

    def wait(self) -> None:
        self.thread.join() if self.thread else self.finish()
        if self.error:
            raise self.error


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
            name += f" chunk {span.chunk}" if span.chunk else ""
            args = {key: value for key in ("microbatch", "chunk", "peer") if (value := getattr(span, key)) is not None}
            events.append({"name": name, "cat": span.kind, "ph": "X", "pid": rank, "tid": track, "args": args,
                           "ts": (span.start - origin) / 1e3, "dur": (span.end - span.start) / 1e3})
    return events


def describe_bubble(stages: list[list[Span]]) -> str:
    """The share of a pipeline's time, from its first forward to its last backward, in which its stages did neither."""
    compute = [span for spans in stages for span in spans if span.kind in ("forward", "backward", "weight gradients")]
    window = max(span.end for span in compute) - min(span.start for span in compute)
    bubble = 1 - sum(span.end - span.start for span in compute) / (window * len(stages))
    p, m, v = (len(stages), *(1 + max(getattr(span, key) for span in compute) for key in ("microbatch", "chunk")))
    if p == 1:
        return f"1 stage, idle for {bubble:.1%}"
    ideal, formula = (p - 1) / (v * m + p - 1), "(p-1)/(m+p-1)" if v == 1 else f"(p-1)/({v}m+p-1)"
    if any(span.kind == "weight gradients" for span in compute):
        ideal, formula = (p - 1) / (3 * v * m + p - 1), f"(p-1)/({3 * v}m+p-1)"
        if m < p and v == 1:
            ideal, formula = (2 * p - m - 1) / (2 * m + 2 * p - 1), "(2p-m-1)/(2m+2p-1)"
    if m < p and v > 1:
        return f"bubble: {bubble:.1%} measured, where m={m} micro-batches are less than a round of p={p}"
    return (f"bubble: {bubble:.1%} measured, {ideal:.1%} ideal, that is {formula} with p={p} stages and m={m} "
            "micro-batches")


def check_profile_batch(batch: int, num_steps: int) -> None:
    """Raises UserError where there is no such step, or where the ranks are on machines whose clocks disagree."""
    if not 0 <= batch <= num_steps:
        raise UserError(f"--profile_batch {batch} is not among the steps 1 to {num_steps}")
    if batch and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < dist.get_world_size():
        raise UserError(f"--profile_batch {batch}: the clocks of several machines disagree; leave it out, or use "
                        "cluster/train_distributed.py, which compares them")


timeline = Timeline()
