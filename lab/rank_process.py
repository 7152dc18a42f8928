"""One rank of lab.ranks.processes(), as a process: `rank_process.py FOLDER train.py FLAGS...`

FOLDER/watches holds where Python finds their classes, and the watches. The rank leaves FOLDER/rank<r>.pt: what each of
them has found.
"""

import contextlib
import importlib
import os
import pathlib
import pickle
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist


class ProcessModules:
    """A step's modules, in a process that has only these. See lab.program.StepModules."""

    def __init__(self, script: pathlib.Path):
        self._script = script

    def __getattr__(self, name: str) -> types.ModuleType:
        is_there = name in ("train", *sys.modules) or self._script.with_name(f"{name}.py").is_file()
        if name.startswith("_") or not is_there:
            raise AttributeError(f"there is no {name}.py in {self._script.parent.name}")
        return importlib.import_module(self._script.stem if name == "train" else name)


def run(folder: pathlib.Path, script: pathlib.Path, rank: int) -> None:
    sys.path[0] = str(script.parent)
    with open(folder / "watches", "rb") as file:
        sys.path += [path for path in pickle.load(file) if path not in sys.path]
        ranks, watches, prepare = pickle.load(file)
    modules, destroy = ProcessModules(script), dist.destroy_process_group
    with contextlib.ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.around(ranks))
        for watch in watches:
            watch.begin(modules, rank)
        if prepare:
            prepare(modules, rank)
        with mock.patch.object(dist, "destroy_process_group"):  # what a watch does at the end may communicate
            modules.train.main()
            for watch in watches:
                watch.end(modules, rank)
        if dist.is_initialized():
            destroy()
    torch.save([watch.found(rank) for watch in watches], folder / f"rank{rank}.pt")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(pathlib.Path(sys.argv.pop(0)), pathlib.Path(sys.argv[0]), int(os.environ["RANK"]))
