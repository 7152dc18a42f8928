"""How long a dry run's rank would take on a machine, and what its pipeline would do meanwhile.

    an operation    its floating-point operations by the device's rate, or the bytes that it reads and writes by that of
                    its memory, whichever takes longer
    a collective    the bytes that a rank sends around a ring, by the rate of its slowest link, and a latency for each
                    doubling of its ranks. One after the other along each axis; what nobody waits for is hidden.
                    Of an all-to-all, what leaves the machine goes through the rank's own port
    a pipeline      its schedule, in which every stage takes for an action as long as the rank of its kind. A step ends
                    with the last stage of all

What is left out: how the rate depends on the sizes of matrices, launches of kernels, and what a rank waits for another
one that computes longer, but for the stages of pipelines.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lab.watch.dry_run import DryRun as Rank
from lab.watch.memory import Event
from lab.watch.schedule import play
from sizes.data_sheets import LINK_SHARE, MODEL, NODE_LATENCY, Node, Shape

ACTIONS = {"forward": "F", "backward": "B", "weight gradients": "W"}


class Machine(NamedTuple):
    """Rates of one rank's device, in FLOP/s and bytes/s. `per_machine` ranks share what is inside of a machine. Of the
    FLOP/s of its data sheet, matrix products reach the share `efficiency`, which is in `flops` already."""

    flops: dict[torch.dtype, float]
    memory: float
    inside: float
    between: float
    per_machine: int
    latency: float
    efficiency: float = 1.0

    def seconds_of(self, flops: float, num_bytes: float, dtype: torch.dtype | None) -> float:
        rate = self.flops.get(dtype, self.flops[torch.float32])
        return max(flops / rate, num_bytes / self.memory)

    def machines(self, ranks: Sequence[int]) -> int:
        return len({rank // self.per_machine for rank in ranks})

    def link(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Rate and latency of a ring of these ranks. Those inside one machine have a port each."""
        if (machines := self.machines(ranks)) == 1:
            return self.inside, NODE_LATENCY
        return min(self.inside, self.between * len(ranks) / machines), self.latency

    def seconds_to_send(self, event: Event) -> float:
        ranks = event.group if event.peer is None else (event.peer, event.rank)
        rate, latency = self.link(ranks)
        if event.kind == "all_to_all_single":
            leaves = len(ranks) * (1 - 1 / self.machines(ranks)) / (len(ranks) - 1)  # of what is sent to each other one
            rate = min(self.inside, self.between / leaves) if leaves else self.inside
        return event.num_bytes / rate + latency * (math.ceil(math.log2(len(event.group))) if event.peer is None else 1)


def machine_of(node: Node, efficiency: float) -> Machine:
    device = node.device
    rates = {torch.float32: device.float32, torch.bfloat16: device.bfloat16 or device.float32}
    return Machine({dtype: rate * efficiency for dtype, rate in rates.items()}, device.memory_bandwidth,
                   device.node_link * LINK_SHARE, node.network / node.count * LINK_SHARE, node.count, device.latency,
                   efficiency)


class Span(NamedTuple):
    name: str
    start: float
    end: float
    track: str = "computes"


class Clock:
    """What a rank does one after the other, as if its pipeline never kept it waiting: `spans`, among them the actions
    (kind, micro-batch, chunk) -> (start, end); `computing`, of this what is `bound_by_memory`, and what it waits for
    along each axis, in seconds.

    `seconds` of an action of each (kind, chunk) are the median, since the last ones also wait for what dp sends. A step
    has once what is more than these, `late`."""

    def __init__(self, rank: Rank, machine: Machine):
        self.now, self.computing, self.bound_by_memory, self.exposed, self.spans = 0.0, 0.0, 0.0, Counter(), []
        self.actions: dict[tuple, tuple[float, float]] = {}
        self.free, self.ends, open_phase = Counter(), {}, None
        for entry in rank.count.log:
            if isinstance(entry, Event):
                self.communicate(entry, machine)
            elif entry[0] == "compute":
                self.now += entry[1]
                self.computing += entry[1]
                self.bound_by_memory += entry[1] * (entry[1] > entry[2])
            elif entry[0] == "wait":
                axis, end = self.ends.get(entry[1], ("", 0.0))
                self.wait(axis, end)
            elif entry[0] == "begin":
                open_phase = entry[1:], self.now
            else:
                (kind, microbatch, chunk), start = open_phase
                if kind in ACTIONS and microbatch is not None:
                    self.actions[ACTIONS[kind], microbatch, chunk] = start, self.now
                self.spans.append(Span(kind if microbatch is None else f"{kind} {microbatch}", start, self.now))
        durations: dict[tuple, list[float]] = {}
        for (kind, _, chunk), (start, end) in self.actions.items():
            durations.setdefault((kind, chunk), []).append(end - start)
        self.seconds = {key: statistics.median(each) for key, each in durations.items()}
        usual = sum(self.seconds[kind, chunk] for kind, _, chunk in self.actions)
        self.late = self.end_of_actions - usual

    def wait(self, axis: str, end: float) -> None:
        self.exposed[axis] += max(end - self.now, 0.0)
        self.now = max(end, self.now)

    def communicate(self, event: Event, machine: Machine) -> None:
        if event.axis == "pp" and event.peer is not None:  # play() says when messages of a pipeline arrive
            return
        track = f"{event.axis} {'receive' if event.kind == 'receive' else 'send'}"
        start = max(self.now, self.free[track])
        end = self.free[track] = start + machine.seconds_to_send(event)
        if event.peer is not None:  # the next message does not wait for this one's latency
            self.free[track] -= machine.link((event.peer, event.rank))[1]
        self.spans.append(Span(event.kind, start, end, event.axis))
        if event.handle is None:
            self.wait(event.axis, end)
        else:
            self.ends[event.handle] = event.axis, end

    @property
    def end_of_actions(self) -> float:
        return max((end for _, end in self.actions.values()), default=0.0)


class Prediction(NamedTuple):
    """Seconds of a step, and what they go to on a rank. `flops`: a rank's share of the model's, by which MFU counts
    them, mfu = flops / (seconds x peak). `stages`: the actions of each stage of the pipeline."""

    seconds: float
    computing: float
    exposed: dict[str, float]
    bubble: float
    flops: float
    mfu: float
    stages: list[dict]


def play_pipeline(some: dict[int, tuple[Rank, Clock]], machine: Machine) -> tuple[list[dict], float]:
    """The actions of each stage of a pipeline, (kind, micro-batch, chunk) -> (start, end), and when the last stage ends
    its step. `some`: stage -> its rank. The other stages are like the second one. Raises ValueError for a schedule that
    never ends."""
    first = next(iter(some.values()))[0]
    ranks, size = first.pipeline(), first.grid.pp_world_size
    if not first.schedule or size == 1:
        return [], max(clock.now for _, clock in some.values())
    messages = [each for rank, _ in some.values() for each in rank.count.log
                if isinstance(each, Event) and each.axis == "pp" and each.peer is not None]
    largest = max(messages, key=lambda each: each.num_bytes)
    clocks = [(some.get(stage) or some[1])[1] for stage in range(size)]
    played = play([first.schedule(stage, size, first.microbatches) for stage in range(size)],
                  lambda stage, *key: clocks[stage].seconds.get(key, 0.0), hop=lambda a, b: machine.seconds_to_send(
                      largest._replace(rank=ranks[a], peer=ranks[b])))
    if unfinished := [stage for stage, left in enumerate(played.left) if left]:
        raise ValueError(f"the schedule never ends: stages {unfinished} wait for each other")
    stages = [{span[:3]: (span.start, span.end) for span in spans} for spans in played.spans]
    return stages, max(max(end for _, end in actions.values()) + clock.late + clock.now - clock.end_of_actions
                       for actions, clock in zip(stages, clocks))


def predict(rank: Rank, clock: Clock, machine: Machine, kinds: list[tuple[Rank, Clock]]) -> Prediction:
    """`kinds`: what rank.kinds() names, and their clocks, of all pipelines whose steps end together."""
    own, pipelines = rank.grid.dp_rank, {}
    for each in kinds:
        pipelines.setdefault(each[0].grid.dp_rank, {})[each[0].grid.pp_rank] = each
    played = {pipeline: play_pipeline(some, machine) for pipeline, some in pipelines.items()}
    seconds = max(clock.now, *(end for _, end in played.values()))
    peak = machine.flops.get(rank.dtype, machine.flops[torch.float32]) / machine.efficiency
    flops = rank.tokens * flops_per_token(rank.config, rank.args.seq_len) / rank.grid.world_size
    return Prediction(seconds, clock.computing, {axis: value for axis, value in clock.exposed.items() if value > 0},
                      seconds - clock.now, flops, flops / (seconds * peak), played[own][0])


def flops_per_token(config, seq_len: int) -> float:
    shape = Shape(*(getattr(config, name) for name in MODEL), config.head_dim)
    experts = getattr(config, "num_experts", 0)
    return shape.flops(seq_len, experts, config.experts_per_token if experts else 1)


def write_trace(path: str, rank: Rank, clock: Clock, found: Prediction) -> None:
    """A timeline in Chrome's format, for https://ui.perfetto.dev: a process for each stage, this rank's with what it
    sends in the background."""
    own, events = getattr(rank.grid, "pp_rank", 0), []

    def add(name: str, start: float, end: float, stage: int, track: str) -> None:
        events.append({"name": name, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6, "pid": stage,
                       "tid": track})

    for stage, actions in enumerate(found.stages):
        events.append({"name": "process_name", "ph": "M", "pid": stage, "args": {
            "name": f"stage {stage}" + (f", rank {rank.grid.global_rank}" if stage == own else "")}})
        for (kind, i, chunk), (start, end) in actions.items():
            add(f"{kind}{i}" + f" of chunk {chunk}" * (chunk > 0), start, end, stage, "computes")
    in_actions = sorted((start, found.stages[own][key][0]) for key, (start, _) in clock.actions.items()
                        ) if found.stages else []
    for name, start, end, track in clock.spans:
        if found.stages and track == "computes" and start < clock.end_of_actions:
            continue  # an action, which is there
        earlier = [new - old for old, new in in_actions if old <= start]
        shift = found.bubble if start >= clock.end_of_actions else earlier[-1] if earlier else 0.0
        add(name, start + shift, end + shift, own, track)
    with open(path, "w") as file:
        json.dump({"traceEvents": events}, file)
