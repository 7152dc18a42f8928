"""The small trainers of same_numbers, right or with the edits of a fault: loaded, and trained on forked processes."""

import datetime
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing

from lab.launch import ROOT
from lab.program import Program, StepModules
from same_numbers.trainers_base import Run, rank


RIGHT = Program("", folders=(ROOT / "same_numbers",))  # without a fault


def of(kind: str, modules: StepModules) -> Callable:
    """The trainer of this kind, where a program of them was loaded."""
    return (modules.trainers_model.TRAINERS | modules.trainers_data.TRAINERS)[kind]


def run_rank(number: int, ranks: int, cases: Sequence, steps: int, dtype: torch.dtype, store: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}/store", rank=number, world_size=ranks,
                                timeout=datetime.timedelta(seconds=120))
    for trainer, folder in cases:
        losses = trainer(Run("", pathlib.Path(folder), steps))
        if losses and losses[0] is not None and rank() in (0, ranks - 1):
            pathlib.Path(folder, "losses.json").write_text(json.dumps(losses))
    if ranks > 1:
        dist.destroy_process_group()


def record(ranks: int, cases: Sequence[tuple[Callable, str]], steps: int = 3,
           dtype: torch.dtype = torch.float64) -> None:
    """Trains each trainer on so many ranks, for so many steps, and records it into its folder."""
    import torch._dynamo  # noqa: F401  which the first optimizer of each forked rank would import
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(run_rank, (ranks, cases, steps, dtype, store), nprocs=ranks,
                                              start_method="fork")


def losses(folder: str) -> list[float]:
    return json.loads(pathlib.Path(folder, "losses.json").read_text())
