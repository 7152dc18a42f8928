"""What autograd keeps for backward: runs a step's train.py up to its first optimizer step and counts the bytes.

`saved_for_backward.py OUT train.py FLAGS...`, as N ranks. Rank r writes OUT/rank<r>.json: the largest number of bytes
that were kept at one time, of "weights", their copies in the run's dtype, and of "others", mostly activations; and of
"one_copy", one copy of all the rank's weights in bfloat16. Memory that several tensors share counts once, that of the
parameters themselves not at all.
"""

import json
import os
import runpy
import sys
from collections import Counter

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Kept:
    """A tensor that is kept for backward. `log` gets its storage and sizes, and the storage again when it is freed."""

    def __init__(self, tensor: torch.Tensor, log: list):
        self.tensor, self.log = tensor, log
        storage = tensor.untyped_storage()
        self.storage = (storage.data_ptr(), storage.nbytes(), tuple(sorted(tensor.shape)))
        log.append((1, self.storage))

    def __del__(self):
        self.log.append((-1, self.storage))


def largest(log: list, params: list[torch.Tensor]) -> dict[str, int]:
    """The peaks of the log's bytes. A copy of a weight has the shape of one, or that of its transpose."""
    shapes, own = {tuple(sorted(param.shape)) for param in params}, {param.data_ptr() for param in params}
    alive, held, peak = Counter(), Counter(), Counter()
    for change, (pointer, nbytes, shape) in log:
        kind, before = "weights" if shape in shapes else "others", alive[pointer]
        alive[pointer] += change
        if pointer not in own and 0 in (before, alive[pointer]):
            held[kind] += change * nbytes
            peak[kind] = max(peak[kind], held[kind])
    return {**peak, "one_copy": 2 * sum(param.numel() for param in params)}


def run(out: str, script: str) -> None:
    log = []

    def write(optimizer, _args, _kwargs) -> None:
        path = os.path.join(out, f"rank{os.environ['RANK']}.json")
        if not os.path.exists(path):
            os.makedirs(out, exist_ok=True)
            with open(path, "w") as file:
                json.dump(largest(log, optimizer.param_groups[0]["params"]), file)

    register_optimizer_step_pre_hook(write)
    sys.path[0] = os.path.dirname(script)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, log), lambda kept: kept.tensor):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(sys.argv.pop(0), sys.argv[0])
