"""train.py --plan: a plan's choices become flags, and its order of machines becomes the order of ranks.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: machines 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it

First all ranks meet in torchrun's order. Rank 0 reads the plan and sends it to the others, so only one machine needs
the file. Then the ranks that the plan names meet again, in its order, and the idle ones wait until the training has
ended.
"""

import datetime
import json
import os
import sys

import torch.distributed as dist

FIELDS = {"model_name", "seq_len", "global_batch", "micro_batch_size", "pipelines"}
STORE = []  # of a plan with idle ranks: where they wait for the key "ended"


def follow_plan(args, num_layers: int) -> None:
    """Writes the plan of --plan into the other flags and orders the ranks. Collective. An idle rank does not return.

    Raises ValueError, on every rank, for a plan that can't be read, or that is not for this model and these ranks.
    """
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [read_plan(args.plan)]
            check_plan(outcome[0], args, num_layers, dist.get_world_size())
        except ValueError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    plan, pipelines = outcome[0], outcome[0]["pipelines"]
    args.micro_batch_size = plan["micro_batch_size"]
    args.pipelines = ";".join(",".join(map(str, pipeline["layers"])) for pipeline in pipelines)
    args.num_microbatches = ",".join(str(pipeline["num_microbatches"]) for pipeline in pipelines)
    # A wire dtype is an error where nothing travels. Here the plan decides whether anything does.
    has_stages, has_copies = any(len(pipeline["layers"]) > 1 for pipeline in pipelines), len(pipelines) > 1
    args.wire_dtype = (args.wire_dtype or plan.get("wire_dtype")) if has_stages else None
    args.gradient_wire_dtype = (args.gradient_wire_dtype or plan.get("gradient_wire_dtype")) if has_copies else None
    reorder_ranks([rank for pipeline in pipelines for rank in pipeline["machines"]])


def read_plan(path: str) -> dict:
    try:
        with open(path) as file:
            plan = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plan {path!r} can't be read ({error}): make it with cluster/plan.py") from None
    if not isinstance(plan, dict) or FIELDS - plan.keys():
        raise ValueError(f"--plan {path!r} is no plan, it needs {', '.join(sorted(FIELDS))}: make it with cluster/plan.py")
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
    """Makes the process group again, of the ranks `machines` in that order. Idle ranks wait here and exit."""
    rank, backend = dist.get_rank(), dist.get_backend()
    if machines == list(range(dist.get_world_size())):
        return
    idle = sorted(set(range(dist.get_world_size())) - set(machines))
    if rank == 0:
        print(f"ranks in the plan's order: {machines}" + (f", idle: {idle}" if idle else ""), flush=True)
    store = dist.PrefixStore("plan", next(dist.rendezvous("env://"))[0])
    dist.barrier()
    dist.destroy_process_group()
    if rank in idle:
        try:
            store.wait(["ended"], datetime.timedelta(days=365))
        except RuntimeError:
            pass  # without torchrun, rank 0 keeps the store: where it idles too, it may leave first
        sys.exit(0)
    os.environ["RANK"] = str(machines.index(rank))
    STORE.append(store)
    dist.init_process_group(backend, store=store, rank=machines.index(rank), world_size=len(machines))


def release_idle_ranks() -> None:
    """Lets the idle ranks exit after the training. Where it ends with an error, torchrun ends them."""
    for store in STORE:
        store.set("ended", "")
