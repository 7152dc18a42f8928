"""Runs a step's train.py, unchanged, and saves what its optimizer sees. `torchrun ... tests/record.py JOBS.json`

JOBS.json is a list of [OUT, train.py, [flags], port], run one after the other in the same processes: starting those
costs more than a short run. The ranks of each job meet at a port of its own: torchrun's store remembers the last job's
addresses. Each rank writes OUT/rank<r>.pt: its place in the grid, its parameters before the first and after the
last step, the gradients that the first step uses, and how many micro-batches' activations it held at most (None without
a pipeline).
"""

import gc
import json
import os
import pathlib
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

FIRST: dict = {}


def snapshot(optimizer, _args, _kwargs) -> None:
    """Before each optimizer step; only the first one of a job counts."""
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


def run(out: str, script: str, flags: list[str], port: int) -> None:
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    folder = os.path.dirname(script)
    for path in pathlib.Path(folder).glob("*.py"):  # another step's module of that name
        sys.modules.pop(path.stem, None)
    sys.argv, sys.path[0] = [script, *flags], folder
    FIRST.clear()
    runpy.run_path(script, run_name="__main__")
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
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for job in jobs:
        run(*job)
