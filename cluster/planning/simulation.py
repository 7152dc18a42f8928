"""What a step of unlike pipelines will take, without running it: the pipelines' events, then gradients, loss, memory.

pipeline_simulation executes the actions of the schedule as run_schedule does. Then:

    gradients   bucket by bucket, last module first: an all-reduce starts when the last backward of all its owners has
                passed the module and their network is free; a ring of n takes 2 (n-1)/n bytes / bandwidth
                + 2 (n-1) latency
    the end     the loss is summed over all ranks, which therefore wait for each other

A step is one period of this. It begins with the optimizer of the step before, so that a stage that has to wait for its
first input anyway has this time for free.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

from planning.machines import Cluster, Link
from planning.pipeline_simulation import SCHEDULES, Pipeline, PipelineSimulation, Run, Setting, Span, Transfer

BUCKET = 25e6  # bytes at most, as in data_parallel


class Candidate(NamedTuple):
    """`replicas`: how many copies of these pipelines there are, on like machines; `replica_link`: between them."""

    pipelines: tuple[Pipeline, ...]
    micro_batch_size: int
    replicas: int = 1
    replica_link: Link | None = None


class Result(NamedTuple):
    """`bubble`: the share of the step in which the machines of the plan do not compute. `peak_memory`: bytes by rank.
    `pipelines_end`: the second when the last action and its transfer are over, before what is left of the gradients."""

    step_seconds: float
    pipelines_end: float
    bubble: float
    bytes_on_wire: float
    peak_memory: dict[int, float]
    spans: list[Span]
    transfers: list[Transfer]


def simulate(cluster: Cluster, candidate: Candidate, setting: Setting, runs: dict | None = None) -> Result:
    """One step of a candidate. `runs`: results of pipelines, kept for the next call with the same setting."""
    runs, size = {} if runs is None else runs, candidate.micro_batch_size
    done = [run_pipeline(cluster, pipeline, size, setting, runs) for pipeline in candidate.pipelines]
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
    return Result(step, pipelines_end, bubble, num_bytes, memory, spans, transfers)


def run_pipeline(cluster: Cluster, pipeline: Pipeline, size: int, setting: Setting, runs: dict) -> Run:
    if (pipeline, size) not in runs:
        runs[pipeline, size] = PipelineSimulation(cluster, pipeline, size, setting).run()
    return runs[pipeline, size]


def lower_bound(cluster: Cluster, candidate: Candidate, setting: Setting) -> float:
    """Seconds that no simulated step is shorter than: what each stage computes, after the first micro-batch has come to
    it and before the last one has gone back; what its uplink carries; its gradients after its last backward."""
    size, n, bound = candidate.micro_batch_size, len(candidate.pipelines), 0.0
    message = cluster.message_bytes(size, setting.wire_dtype)
    ranks = {rank for pipeline in candidate.pipelines for rank in pipeline.machines}
    for machines, layers, number in candidate.pipelines:
        before, others = 0.0, ranks.difference(machines)
        for s, (rank, stage) in enumerate(zip(machines, cluster.stages(layers))):
            forward, backward = (cluster.seconds(rank, size, stage, kind) for kind in setting.kinds)
            computed = before + number * (forward + backward)
            neighbours = [machines[t] for t in (s - 1, s + 1) if 0 <= t < len(machines)]
            sent = sum(number * message / cluster.links[rank][other].bandwidth for other in neighbours)
            bound = max(bound, computed, sent)
            if others:
                num_bytes = cluster.gradient_bytes(cluster.parameters_of(stage), setting.gradient_wire_dtype)
                fastest = max(cluster.links[rank][other].bandwidth for other in others)
                bound = max(bound, computed - backward + 2 * (n - 1) / n * num_bytes / fastest)
            before += forward + backward
            if s + 1 < len(machines):
                there, back = cluster.links[rank][machines[s + 1]], cluster.links[machines[s + 1]][rank]
                before += sum(message / link.bandwidth + link.latency for link in (there, back))
    return bound


def sum_gradients(cluster: Cluster, candidate: Candidate, setting: Setting, runs: list[Run]) -> list[Transfer]:
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


@cache
def live_microbatches(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches at most whose activations a stage holds: what the schedule's own order says."""
    actions = SCHEDULES[schedule](stage, num_stages, num_microbatches)
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))
