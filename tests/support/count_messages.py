"""Runs a step's train.py and counts what its ranks exchange from the first optimizer step to the second.

`count_messages.py OUT train.py FLAGS...`, as N ranks. Rank r writes OUT/rank<r>.json: [function, group, peer, bytes,
count] for all calls of torch.distributed's functions that are alike, as in ["isend", "pp_group", 2, 4096, 8]. Numbers
for the log, LOGGED bytes at most, are left out.
"""

import functools
import json
import os
import runpy
import sys
from collections import Counter

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

FUNCTIONS = ("all_reduce", "all_to_all_single", "all_gather", "all_gather_into_tensor", "broadcast", "reduce",
             "reduce_scatter_tensor", "isend", "irecv", "send", "recv")
LOGGED = 64
COUNTS: Counter = Counter()
inside = False  # of a call that is counted, which may call another function of them


def counted(name: str, function):
    @functools.wraps(function)
    def call(tensor, *args, **kwargs):
        global inside
        if inside:
            return function(tensor, *args, **kwargs)
        payload = args[0] if name in ("all_gather", "all_to_all_single") else tensor
        grid = vars(sys.modules["process_group_manager"].process_group_manager)
        group = next((axis for axis, value in grid.items() if value is kwargs.get("group") is not None), None)
        peer = None
        if name in ("isend", "irecv", "send", "recv"):
            in_group = kwargs.get("group_dst", kwargs.get("group_src"))
            peer = args[0] if in_group is None else dist.get_global_rank(kwargs["group"], in_group)
        size = payload.nbytes
        if name == "all_to_all_single" and len(args) > 2:  # but for what a rank sends to itself
            size -= args[2][kwargs["group"].rank()] * payload[:1].nbytes
        if size > LOGGED:
            COUNTS[name, group, peer, size] += 1
        inside = True
        try:
            return function(tensor, *args, **kwargs)
        finally:
            inside = False

    return call


def run(out: str, script: str) -> None:
    steps = []

    def next_step(*_) -> None:
        steps.append(dict(COUNTS))
        COUNTS.clear()

    register_optimizer_step_pre_hook(next_step)
    for name in FUNCTIONS:
        function = counted(name, getattr(dist, name))
        setattr(dist, name, function)
        if name in ("isend", "irecv"):
            setattr(dist.distributed_c10d, name, function)  # there, batch_isend_irecv looks them up
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script)["main"]()
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, f"rank{os.environ['RANK']}.json"), "w") as file:
        json.dump([[*key, count] for key, count in steps[1].items()], file)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(sys.argv.pop(0), sys.argv[0])
