"""train.py --plan: a plan's choices become flags, and its order of machines becomes the order of ranks.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it
"""

import json

from utils import UserError


def read_plan(path: str) -> dict:
    """The plan in a file. `machines` is added: the ranks that it names, in its order. Or {"error": why not}."""
    try:
        with open(path) as file:
            plan = json.load(file)
        plan["seq_len"], plan["micro_batch_size"], [p["num_microbatches"] + sum(p["layers"]) for p in plan["pipelines"]]
        return {**plan, "machines": [rank for pipeline in plan["pipelines"] for rank in pipeline["machines"]]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"error": f"--plan {path!r} can't be read ({type(error).__name__}: {error}): make it with "
                         "cluster/plan.py"}


def follow_plan(args, plan: dict, num_layers: int) -> None:
    """Writes the plan into the flags. Raises UserError where it is for another model or another --seq_len."""
    for pipeline in plan["pipelines"]:
        if sum(pipeline["layers"]) != num_layers or len(pipeline["layers"]) != len(pipeline["machines"]):
            raise UserError(f"the plan gives {pipeline['layers']} layers to the machines {pipeline['machines']}, but "
                             f"the model has {num_layers}, and each machine needs a number: make a plan for it")
    if plan["seq_len"] != args.seq_len:
        raise UserError(f"the plan is for --seq_len {plan['seq_len']}, not {args.seq_len}: make one for that")
    args.micro_batch_size = plan["micro_batch_size"]
    args.pipelines = [pipeline["layers"] for pipeline in plan["pipelines"]]
    args.num_microbatches = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]]
    args.wire_dtype = args.wire_dtype or plan.get("wire_dtype")
    args.gradient_wire_dtype = args.gradient_wire_dtype or plan.get("gradient_wire_dtype")
