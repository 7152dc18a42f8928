"""A plan as a file for train_distributed.py: reading and checking it, and fitting it to the hosts that are here. And
plans in words: what each will take."""

import collections
import math
import os

from planning.machines import WIRE_DTYPES, Cluster, load_cluster, model_facts, setting_of
from planning.schedules import SCHEDULES
from planning.search import EVEN, Plans, find_plans
from planning.shares import shares_by_speed
from planning.simulate import Result
from ranks.collectives import gather, once
from ranks.files import read_json
from ranks.lost import is_elastic
from ranks.placement import host_names, is_home, machines, positions_of
from utils import UserError, to_readable_format

EXCHANGED = 0.05  # part of the time that exchanges take, at most, where local steps are many enough


def machines_of(plan: dict) -> list[int]:
    """The ranks in the plan's order."""
    return [rank for pipeline in plan["pipelines"] for rank in pipeline["machines"]]


def samples_of(plan: dict) -> list[int]:
    """Of a step, by pipeline: its `samples`, or else those of its `num_microbatches`."""
    return [pipeline["samples"] if "samples" in pipeline else plan["micro_batch_size"] * pipeline["num_microbatches"]
            for pipeline in plan["pipelines"]]


def plan_of_file(path: str, cluster_json: str) -> dict:
    """The plan of a rank that has the file, home_rank() first, for the hosts that are here. Collective.

    In an elastic run on other hosts than the plan's, that rank plans anew. Raises UserError, on all ranks.
    """
    def read() -> dict:
        plan = read_json(path, checked_plan, "use cluster/plan.py")
        hosts = host_names(machines(), plan["hosts"])
        if is_elastic() and sorted(hosts) == sorted(plan["hosts"]):
            return in_order(plan, hosts)  # an elastic run has ranks in an order of its own
        if is_elastic():
            return plan_for(hosts, plan, cluster_json)
        if hosts != plan["hosts"]:
            raise UserError(f"the plan is for processes on {', '.join(plan['hosts'])}, but they run on "
                            f"{', '.join(hosts)}: start them in the order of plan.py --measure, or measure again")
        return plan

    lacks = gather((not os.path.isfile(path), not is_home()))
    return once(lacks.index(min(lacks)), read)


def checked_plan(plan: dict) -> dict:
    """The content of plan.json. Raises ValueError, or what else a wrong type brings, where it makes no sense."""
    pipelines, used = plan["pipelines"], machines_of(plan)
    if plan["schedule"] not in SCHEDULES:
        raise ValueError(f"schedule {plan['schedule']!r} is none of {', '.join(SCHEDULES)}")
    if any(("samples" in p) == ("num_microbatches" in p) for p in pipelines):
        raise ValueError("each of its pipelines has to have either num_microbatches or samples")
    numbers = [plan["micro_batch_size"], plan["seq_len"],
               *(p.get("samples", p.get("num_microbatches")) for p in pipelines),
               *(count for p in pipelines for count in p["layers"])]
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"it has sizes, layers or micro-batches that are no positive numbers: {numbers}")
    if not {plan.get("wire_dtype"), plan.get("gradient_wire_dtype")} <= {None, *WIRE_DTYPES}:
        raise ValueError(f"its wire dtypes are none of {', '.join(WIRE_DTYPES)}")
    fits = isinstance(plan["dtype"], str) and isinstance(plan["model"], dict)
    fits = fits and pipelines and all(isinstance(host, str) for host in plan["hosts"])
    fits = fits and all(len(pipeline["layers"]) == len(pipeline["machines"]) for pipeline in pipelines)
    if not fits or sorted(used) != sorted({*used} & {*range(len(plan["hosts"]))}):
        raise ValueError(f"machines {used} of {len(plan['hosts'])} hosts, each once, with its layers")
    return plan


def in_order(plan: dict, hosts: list[str]) -> dict:
    """The plan for the same hosts in another order."""
    positions = positions_of(plan["hosts"], hosts)
    for pipeline in plan["pipelines"]:
        pipeline["machines"] = [positions[machine] for machine in pipeline["machines"]]
    return {**plan, "hosts": hosts}


def plan_for(hosts: list[str], plan: dict, cluster_json: str) -> dict:
    """A plan with the same global batch for `hosts`, of which those that were not measured are idle. Raises UserError
    where there is none."""
    try:
        total, size = plan["global_batch"], plan["micro_batch_size"]
        cluster = load_cluster(cluster_json)
        positions = positions_of(hosts, cluster.hosts)
        ranks = [rank for rank, position in enumerate(positions) if position is not None]
        cluster = cluster.only([positions[rank] for rank in ranks])
        plans = find_plans(cluster, -(-total // size) * size, setting_of(plan), [size])
        made = as_plan(cluster, plans.best[0])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"no plan for {', '.join(hosts)}: {cluster_json}: {error}") from None
    for pipeline in made["pipelines"]:
        pipeline["machines"] = [ranks[k] for k in pipeline["machines"]]
    if total % size:  # not in whole micro-batches
        shares = shares_by_speed(total, [1 / pipeline.pop("num_microbatches") for pipeline in made["pipelines"]])
        for pipeline, share in zip(made["pipelines"], shares):
            pipeline["samples"] = share
    return {**made, "global_batch": total, "hosts": hosts}


def require_same_model(plan: dict, config, dtype: str, args) -> None:
    """Raises UserError where the plan is for another model, --dtype, --seq_len, --lora_rank or --base_bits."""
    lora = {flag: getattr(args, flag, None) for flag in ("lora_rank", "base_bits")}
    here = {**vars(config), **model_facts(config), "dtype": dtype, "seq_len": args.seq_len, **lora}
    facts = {**plan["model"], **{name: {**lora, **plan}[name] for name in ("dtype", "seq_len", *lora)}}.items()
    if unlike := [f"{name} {value} (here {here.get(name)})" for name, value in facts if here.get(name) != value]:
        raise UserError(f"the plan is for {', '.join(unlike)}: make a plan for this run with cluster/plan.py")


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
