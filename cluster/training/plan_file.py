"""A plan that cluster/plan.py wrote: its choices become flags, and its order of machines becomes the order of ranks.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it
"""

import atexit
import contextlib
import datetime
import json
import socket
import sys

from pipeline_parallel import SCHEDULES
from utils import UserError

FLAGS = ("pipelines", "num_microbatches", "dp_size", "pp_size", "tp_size", "micro_batch_size", "pp_engine",
         "gradient_accumulation_steps", "wire_dtype", "gradient_wire_dtype", "recompute")  # what a plan decides


def read_plan(path: str) -> dict:
    """The plan in a file, or {"error": why not}. Two keys are added: `machines`, the ranks in the plan's order, and
    `facts`, what has to be the same in the run.
    """
    try:
        with open(path) as file:
            plan = json.load(file)
        pipelines = plan["pipelines"]
        if plan["schedule"] not in SCHEDULES:
            raise ValueError(f"schedule {plan['schedule']!r} is none of {', '.join(SCHEDULES)}")
        plan["micro_batch_size"], [p["num_microbatches"] + sum(p["layers"]) for p in pipelines]
        plan["facts"] = {**plan["model"], "dtype": plan["dtype"], "seq_len": plan["seq_len"]}
        plan["machines"] = [rank for pipeline in pipelines for rank in pipeline["machines"]]
        fits = pipelines and all(len(pipeline["layers"]) == len(pipeline["machines"]) for pipeline in pipelines)
        if not fits or sorted(plan["machines"]) != sorted({*plan["machines"]} & {*range(len(plan["hosts"]))}):
            raise ValueError(f"machines {plan['machines']} of {len(plan['hosts'])} hosts, each once, with its layers")
        return plan
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": f"--plan {path!r} can't be read ({type(error).__name__}: {error}): use cluster/plan.py"}


def take_places(path: str, store, rank: int, world_size: int) -> tuple[dict, int, int]:
    """The plan, and this process's rank in its order of machines and how many these are.

    Rank 0 reads the file and sends it to all through the `store`, so only one machine needs it. Processes that the plan
    leaves idle wait here until the training has ended, and exit. Raises UserError for a plan that can't be read, or
    that is for processes on other hosts.
    """
    if rank == 0:
        store.set("plan", json.dumps(read_plan(path)))
    if "error" in (plan := json.loads(store.get("plan"))):
        raise UserError(plan["error"])
    store.set(f"host/{rank}", socket.gethostname())
    hosts, order = [store.get(f"host/{other}").decode() for other in range(world_size)], plan["machines"]
    if hosts != plan["hosts"]:
        raise UserError(f"the plan is for processes on {', '.join(plan['hosts'])}, but they run on "
                        f"{', '.join(hosts)}: start them in the order of plan.py --measure, or measure again")
    if rank not in order:
        with contextlib.suppress(RuntimeError):  # the store may end with rank 0's process
            store.wait(["ended"], datetime.timedelta(days=365))
        sys.exit(0)
    atexit.register(store.set, "ended", "")
    return plan, order.index(rank), len(order)


def follow_plan(args, plan: dict, config, dtype: str) -> None:
    """Writes the plan into the flags. Raises UserError where it is for another model, --dtype or --seq_len."""
    here = {**vars(config), "dtype": dtype, "seq_len": args.seq_len}
    facts = plan["facts"].items()
    if unlike := [f"{name} {value} (here {here.get(name)})" for name, value in facts if here.get(name) != value]:
        raise UserError(f"the plan is for {', '.join(unlike)}: make a plan for this run with cluster/plan.py")
    args.micro_batch_size, args.pp_engine = plan["micro_batch_size"], plan["schedule"]
    args.pipelines = [pipeline["layers"] for pipeline in plan["pipelines"]]
    args.num_microbatches = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]]
    args.wire_dtype, args.gradient_wire_dtype = plan.get("wire_dtype"), plan.get("gradient_wire_dtype")
    args.recompute = plan.get("recompute", False)
