"""What each rank did when, during one optimizer step: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Each rank records spans of time by its own clock. The clocks of several machines disagree and run at different speeds,
so each rank compares its clock with rank 0's before and after the step (Cristian 1989). It asks for the time and
assumes that the answer was given in the middle of the round trip, which is wrong by half of that trip at most. The
quickest of several trips counts, and between the two comparisons the offset is interpolated.

Each rank is a process of the trace. Its first track is what it computes or waits for, the others are receives and
all-reduces of gradients that run in the background meanwhile.
"""

import contextlib
import json
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist


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
        self.recording, self.spans, self.before = False, [], None

    def start(self, device: torch.device) -> None:
        """All ranks call it together."""
        self.recording, self.spans, self.before = True, [], compare_clocks(device)
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

        Waiting for the GPU here could last for ever: it may be receiving what its neighbour is to send only later.
        """
        if not torch.cuda.is_initialized():
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def background(self, handle, kind: str, microbatch: int | None = None, peer: int | None = None):
        """The handle of a transfer or an all-reduce; while recording, a wrapper that records when it ends."""
        return WatchedHandle(handle, kind, microbatch, peer) if self.before else handle

    def write(self, path: str, grid, device: torch.device) -> None:
        """Collects the spans of all ranks. The logging rank writes them to `path` and prints each pipeline's bubble."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        before, after = self.before, compare_clocks(device)
        drift = (after.offset - before.offset) / (after.at - before.at)

        def by_rank_0(moment) -> int:
            at = moment if isinstance(moment, int) else self.zero_at + round(self.zero.elapsed_time(moment) * 1e6)
            return at + before.offset + round(drift * (at - before.at))

        place = (grid.global_rank, grid.dp_rank, grid.pp_rank, grid.tp_rank)
        spans = [span._replace(start=by_rank_0(span.start), end=by_rank_0(span.end)) for span in self.spans]
        everyone = [None] * grid.world_size
        dist.all_gather_object(everyone, (place, max(before.error, after.error), spans))
        self.recording, self.spans, self.before = False, [], None
        if not grid.is_logging_rank:
            return
        events = trace_events([(place, spans) for place, _, spans in everyone])
        error = sum(sorted(error for _, error, _ in everyone)[-2:]) / 1e3  # between any two of the ranks
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock_error_us": error}}, file)
        print(f"timeline: {path}", flush=True)
        for pipeline in range(grid.dp_world_size):
            stages = {pp: spans for (_, dp, pp, _), _, spans in everyone if dp == pipeline}
            name = f"pipeline {pipeline}: " if grid.dp_world_size > 1 else ""
            print(name + describe_bubble(list(stages.values())), flush=True)


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


class ClockOffset(NamedTuple):
    """`offset`: what to add to this rank's clock to get rank 0's. `error`: by how much that can be wrong at most. `at`:
    when it was measured, by this rank's clock. All in nanoseconds.
    """

    offset: int
    error: int
    at: int


def compare_clocks(device: torch.device, rounds: int = 10) -> ClockOffset:
    """This rank's clock against rank 0's. All ranks call it together."""
    message = torch.zeros(1, dtype=torch.int64, device="cpu" if dist.get_backend() == "gloo" else device)
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
    """The share of a pipeline's time, from its first forward to its last backward, in which its stages did neither."""
    compute = [span for spans in stages for span in spans if span.kind in ("forward", "backward", "weight gradients")]
    window = max(span.end for span in compute) - min(span.start for span in compute)
    bubble = 1 - sum(span.end - span.start for span in compute) / (window * len(stages))
    p, m = len(stages), 1 + max(span.microbatch for span in compute)
    if p == 1:
        return f"1 stage, idle for {bubble:.1%}"
    ideal, formula = (p - 1) / (m + p - 1), "(p-1)/(m+p-1)"
    if any(span.kind == "weight gradients" for span in compute):
        units, formula = max((3 * m + p - 1, "(p-1)/(3m+p-1)"), (2 * m + 2 * p - 1, "(2p-m-1)/(2m+2p-1)"))  # if m < p
        ideal = 1 - 3 * m / units
    return (f"bubble: {bubble:.1%} measured, {ideal:.1%} ideal, that is {formula} with p={p} stages and m={m} "
            "micro-batches")


timeline = Timeline()
