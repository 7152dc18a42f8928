"""train.py --plan: a plan's choices become flags, and its order of machines becomes the order of ranks.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it
"""

import json

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
        plan["schedule"], plan["micro_batch_size"], [p["num_microbatches"] + sum(p["layers"]) for p in pipelines]
        plan["facts"] = {**plan["model"], "dtype": plan["dtype"], "seq_len": plan["seq_len"]}
        plan["machines"] = [rank for pipeline in pipelines for rank in pipeline["machines"]]
        fits = pipelines and all(len(pipeline["layers"]) == len(pipeline["machines"]) for pipeline in pipelines)
        if not fits or sorted(plan["machines"]) != sorted({*plan["machines"]} & {*range(len(plan["hosts"]))}):
            raise ValueError(f"machines {plan['machines']} of {len(plan['hosts'])} hosts, each once, with its layers")
        return plan
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": f"--plan {path!r} can't be read ({type(error).__name__}: {error}): use cluster/plan.py"}


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
