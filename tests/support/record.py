"""Runs a step's train.py, unchanged, and saves what its optimizer sees. `record.py OUT train.py FLAGS...`, as N ranks

Each rank writes OUT/rank<r>.pt: its place in the grid, its parameters before the first and after the last step, the
gradients that the first step uses, and how many micro-batches' activations it held at most (None without a pipeline).
"""

import gc
import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

FIRST: dict = {}


def snapshot(optimizer, _args, _kwargs) -> None:
    """Before each optimizer step; only the first one counts."""
    if FIRST:
        return
    group = optimizer.param_groups[0]
    names = [name.removeprefix("module.") for name in group["param_names"]]
    FIRST["params"] = dict(zip(names, group["params"]))
    FIRST["initial"] = {name: param.detach().clone() for name, param in FIRST["params"].items()}
    FIRST["grads"] = {name: param.grad.clone() for name, param in FIRST["params"].items()}
    owner = group["params"][0]
    FIRST["wrappers"] = [module for module in gc.get_objects() if type(module).__name__ == "DataParallelBucket"
                         and any(param is owner for param in module.parameters())]


def run(out: str, script: str) -> None:
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script)["main"]()
    grid = sys.modules["process_group_manager"].process_group_manager
    if grid is None:  # a script whose ranks train by themselves
        return
    peaks = [getattr(module, "peak_live_activations", None) for module in FIRST.pop("wrappers")]
    place = {"dp": grid.dp_rank, "pp": grid.pp_rank, "tp": grid.tp_rank}
    final = {name: param.detach().clone() for name, param in FIRST.pop("params").items()}
    os.makedirs(out, exist_ok=True)
    recording = {**FIRST, "final": final, "place": place, "peak": peaks[0] if peaks else None}
    torch.save(recording, os.path.join(out, f"rank{grid.global_rank}.pt"))


if __name__ == "__main__":
    register_optimizer_step_pre_hook(snapshot)
    out, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    run(out, script)
