"""What a step of unlike pipelines will take, without running it: an event simulation of pipeline_parallel's executor.

    optimizer   of the step before: a step is the time from one of these to the next, so a stage that has to wait for
                its first input anyway has this time for free
    compute     each stage goes through the actions of the schedule function as run_schedule does: an action starts when
                the one before has ended and its input has arrived
    transfers   go on in the background: a message leaves once it is sent, its receive is posted (two actions ahead),
                and the one before it to the same stage has left; it takes bytes / bandwidth, and arrives a latency
                later. Messages that use an uplink or a downlink at a time have equal parts of it
    gradients   bucket by bucket, last module first: an all-reduce starts when the last backward of all its owners has
                passed the module and their network is free; a ring of n takes 2 (n-1)/n bytes / bandwidth
                + 2 (n-1) latency
    the end     the loss is summed over all ranks, which therefore wait for each other

Not modelled: a host that computes slower while it sends, except as far as the measured bandwidth includes it.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from pipeline_parallel import Action
from planning.machines import Candidate, Cluster, Pipeline, Setting
from planning.schedules import SCHEDULES, live_microbatches

BUCKET = 25e6  # bytes at most, as in data_parallel


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


class Message(NamedTuple):
    """What an action's result travels in; `source` and `destination` are stages."""

    source: int
    destination: int
    action: Action


class Result(NamedTuple):
    """One step of a candidate. `bubble`: the share of it in which its machines do not compute. `peak_memory`: bytes by
    rank. `pipelines_end`: the second when the last action and its transfer are over, before what is left of the
    gradients."""

    candidate: Candidate
    setting: Setting
    step_seconds: float
    pipelines_end: float
    bubble: float
    bytes_on_wire: float
    peak_memory: dict[int, float]
    spans: list[Span]
    transfers: list[Transfer]


class Flow(NamedTuple):
    """A message that leaves. `left`: its bytes that have not at second `since`; `rate`: bytes a second from then on."""

    message: Message
    left: float
    start: float
    since: float
    rate: float


class PipelineSimulation:
    """The machines of one pipeline from their optimizer step to their last backward. `ends` and `network_free`: by
    stage, the second when its last action and send are over, and when its last transfer in either direction is."""

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
        self.sent, self.arrived = set[Message](), set[Message]()  # before its receive was posted; where it goes
        self.outstanding = [0] * p  # sends, see StageCommunication.send
        self.flows: dict[tuple[int, int], Flow] = {}  # one at a time from a stage to another
        self.leaving = {way: [] for way in self.links}  # messages that wait for those before them
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.ends, self.network_free = [cluster.optimizer_seconds(*pair) for pair in zip(ranks, stages)], [0.0] * p

    def run(self) -> "PipelineSimulation":
        for s, start in enumerate(self.ends):
            self.at(start, self.resume, s)
        while self.events:
            self.now, _, handle, argument = heapq.heappop(self.events)
            handle(argument)
        assert not any(self.is_waiting), f"deadlock: the stages that wait are {self.is_waiting}"
        return self

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
            self.spans.append(Span(self.ranks[s], *action, start, self.now))
            self.ends[s] = self.now
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
        self.leaving[message[:2]].append(message)
        self.use_links(message[:2])

    def use_links(self, way: tuple[int, int]) -> None:
        """Starts the next message on this way, if there is none on it, and shares out its uplink and downlink anew."""
        if way not in self.flows and self.leaving[way]:
            self.flows[way] = Flow(self.leaving[way].pop(0), self.num_bytes, self.now, self.now, 0.0)
        for source, destination in self.with_links_of(way):
            flow, ways = self.flows[source, destination], self.with_links_of((source, destination))
            users = max(sum(a == source for a, _ in ways), sum(b == destination for _, b in ways))
            rate = self.links[source, destination].bandwidth / users
            if rate != flow.rate:
                left = flow.left - flow.rate * (self.now - flow.since)
                self.flows[source, destination] = flow = flow._replace(left=left, since=self.now, rate=rate)
                self.at(self.now + left / rate, self.message_left, flow)

    def with_links_of(self, way: tuple[int, int]) -> list[tuple[int, int]]:
        """The ways on which a message is that uses the uplink or the downlink of this one."""
        near = (way[0], way[0] - 1), (way[0], way[0] + 1), (way[1] - 1, way[1]), (way[1] + 1, way[1])
        return [each for each in dict.fromkeys(near) if each in self.flows]

    def message_left(self, flow: Flow) -> None:
        source, destination, action = flow.message
        if self.flows.get(flow.message[:2]) is not flow:  # it has become slower or faster since
            return
        del self.flows[source, destination]
        self.network_free[source] = self.network_free[destination] = self.now
        self.ends[source] = max(self.ends[source], self.now)
        self.outstanding[source] -= 1
        arrives, ends = self.now + self.links[flow.message[:2]].latency, (self.ranks[source], self.ranks[destination])
        self.transfers.append(Transfer(*action, ends, self.num_bytes, flow.start, arrives))
        self.at(arrives, self.arrives, flow.message)
        self.use_links(flow.message[:2])
        if self.is_waiting[source]:
            self.resume(source)

    def arrives(self, message: Message) -> None:
        self.arrived.add(message)
        if self.is_waiting[message.destination]:
            self.resume(message.destination)


def simulate(cluster: Cluster, candidate: Candidate, setting: Setting, runs: dict | None = None) -> Result:
    """`runs`: results of pipelines, kept for the next call with the same setting."""
    runs, size = {} if runs is None else runs, candidate.micro_batch_size
    for pipeline in candidate.pipelines:
        if (pipeline, size) not in runs:
            runs[pipeline, size] = PipelineSimulation(cluster, pipeline, size, setting).run()
    done = [runs[pipeline, size] for pipeline in candidate.pipelines]
    ranks = [rank for pipeline in candidate.pipelines for rank in pipeline.machines]
    sums = sum_gradients(cluster, candidate, setting, done)
    latency = max((cluster.links[a][b].latency for a, b in zip(ranks, ranks[1:] + ranks[:1]) if a != b), default=0.0)
    pipelines_end = max(end for run in done for end in run.ends)
    step = max([pipelines_end, *(transfer.end for transfer in sums)])
    step += 2 * (len(ranks) - 1) * latency  # the loss's sum over all ranks, a ring as well
    spans = [span for run in done for span in run.spans]
    transfers = [transfer for run in done for transfer in run.transfers] + sums
    busy = sum(span.end - span.start for span in spans)
    memory = {rank: num_bytes for pipeline in candidate.pipelines
              for rank, num_bytes in zip(pipeline.machines, peak_memory(cluster, pipeline, size, setting))}
    num_bytes = sum(transfer.num_bytes for transfer in transfers)
    bubble = 1 - busy / (len(ranks) * step) if step else 0.0
    return Result(candidate, setting, step, pipelines_end, bubble, num_bytes, memory, spans, transfers)


def sum_gradients(cluster: Cluster, candidate: Candidate, setting: Setting, runs: list) -> list[Transfer]:
    """The all-reduces of a step, with data_parallel's buckets: an eighth of a rank's parameters, BUCKET at most."""
    places = [list(zip(p.machines, cluster.stages(p.layers))) for p in candidate.pipelines]
    free, ready, held = {}, {}, 0
    for pipeline, run in zip(places, runs):
        last = {span.rank: span for span in run.spans}  # spans are in the order of time: the last backward of each
        for s, (rank, stage) in enumerate(pipeline):
            held = max(held, cluster.parameters_of(stage))
            free[rank], ready[rank, None] = run.network_free[s], last[rank].end
            passed = cluster.machines[rank].passed[setting.kinds[1]][candidate.micro_batch_size]
            for module in range(*stage):  # backward comes from the end
                ready[rank, module] = last[rank].start + passed[stage[1]] - passed[module]
    limit, sums = min(BUCKET, held * cluster.master_bytes / 8), []
    for owners, module, parameters in buckets(cluster, places, limit):
        num_bytes, n = cluster.gradient_bytes(parameters, setting.gradient_wire_dtype), len(owners) * candidate.replicas
        ring = [cluster.links[a][b] for a, b in zip(owners, owners[1:] + owners[:1]) if a != b]
        ring += [candidate.replica_link] if candidate.replicas > 1 else []
        if not ring:
            continue
        rounds = max(1, round(parameters * cluster.master_bytes / limit))  # a large module is several buckets
        start = max(max(ready[rank, module], free[rank]) for rank in owners)
        end = start + 2 * (n - 1) * (num_bytes / n / min(link.bandwidth for link in ring)
                                     + rounds * max(link.latency for link in ring))
        free.update(dict.fromkeys(owners, end))
        sums.append(Transfer("all-reduce", None, owners, 2 * (n - 1) * num_bytes, start, end))
    return sums


def buckets(cluster: Cluster, places: list[list[tuple]], limit: float):
    """(ranks that own it, the module that completes it, parameters) of each bucket, in the order of their launch.

    The tied parameter comes last; module None stands for the end of backward.
    """
    parameters = 0
    owners_of = [tuple(rank for pipeline in places for rank, stage in pipeline if stage[0] <= module < stage[1])
                 for module in range(len(cluster.names))]
    for module in reversed(range(len(cluster.names))):
        owners = owners_of[module]
        parameters += cluster.parameters[module]
        is_full = parameters * cluster.master_bytes >= limit
        if module == 0 or is_full or owners_of[module - 1] != owners:
            if parameters:
                yield owners, module, parameters
            parameters = 0
    if cluster.tied_parameters:
        ends = tuple(dict.fromkeys(rank for pipeline in places for rank, _ in (pipeline[0], pipeline[-1])))
        yield ends, None, cluster.tied_parameters


def peak_memory(cluster: Cluster, pipeline: Pipeline, size: int, setting: Setting) -> list[float]:
    """Bytes at most, stage by stage, beside what a process takes without a model: parameters with what belongs to them,
    activations of live micro-batches, messages."""
    p, peaks = len(pipeline.machines), []
    for s, stage in enumerate(cluster.stages(pipeline.layers)):
        live = live_microbatches(setting.schedule, s, p, pipeline.num_microbatches)
        activations = cluster.activation_bytes(stage, size, live, setting.kinds[1])
        messages = 4 * size * cluster.hidden_bytes if p > 1 else 0.0  # two posted receives, two sends under way
        peaks.append(cluster.weight_bytes(stage) + activations + messages)
    return peaks
