"""train.py --plan: a plan's choices become flags, and its order of machines the order of ranks.

    torchrun's ranks          0     1     2                 pipelines of the plan: machines 2, 0
    ranks of the training     1     -     0                 machine 1 is idle: faster without it

All ranks meet in torchrun's order first: rank 0 reads the plan (or, for `auto`, all measure and rank 0 searches) and
hands it round, so that one machine has the file. Then those that the plan names meet again, in its order. The others
wait until these have ended.
"""

import datetime
import json
import os
import sys

import torch.distributed as dist

waiting: dict = {}  # on the plan's first rank: what each idle rank will set, and in which store it waits
FIELDS = {"model_name", "seq_len", "global_batch", "micro_batch_size", "pipelines"}


def follow_plan(args, config, dtype, device) -> None:
    """Reads or makes the plan of args.plan, writes it into the flags, and orders the ranks. Collective.

    An idle rank does not return: it exits when the training is over. Raises ValueError, on every rank, for a plan that
    can't be read, is not for this model, or names more machines than there are ranks.
    """
    outcome = [None]
    cluster = measure_machines(args, config, dtype, device) if args.plan == "auto" else None
    if dist.get_rank() == 0:
        try:
            outcome = [plan_for(args, cluster) if cluster else read_plan(args.plan)]
            check_plan(outcome[0], args, config.num_hidden_layers, dist.get_world_size())
        except ValueError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    plan = outcome[0]
    args.micro_batch_size = plan["micro_batch_size"]
    args.pipelines = ";".join(",".join(map(str, pipeline["layers"])) for pipeline in plan["pipelines"])
    # How to send what nobody sends is an error of make_plugin: here the plan decides whether it is sent.
    has_stages, has_copies = any(len(p["layers"]) > 1 for p in plan["pipelines"]), len(plan["pipelines"]) > 1
    args.wire_dtype = (args.wire_dtype or plan.get("wire_dtype")) if has_stages else None
    args.gradient_wire_dtype = (args.gradient_wire_dtype or plan.get("gradient_wire_dtype")) if has_copies else None
    args.num_microbatches = ",".join(str(pipeline["num_microbatches"]) for pipeline in plan["pipelines"])
    reorder_ranks([rank for pipeline in plan["pipelines"] for rank in pipeline["machines"]])


def measure_machines(args, config, dtype, device) -> dict:
    from measure_cluster import MICRO_BATCH_SIZES, measure_cluster  # only here

    batch = args.micro_batch_size * args.gradient_accumulation_steps
    sizes = tuple(size for size in MICRO_BATCH_SIZES if batch % size == 0)
    return measure_cluster(config, args.seq_len, dtype, device, args.model_name, sizes)


def plan_for(args, cluster: dict) -> dict:
    """The best plan for a step of as many samples as one process would take, micro_batch_size x accumulation."""
    from pipeline_parallel import afab, one_f_one_b
    from pipeline_simulation import Setting
    from plan_report import make_plan

    schedule = one_f_one_b if args.pp_engine == "1f1b" else afab
    setting = Setting(schedule, args.wire_dtype, args.gradient_wire_dtype)
    return make_plan(cluster, args.micro_batch_size * args.gradient_accumulation_steps, setting)


def read_plan(path: str) -> dict:
    try:
        with open(path) as file:
            plan = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plan {path!r} can't be read ({error}): make it with plan.py, or use --plan auto") from None
    if not isinstance(plan, dict) or FIELDS - plan.keys():
        raise ValueError(f"--plan {path!r} is no plan, it needs {', '.join(sorted(FIELDS))}: make it with plan.py")
    return plan


def check_plan(plan: dict, args, num_layers: int, world_size: int) -> None:
    """Raises ValueError where the flags, the model or the ranks are not those that the plan is for."""
    machines = [rank for pipeline in plan["pipelines"] for rank in pipeline["machines"]]
    if len(set(machines)) < len(machines) or not set(machines) <= set(range(world_size)):
        raise ValueError(f"the plan is for the ranks {sorted(machines)}, each once, but {world_size} run, from 0 on: "
                         "start torchrun as it was for plan.py --measure")
    for pipeline in plan["pipelines"]:
        if sum(pipeline["layers"]) != num_layers or len(pipeline["layers"]) != len(pipeline["machines"]):
            raise ValueError(f"the plan gives {pipeline['layers']} layers to the machines {pipeline['machines']}, but "
                             f"the model has {num_layers}: make a plan for this model")
    if plan["seq_len"] != args.seq_len:
        raise ValueError(f"the plan is for --seq_len {plan['seq_len']}, not {args.seq_len}: make one for that")


def reorder_ranks(machines: list[int]) -> None:
    """The process group anew, of the ranks `machines` in that order; the other ranks wait here for their end."""
    rank, backend = dist.get_rank(), dist.get_backend()
    if machines == list(range(dist.get_world_size())):
        return
    idle = sorted(set(range(dist.get_world_size())) - set(machines))
    if rank == 0:
        print(f"ranks in the plan's order: {machines}" + (f", idle: {idle}" if idle else ""), flush=True)
    # Before the old group goes: without torchrun the store's server is in rank 0's process, and would go with it.
    store = dist.PrefixStore("plan", next(dist.rendezvous("env://"))[0])
    dist.barrier()
    dist.destroy_process_group()
    if rank in idle:
        store.wait(["ended"], datetime.timedelta(days=365))
        store.set(f"left {rank}", "")
        sys.exit(0)
    os.environ["RANK"] = str(machines.index(rank))
    if rank == machines[0]:
        waiting.update({f"left {other}": store for other in idle})
    dist.init_process_group(backend, store=store, rank=machines.index(rank), world_size=len(machines))


def release_idle_ranks() -> None:
    """After the training: lets the idle ranks go. Where it ended with an error, torchrun ends them."""
    for store in set(waiting.values()):
        store.set("ended", "")
        try:
            store.wait(list(waiting), datetime.timedelta(seconds=30))
        except RuntimeError:
            pass  # started without torchrun, the store is in rank 0's process: where that idled, it has gone with it
    waiting.clear()
