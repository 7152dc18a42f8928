"""A rank's side of scaling.py: runs step 8's train.py for each case and counts what this rank holds meanwhile.

`torchrun ... scaling_rank.py FOLDER` reads FOLDER/runs.json and writes FOLDER/<case>_<rank>.json for each case
whose memory is counted: the micro-batches alive, and the bytes saved for backward, of the parameters with all that
belongs to them, and resident, each at its peak.
"""

import tools_path  # noqa: F401  before launch

import argparse
import collections
import ctypes
import gc
import json
import os
import pathlib
import re
import runpy
import sys
import weakref

from launch import STEPS


class Probe:
    """What this rank holds while train.py runs."""

    def __init__(self):
        self.holders, self.now, self.found = collections.Counter(), 0, {"live": 1, "saved": 0}

    def start(self, model) -> None:
        """Before the first step. What an earlier case of this process left of resident memory is handed back."""
        self.model, self.parameters = model, {param.untyped_storage().data_ptr() for param in model.parameters()}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.found["resident"] = sum(param.nbytes for param in model.parameters()) - resident_bytes("VmRSS")

    def pack(self, tensor):
        """Called with each tensor that autograd saves; it keeps what this returns until backward is done with it."""
        kept, storage = tensor.detach(), tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.hold(storage.data_ptr(), storage.nbytes(), 1)
            weakref.finalize(kept, self.hold, storage.data_ptr(), storage.nbytes(), -1)
        return kept

    def hold(self, storage: int, size: int, change: int) -> None:
        self.holders[storage] += change
        self.now += change * size if self.holders[storage] == (change > 0) else 0  # the first comes, the last goes
        self.found["saved"] = max(self.found["saved"], self.now)

    def stepped(self, optimizer, *_) -> None:
        self.found["state"] = sum(tensor.nbytes for param in self.model.parameters() for tensor in (
            param, param.grad, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]))
        self.found["live"] = getattr(self.model, "peak_live_activations", 1)


def resident_bytes(field: str) -> int:
    """VmRSS, now, or VmHWM, the peak, of this process."""
    return int(re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


def run_cases(folder: pathlib.Path) -> None:
    """The runs of <folder>/runs.json one after the other, each with a rendezvous of its own."""
    train = STEPS["8"] / "train.py"
    sys.path[0] = str(train.parent)
    import data_parallel
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    wrap = data_parallel.DataParallelBucket.__init__
    for run in json.loads((folder / "runs.json").read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        sys.argv = [str(train), *run["flags"]]
        if not run["counting"]:
            runpy.run_path(sys.argv[0])["main"]()
            continue
        probe = Probe()
        data_parallel.DataParallelBucket.__init__ = lambda model, *args: (wrap(model, *args), probe.start(model))[0]
        hook = register_optimizer_step_post_hook(probe.stepped)
        with torch.autograd.graph.saved_tensors_hooks(probe.pack, lambda kept: kept):
            runpy.run_path(sys.argv[0])["main"]()
        hook.remove()
        probe.found["resident"] += resident_bytes("VmHWM")
        (folder / f"{run['name']}_{os.environ['RANK']}.json").write_text(json.dumps(probe.found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where runs.json is")
    run_cases(parser.parse_args().folder)
