"""Plans as a file for train_distributed.py, and in words: what each will take."""

import collections
import math

from planning.machines import Cluster
from planning.search import EVEN, Plans
from planning.simulate import Result
from utils import to_readable_format

EXCHANGED = 0.05  # part of the time that exchanges take, at most, where local steps are many enough


def as_plan(cluster: Cluster, result: Result) -> dict:
    """The content of plan.json. Machines are the ranks that measured, in stage order; those in no pipeline idle."""
    pipelines, size, *_ = result.candidate
    return {
        "model_name": cluster.model_name, "model": cluster.model, "seq_len": cluster.seq_len, "dtype": cluster.dtype,
        "global_batch": size * sum(pipeline.num_microbatches for pipeline in pipelines), "micro_batch_size": size,
        **result.setting.for_pipelines([pipeline.layers for pipeline in pipelines])._asdict(),
        "hosts": cluster.hosts, **{flag: cluster.flags.get(flag) for flag in ("lora_rank", "base_bits")},
        "pipelines": [{"machines": list(pipeline.machines), "layers": list(pipeline.layers),
                       "num_microbatches": pipeline.num_microbatches} for pipeline in pipelines],
        "predicted": {"step_seconds": result.step_seconds, "bubble": result.bubble,
                      "bytes_on_wire": result.bytes_on_wire,
                      "peak_memory": {str(rank): peak for rank, peak in sorted(result.peak_memory.items())}},
    }


def describe(cluster: Cluster, result: Result) -> list[str]:
    """Two lines: what a plan takes; its pipelines and machines in the words of train.py's flags."""
    pipelines, size, *_ = result.candidate
    tokens = size * sum(pipeline.num_microbatches for pipeline in pipelines) * cluster.seq_len
    used = [rank for pipeline in pipelines for rank in pipeline.machines]
    idle = [rank for rank in range(len(cluster.machines)) if rank not in used]
    peaks = ", ".join(f"{result.peak_memory[rank] / 1e6:.0f}" for rank in used)
    layers = ";".join(",".join(map(str, pipeline.layers)) for pipeline in pipelines)
    shares = ",".join(str(pipeline.num_microbatches) for pipeline in pipelines)
    machines = "; ".join(",".join(map(str, pipeline.machines)) for pipeline in pipelines)
    return [f"{result.step_seconds:.4g} s a step | {to_readable_format(tokens / result.step_seconds)} tokens/s | "
            f"bubble {result.bubble:.0%} | {result.bytes_on_wire / 1e6:.3g} MB on the wire | peak memory {peaks} MB",
            f'--pipelines "{layers}" --num_microbatches "{shares}" --micro_batch_size {size}'
            + (" --recompute" if result.setting.recompute else "") + f" | machines {machines}"
            + (f" | idle: {', '.join(map(str, idle))}" if idle else "")]


def report(cluster: Cluster, plans: Plans, top: int) -> str:
    """The best few plans, then the uniform ones against the best."""
    names = ", ".join(f"{rank} {machine.host}" for rank, machine in enumerate(cluster.machines))
    lines = [f"machines: {names}", f"{plans.num_simulated} plans simulated"]
    for i, result in enumerate(plans.best[:top], 1):
        first, second = describe(cluster, result)
        lines += [f"{i:2}. {first}", f"    {second}"]
    best = plans.best[0].step_seconds
    for name, result in plans.uniform.items():
        if not result:
            lines.append(f"{name}: not possible, there are too few layers or samples, or too little memory")
        elif result.step_seconds <= best:
            lines.append(f"{name}: this is the best plan")
        else:
            ratio = result.step_seconds / best
            lines.append(f"{name}: {ratio:.2f} times the best plan's step, {result.step_seconds:.4g} s")
    if result := plans.uniform.get(EVEN):
        lines.append(describe_local_steps(cluster, result))
    return "\n".join(lines)


def describe_local_steps(cluster: Cluster, result: Result) -> str:
    """What replicas gain that exchange seldom. `result`: of the plan by which each machine takes an even share."""
    pipelines, size, *_ = result.candidate
    busy, tokens = collections.Counter(), {each.machines[0]: each.num_microbatches * size * cluster.seq_len
                                           for each in pipelines}
    for span in result.spans:
        busy[span.rank] += span.end - span.start
    exchange = sum(each.end - each.start for each in result.transfers if each.kind == "all-reduce")
    speed = sum(count / busy[rank] for rank, count in tokens.items())
    seconds = sum(tokens.values()) / speed  # of a local step of that many samples in the mean
    steps = max(1, math.ceil(exchange * (1 / EXCHANGED - 1) / seconds))
    return (f"local steps: {exchange:.3g} s to exchange, {seconds:.3g} s to compute a step: --local_steps {steps} "
            f"keeps exchanges below {EXCHANGED:.0%} of the time, with "
            f"{to_readable_format(speed * (1 - EXCHANGED))} tokens/s, and trains by other mathematics")
