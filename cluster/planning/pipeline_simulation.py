"""The micro-batches of one pipeline, without running them: an event simulation of pipeline_parallel's executor.

Each stage goes through the actions of the schedule function as run_schedule does:

    compute     an action starts when the one before has ended and its input has arrived
    transfers   go on in the background: a message leaves once it is sent, its receive is posted (two actions ahead),
                and its sender's uplink and its receiver's downlink are free; it takes bytes / bandwidth, and arrives a
                latency later. Forward and backward messages share the two; a machine can send and receive at once

Not modelled: a host that computes slower while it sends, except as far as the measured bandwidth includes it.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import pipeline_parallel
from pipeline_parallel import Action
from planning.machines import Cluster


def eager_one_f_one_b(stage: int, num_stages: int, num_microbatches: int, ahead: int) -> Iterator[Action]:
    """1F1B whose warm-up is `ahead` times as long: stages compute while messages travel (Zhuang et al. 2023).

    The activations of 1 + ahead * (num_stages - stage - 1) micro-batches are alive at most.
    """
    return pipeline_parallel.one_f_one_b(0, 1 + ahead * (num_stages - stage - 1), num_microbatches)


SCHEDULES = {**pipeline_parallel.SCHEDULES,
             **{f"1f1b-{ahead}": functools.partial(eager_one_f_one_b, ahead=ahead) for ahead in (2, 3, 4)}}


class Pipeline(NamedTuple):
    """One pipeline of a plan: its machines (ranks) in stage order, decoder layers of each, micro-batches a step."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    num_microbatches: int


class Setting(NamedTuple):
    """What the plans of one search have in common. The wire's dtypes: None, float32, bfloat16 or int8."""

    schedule: str = "1f1b"  # one of SCHEDULES
    wire_dtype: str | None = None
    gradient_wire_dtype: str | None = None
    recompute: bool = False  # decoder layers are computed once more in backward

    @property
    def kinds(self) -> str:
        """Forward and backward, as in Machine.passed."""
        return "FR" if self.recompute else "FB"


class Span(NamedTuple):
    """An action that a machine computes; `kind` is F or B."""

    rank: int
    kind: str
    microbatch: int
    start: float
    end: float


class Transfer(NamedTuple):
    """`kind` F: hidden states, B: their gradients, all-reduce: parameters' gradients (microbatch None)."""

    kind: str
    microbatch: int | None
    ranks: tuple[int, ...]  # from, to; all owners
    num_bytes: float  # on the wire, of all ranks together
    start: float
    end: float


class Run(NamedTuple):
    """One pipeline's micro-batches. `ends` and `network_free`: by stage, the second when its last action and send are
    over, and when its last transfer in either direction is."""

    spans: list[Span]
    transfers: list[Transfer]
    ends: list[float]
    network_free: list[float]


class Message(NamedTuple):
    """What an action's result travels in; `source` and `destination` are stages."""

    source: int
    destination: int
    action: Action


class PipelineSimulation:
    """The machines of one pipeline from their optimizer step to their last backward."""

    def __init__(self, cluster: Cluster, pipeline: Pipeline, size: int, setting: Setting):
        ranks, stages, p = pipeline.machines, cluster.stages(pipeline.layers), len(pipeline.machines)
        self.ranks, self.p = ranks, p
        self.actions = [list(SCHEDULES[setting.schedule](s, p, pipeline.num_microbatches)) for s in range(p)]
        self.durations = [{action: cluster.seconds(ranks[s], size, stages[s], kind)
                           for action, kind in zip("FB", setting.kinds)} for s in range(p)]
        self.links = {(a, b): cluster.links[ranks[a]][ranks[b]] for a in range(p) for b in (a - 1, a + 1) if 0 <= b < p}
        self.num_bytes = cluster.message_bytes(size, setting.wire_dtype)
        self.now, self.events, self.order = 0.0, [], count()
        self.stages, self.is_waiting = [self.run_stage(s) for s in range(p)], [False] * p
        self.posted: dict[Message, float] = {}  # when its receive was
        self.sent: set[Message] = set()  # before its receive was posted
        self.arrived: set[Message] = set()
        self.outstanding = [0] * p  # sends, see StageCommunication.send
        self.uplink_busy, self.downlink_busy = [False] * p, [False] * p
        self.leaving: list[list[Message]] = [[] for _ in range(p)]  # those that wait for their uplink
        self.result = Run([], [], [optimizer_seconds(cluster, *pair) for pair in zip(ranks, stages)], [0.0] * p)

    def run(self) -> Run:
        for s, start in enumerate(self.result.ends):
            self.at(start, self.resume, s)
        while self.events:
            self.now, _, handle, argument = heapq.heappop(self.events)
            handle(argument)
        assert not any(self.is_waiting), f"deadlock: the stages that wait are {self.is_waiting}"
        return self.result

    def at(self, time: float, handle: Callable, argument) -> None:
        heapq.heappush(self.events, (time, next(self.order), handle, argument))

    def resume(self, s: int) -> None:
        """Lets a stage go on until it computes or waits."""
        seconds = next(self.stages[s], math.inf)  # inf: it has ended
        self.is_waiting[s] = seconds is None
        if seconds is not None and seconds < math.inf:
            self.at(self.now + seconds, self.resume, s)

    def run_stage(self, s: int) -> Iterator[float | None]:
        """What run_schedule does on a stage. Yields the seconds of an action, or None to wait for the network."""
        for k, action in enumerate(self.actions[s]):
            for upcoming in self.actions[s][k : k + 3]:
                self.post_receive(s, upcoming)
            source = self.neighbour(s, action.kind, -1)
            while source is not None and Message(source, s, action) not in self.arrived:
                yield None
            start = self.now
            yield self.durations[s][action.kind]
            self.result.spans.append(Span(self.ranks[s], *action, start, self.now))
            self.result.ends[s] = self.now
            self.send(s, action)
            while self.outstanding[s] > 2 * self.p:
                yield None

    def neighbour(self, s: int, kind: str, step: int) -> int | None:
        """The stage that an action of this kind sends to (step 1) or receives from (step -1)."""
        other = s + step if kind == "F" else s - step
        return other if 0 <= other < self.p else None

    def post_receive(self, s: int, action: Action) -> None:
        source = self.neighbour(s, action.kind, -1)
        message = Message(source, s, action)
        if source is None or message in self.posted:
            return
        self.posted[message] = self.now
        if message in self.sent:  # its sender has to learn of the receive
            self.at(self.now + self.links[s, source].latency, self.may_leave, message)

    def send(self, s: int, action: Action) -> None:
        destination = self.neighbour(s, action.kind, 1)
        if destination is None:
            return
        message = Message(s, destination, action)
        self.outstanding[s] += 1
        if message in self.posted:
            heard = self.posted[message] + self.links[destination, s].latency
            self.at(max(self.now, heard), self.may_leave, message)
        else:
            self.sent.add(message)

    def may_leave(self, message: Message) -> None:
        self.leaving[message.source].append(message)
        self.use_uplink(message.source)

    def use_uplink(self, source: int) -> None:
        """Starts the first message whose receiver can take it, if the uplink is free."""
        for i, message in enumerate(self.leaving[source]):
            if not self.uplink_busy[source] and not self.downlink_busy[message.destination]:
                del self.leaving[source][i]
                self.uplink_busy[source] = self.downlink_busy[message.destination] = True
                link = self.links[source, message.destination]
                end = self.now + self.num_bytes / link.bandwidth
                ends = (self.ranks[source], self.ranks[message.destination])
                self.result.transfers.append(
                    Transfer(*message.action, ends, self.num_bytes, self.now, end + link.latency))
                self.at(end, self.message_left, message)
                return

    def message_left(self, message: Message) -> None:
        source, destination, _ = message
        self.uplink_busy[source] = self.downlink_busy[destination] = False
        self.result.network_free[source] = self.result.network_free[destination] = self.now
        self.result.ends[source] = max(self.result.ends[source], self.now)
        self.outstanding[source] -= 1
        self.at(self.now + self.links[source, destination].latency, self.arrives, message)
        if self.is_waiting[source]:
            self.resume(source)
        for sender in (destination - 1, destination + 1):  # the source is one of them
            if 0 <= sender < self.p:
                self.use_uplink(sender)

    def arrives(self, message: Message) -> None:
        self.arrived.add(message)
        if self.is_waiting[message.destination]:
            self.resume(message.destination)


def optimizer_seconds(cluster: Cluster, rank: int, stage: tuple[int, int]) -> float:
    """The optimizer step of a stage, which starts when the loss of the step before is known."""
    return cluster.parameters_of(stage) * cluster.machines[rank].optimizer_seconds
