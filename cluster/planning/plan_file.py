"""The file of a plan: reading and checking it, and fitting it to the hosts that are here."""

import os

from planning.machines import WIRE_DTYPES, load_cluster, model_facts, setting_of
from planning.report import as_plan
from planning.schedules import SCHEDULES
from planning.search import find_plans
from planning.shares import shares_by_speed
from ranks.collectives import from_rank, gather
from ranks.files import read_json
from ranks.lost import is_elastic
from ranks.placement import host_names, is_home, machines, positions_of
from utils import UserError


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
    return from_rank(lacks.index(min(lacks)), read)


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
