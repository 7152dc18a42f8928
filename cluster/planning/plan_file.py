"""The file of a plan: reading and checking it, and fitting it to the hosts that are here."""

import json

import torch.distributed as dist

from planning.machines import WIRE_DTYPES, model_facts, read_cluster, setting_of, some_of
from planning.report import make_plan
from planning.schedules import SCHEDULES
from planning.shares import shares_by_speed
from ranks.collectives import gather
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
    """The plan of a rank that can read the file, home_rank() first, for the hosts that are here.

    In an elastic run on other hosts than the plan's, that rank plans anew.
    """
    own = read_plan(path)
    others, hosts = gather(("error" in own, not is_home())), host_names(machines(), own.get("hosts", ()))
    reader = others.index(min(others))
    if dist.get_rank() == reader and "error" not in own:
        if is_elastic() and sorted(hosts) == sorted(own["hosts"]):
            own = in_order(own, hosts)  # an elastic run has ranks in an order of its own
        elif hosts != own["hosts"]:
            own = plan_for(hosts, own, cluster_json) if is_elastic() else {
                "error": f"the plan is for processes on {', '.join(own['hosts'])}, but they run on {', '.join(hosts)}: "
                         "start them in the order of plan.py --measure, or measure again"}
    if "error" in (plan := gather(own)[reader]):
        raise UserError(plan["error"])
    return plan


def read_plan(path: str) -> dict:
    """The plan in a file, or {"error": why not}."""
    try:
        with open(path) as file:
            plan = json.load(file)
        pipelines = plan["pipelines"]
        if any(pipeline.get("tp_size", 1) != 1 for pipeline in pipelines):
            raise ValueError("a pipeline has tp_size, and ranks of a plan hold whole layers: use --tp_size N for all "
                             "pipelines instead of --plan, or make a plan anew")
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
        used, fits = machines_of(plan), isinstance(plan["dtype"], str) and isinstance(plan["model"], dict)
        fits = fits and pipelines and all(isinstance(host, str) for host in plan["hosts"])
        fits = fits and all(len(pipeline["layers"]) == len(pipeline["machines"]) for pipeline in pipelines)
        if not fits or sorted(used) != sorted({*used} & {*range(len(plan["hosts"]))}):
            raise ValueError(f"machines {used} of {len(plan['hosts'])} hosts, each once, with its layers")
        return plan
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"error": f"--plan {path!r} can't be read ({type(error).__name__}: {error}): use cluster/plan.py"}


def in_order(plan: dict, hosts: list[str]) -> dict:
    """The plan for the same hosts in another order."""
    positions = positions_of(plan["hosts"], hosts)
    for pipeline in plan["pipelines"]:
        pipeline["machines"] = [positions[machine] for machine in pipeline["machines"]]
    return {**plan, "hosts": hosts}


def plan_for(hosts: list[str], plan: dict, cluster_json: str) -> dict:
    """As read_plan: a plan with the same global batch for `hosts`, of which those that were not measured are idle."""
    try:
        total, size = plan["global_batch"], plan["micro_batch_size"]
        data = read_cluster(cluster_json)
        positions = positions_of(hosts, data["hosts"])
        ranks = [rank for rank, position in enumerate(positions) if position is not None]
        data = some_of(data, [positions[rank] for rank in ranks])
        made = make_plan(data, -(-total // size) * size, setting_of(plan), [size])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return {"error": f"no plan for {', '.join(hosts)}: {cluster_json}: {error}"}
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
