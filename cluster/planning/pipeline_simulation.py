"""The micro-batches of one pipeline, without running them: an event simulation of pipeline_parallel's executor.

It asks the schedule function for each stage's actions, and does with them what run_schedule does:

    compute     an action starts when the one before has ended and its input has arrived
    transfers   go on in the background: a message leaves once it is sent and its receive is posted (one action ahead),
                and its sender's uplink and its receiver's downlink are free; it takes bytes / bandwidth, and arrives a
                latency later. Forward and backward messages share the two, each machine can send and receive at once

What it leaves out: that a host computes slower while it sends, but for what the measured bandwidth has of it.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from planning.machines import Cluster
from pipeline_parallel import Action, one_f_one_b


class Pipeline(NamedTuple):
    """One pipeline of a plan: its machines (ranks) in stage order, decoder layers of each, micro-batches a step."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    num_microbatches: int


class Setting(NamedTuple):
    """What the plans of one search have in common. The wire's dtypes: None, bfloat16 or int8."""

    schedule: Callable = one_f_one_b
    wire_dtype: str | None = None
    gradient_wire_dtype: str | None = None


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
    """One pipeline's micro-batches. `ends` and `network_free`: by stage, the second that its last action and send, and
    its last transfer of any kind, are over."""

    spans: list[Span]
    transfers: list[Transfer]
    ends: list[float]
    network_free: list[float]


class PipelineSimulation:
    """The machines of one pipeline until their last backward; other pipelines matter only where gradients are summed.

    A message is named by (receiving stage, action): there is one at most for each action of a stage.
    """

    def __init__(self, cluster: Cluster, pipeline: Pipeline, size: int, setting: Setting):
        ranks, stages, p = pipeline.machines, cluster.stages(pipeline.layers), len(pipeline.machines)
        self.ranks, self.p = ranks, p
        self.actions = [list(setting.schedule(s, p, pipeline.num_microbatches)) for s in range(p)]
        self.durations = [{kind: cluster.seconds(ranks[s], kind, size, stages[s]) for kind in "FB"} for s in range(p)]
        self.links = {(a, b): cluster.links[ranks[a]][ranks[b]] for a in range(p) for b in (a - 1, a + 1) if 0 <= b < p}
        self.num_bytes = cluster.message_bytes(size, setting.wire_dtype)
        self.position, self.clock = [0] * p, [start_of_step(cluster, *pair) for pair in zip(ranks, stages)]
        self.posted: dict[tuple[int, Action], float] = {}
        self.sent: set[tuple[int, Action]] = set()  # without a posted receive
        self.arrived: set[tuple[int, Action]] = set()
        self.awaited: list[tuple[int, Action] | None] = [None] * p
        self.outstanding, self.is_blocked = [0] * p, [False] * p  # sends, see StageCommunication.send
        self.uplink_busy, self.downlink_busy = [False] * p, [False] * p
        self.leaving: list[list[tuple[int, Action]]] = [[] for _ in range(p)]  # messages that wait for their uplink
        self.events: list[tuple] = []
        self.order = count()
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.network_free = [0.0] * p
        self.ends = list(self.clock)

    def run(self) -> Run:
        for s, start in enumerate(self.clock):
            self.at(start, self.next_action, s)
        while self.events:
            now, _, handle, argument = heapq.heappop(self.events)
            handle(now, argument)
        left = {s: actions[k] for s, (k, actions) in enumerate(zip(self.position, self.actions)) if k < len(actions)}
        assert not left, f"deadlock: the stages wait for {left}"
        return Run(self.spans, self.transfers, self.ends, self.network_free)

    def at(self, time: float, handle: Callable, argument) -> None:
        heapq.heappush(self.events, (time, next(self.order), handle, argument))

    def neighbour(self, s: int, kind: str, step: int) -> int | None:
        """The stage that an action of this kind sends to (step 1) or receives from (step -1)."""
        other = s + step if kind == "F" else s - step
        return other if 0 <= other < self.p else None

    def next_action(self, now: float, s: int) -> None:
        """Posts the receives of this action and the next, and starts this one or waits for its input."""
        k, actions = self.position[s], self.actions[s]
        for action in actions[k : k + 2]:
            message = (s, action)
            source = self.neighbour(s, action.kind, -1)
            if source is not None and message not in self.posted:
                self.posted[message] = now
                if message in self.sent:  # its sender has to learn of the receive
                    self.at(now + self.links[s, source].latency, self.may_leave, message)
        if k == len(actions):
            return
        if self.neighbour(s, actions[k].kind, -1) is not None and (s, actions[k]) not in self.arrived:
            self.awaited[s] = (s, actions[k])
            return
        end = now + self.durations[s][actions[k].kind]
        self.spans.append(Span(self.ranks[s], *actions[k], now, end))
        self.at(end, self.action_done, s)

    def action_done(self, now: float, s: int) -> None:
        action = self.actions[s][self.position[s]]
        self.position[s] += 1
        self.ends[s] = now
        destination = self.neighbour(s, action.kind, 1)
        if destination is not None:
            message = (destination, action)
            self.outstanding[s] += 1
            if message in self.posted:
                heard = self.posted[message] + self.links[destination, s].latency
                self.at(max(now, heard), self.may_leave, message)
            else:
                self.sent.add(message)
            if self.outstanding[s] > 2 * self.p:
                self.is_blocked[s] = True
                return
        self.next_action(now, s)

    def may_leave(self, now: float, message: tuple[int, Action]) -> None:
        source = self.neighbour(message[0], message[1].kind, -1)
        self.leaving[source].append(message)
        self.use_uplink(now, source)

    def use_uplink(self, now: float, source: int) -> None:
        """Starts the first message whose receiver can take it, if the uplink is free."""
        if self.uplink_busy[source]:
            return
        for i, message in enumerate(self.leaving[source]):
            destination, action = message
            if not self.downlink_busy[destination]:
                del self.leaving[source][i]
                self.uplink_busy[source] = self.downlink_busy[destination] = True
                link = self.links[source, destination]
                end = now + self.num_bytes / link.bandwidth
                ends = (self.ranks[source], self.ranks[destination])
                self.transfers.append(Transfer(*action, ends, self.num_bytes, now, end + link.latency))
                self.at(end, self.message_left, message)
                return

    def message_left(self, now: float, message: tuple[int, Action]) -> None:
        destination, action = message
        source = self.neighbour(destination, action.kind, -1)
        self.uplink_busy[source] = self.downlink_busy[destination] = False
        self.network_free[source] = self.network_free[destination] = now
        self.ends[source] = max(self.ends[source], now)
        self.outstanding[source] -= 1
        self.at(now + self.links[source, destination].latency, self.arrives, message)
        if self.is_blocked[source]:
            self.is_blocked[source] = False
            self.next_action(now, source)
        for sender in (destination - 1, destination + 1):  # the source is one of them
            if 0 <= sender < self.p:
                self.use_uplink(now, sender)

    def arrives(self, now: float, message: tuple[int, Action]) -> None:
        self.arrived.add(message)
        if self.awaited[message[0]] == message:
            self.awaited[message[0]] = None
            self.next_action(now, message[0])


def start_of_step(cluster: Cluster, rank: int, stage: tuple[int, int]) -> float:
    """Seconds until a machine that knows the loss of one step begins with the next."""
    machine = cluster.machines[rank]
    return cluster.parameters_of(stage) * machine.optimizer_seconds + machine.step_overhead
