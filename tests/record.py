"""Runs a step's train.py, unchanged, and saves what its optimizer sees. `torchrun ... tests/record.py OUT train.py ARGS`

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


def main() -> None:
    out, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(script)
    register_optimizer_step_pre_hook(snapshot)
    runpy.run_path(script, run_name="__main__")
    grid = sys.modules["process_group_manager"].process_group_manager
    modules = [o for o in gc.get_objects() if isinstance(o, torch.nn.Module) and hasattr(o, "peak_live_activations")]
    peak = modules[0].peak_live_activations if modules else None
    place = {"dp": grid.dp_rank, "pp": grid.pp_rank, "tp": grid.tp_rank}
    final = {name: param.detach().clone() for name, param in FIRST.pop("params").items()}
    os.makedirs(out, exist_ok=True)
    torch.save({**FIRST, "final": final, "place": place, "peak": peak}, os.path.join(out, f"rank{grid.global_rank}.pt"))


if __name__ == "__main__":
    main()
