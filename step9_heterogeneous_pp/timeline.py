"""What each rank did when, during one optimizer step: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

Each rank notes spans by its own clock. Clocks of different machines disagree, so each rank asks rank 0 for the time and
takes the answer of the quickest round trip (Cristian 1989): it is off by half that trip at most, as the file states.
Clocks of unlike machines also run at unlike speeds, some tens of microseconds apart after a second: each rank asks
before the step and after it, and what lies between is interpolated.
A process of the trace is a rank: its first track is what it computed or waited for, the others are transfers under way.

A transfer may end long before anyone asks for it. While recording, a thread of its own waits for it and notes the time.
"""

import contextlib
import json
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

COMPUTE_KINDS = ("forward", "backward")


class Timeline:
    """Notes spans while `recording`; otherwise each call costs next to nothing. Transfers only from start() on."""

    def __init__(self):
        self.recording, self.spans, self.before = False, [], None

    def start(self, device: torch.device) -> None:
        """Records from now on, until write(). Collective."""
        self.recording, self.spans, self.before = True, [], clock_offset(device)

    def now(self) -> int:
        """Nanoseconds of this rank's clock. On CUDA the GPU finishes first what it was given, while recording."""
        if self.recording and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def add(self, kind: str, microbatch: int | None, start: int, communication: bool = False) -> None:
        """A span from `start` until now. Transfers overlap with all else, so they get tracks of their own."""
        if self.recording:
            self.spans.append((kind, microbatch, start, self.now(), communication, None))

    @contextlib.contextmanager
    def span(self, kind: str, microbatch: int | None = None):
        start = self.now() if self.recording else 0
        yield
        self.add(kind, microbatch, start)

    def transfer(self, begin, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, microbatch: int):
        """The handle of begin(tensor, peer, group=group), which is dist.isend or dist.irecv. Noted when it ends."""
        kind, start = "send" if begin is dist.isend else "receive", self.now()
        handle = begin(tensor, peer, group=group)
        return Transfer(handle, kind, microbatch, start, peer) if self.before else handle

    def write(self, path: str, grid, num_microbatches: int, device: torch.device) -> None:
        """Gathers all ranks' spans, and the logging rank writes them to `path` and prints the bubble. Collective."""
        before, after = self.before, clock_offset(device)
        drift = (after.offset - before.offset) / (after.at - before.at)
        spans = [(kind, i, *(time + before.offset + round(drift * (time - before.at)) for time in (start, end)), *rest)
                 for kind, i, start, end, *rest in self.spans]
        error = max(before.error, after.error)
        place = f"rank {grid.global_rank}: dp {grid.dp_rank} pp {grid.pp_rank} tp {grid.tp_rank}"
        everyone = [None] * grid.world_size
        dist.all_gather_object(everyone, (place, error, spans))
        self.recording, self.spans, self.before = False, [], None
        if not grid.is_logging_rank:
            return
        late = end_sends_with_receives(everyone)
        origin = min(start for _, _, spans in everyone for _, _, start, *_ in spans)
        events = []
        for rank, (place, _, spans) in enumerate(everyone):
            events += trace_events(rank, place, spans, origin)
        clock_error = sum(sorted(error for _, error, _ in everyone)[-2:]) / 1e3  # between any two of the ranks
        trace = {"traceEvents": events, "displayTimeUnit": "ms",
                 "otherData": {"clock_error_us": clock_error, "sends_noticed_late_us": late / 1e3}}
        with open(path, "w") as file:
            json.dump(trace, file)
        p, m = grid.pp_world_size, num_microbatches
        print(f"timeline: {path}\nbubble: {measured_bubble(everyone):.1%} measured, {(p - 1) / (m + p - 1):.1%} ideal, "
              f"that is (p-1)/(m+p-1) with p={p} stages and m={m} micro-batches", flush=True)


class Transfer:
    """Takes a handle's place, see Timeline.transfer. NCCL's handles order work of the GPU: noted when waited for."""

    def __init__(self, handle, kind: str, microbatch: int, start: int, peer: int):
        self.handle, self.span = handle, (kind, microbatch, start)
        self.peer, self.error, self.thread = peer, None, None
        if dist.get_backend() == "gloo":
            self.thread = threading.Thread(target=self.finish, daemon=True)  # no exit has to wait for a dead peer
            self.thread.start()

    def finish(self) -> None:
        try:
            self.handle.wait()
        except RuntimeError as error:
            self.error = error
        end = time.perf_counter_ns() if self.thread else timeline.now()
        timeline.spans.append((*self.span, end, True, self.peer))

    def wait(self) -> None:
        self.thread.join() if self.thread else self.finish()
        if self.error:
            raise self.error


def end_sends_with_receives(everyone: list[tuple]) -> int:
    """A send has ended by the time it is received, though its own thread may have waited longer for a core to notice.

    So the earlier of the two times counts. Returns by how many nanoseconds a send was noticed late at most.
    """
    received = {(span[5], rank, span[1]): span[3]  # (sender, receiver, micro-batch) -> end
                for rank, (_, _, spans) in enumerate(everyone) for span in spans if span[0] == "receive"}
    latest = 0
    for rank, (_, _, spans) in enumerate(everyone):
        for k, (kind, i, start, end, comm, peer) in enumerate(spans):
            if kind == "send":
                latest = max(latest, end - received[rank, peer, i])
                spans[k] = (kind, i, start, max(start, min(end, received[rank, peer, i])), comm, peer)
    return latest


class ClockOffset(NamedTuple):
    """Nanoseconds: what to add to this rank's clock to get rank 0's, when it stood at `at`; `error`: how far off."""

    offset: int
    error: int
    at: int


def clock_offset(device: torch.device, rounds: int = 10) -> ClockOffset:
    """This rank's clock against rank 0's. Collective."""
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    message, best = torch.zeros(1, dtype=torch.int64, device=wire), None
    for rank in range(1, dist.get_world_size()):
        for _ in range(rounds):
            if dist.get_rank() == 0:
                dist.recv(message, rank)
                dist.send(message.fill_(time.perf_counter_ns()), rank)
            elif dist.get_rank() == rank:
                asked = time.perf_counter_ns()
                dist.send(message, 0)
                dist.recv(message, 0)
                theirs, answered = message.item(), time.perf_counter_ns()
                if best is None or (answered - asked) // 2 < best.error:
                    middle = (asked + answered) // 2
                    best = ClockOffset(theirs - middle, (answered - asked) // 2, middle)
    return best or ClockOffset(0, 0, time.perf_counter_ns())


def trace_events(rank: int, place: str, spans: list[tuple], origin: int) -> list[dict]:
    """Chrome trace events of one rank, in microseconds since `origin`; a transfer takes the first free track."""
    events = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": place}}]
    free_at: list[int] = []  # when each transfer track becomes free
    for kind, microbatch, start, end, communication, peer in sorted(spans, key=lambda span: span[2]):
        track = 0
        if communication:
            track = next((i for i, free in enumerate(free_at, 1) if free <= start), len(free_at) + 1)
            free_at[track - 1 : track] = [end]
        name = kind if microbatch is None else f"{kind} {microbatch}"
        args = {"microbatch": microbatch, "peer": peer}
        events.append({"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": track, "ts": (start - origin) / 1e3,
                       "dur": (end - start) / 1e3,
                       "args": {key: value for key, value in args.items() if value is not None}})
    return events


def measured_bubble(everyone: list[tuple]) -> float:
    """The share of the ranks' time, from the first forward to the last backward, that was neither of the two."""
    compute = [[(start, end) for kind, _, start, end, *_ in spans if kind in COMPUTE_KINDS] for _, _, spans in everyone]
    window = max(end for spans in compute for _, end in spans) - min(start for spans in compute for start, _ in spans)
    busy = sum(end - start for spans in compute for start, end in spans)
    return 1 - busy / (window * len(compute))


timeline = Timeline()
