"""python -m same_numbers.trainers_table [--steps 100] [--only tp ...]: what a loss curve and what the verdict say of each
fault, as a table in Markdown.

All ranks of a number and dtype are forked once, and train one trainer after the other.
"""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

from same_numbers import trainers_data, trainers_model
from same_numbers.__main__ import Comparison, Recording
from same_numbers.trainers_base import Run, rank

TRAINERS = trainers_model.TRAINERS | trainers_data.TRAINERS
FAULTS = trainers_model.FAULTS | trainers_data.FAULTS
CASES = [(kind, fault) for kind in TRAINERS for fault in ("", *FAULTS[kind])]


def run_rank(rank_: int, ranks: int, dtype: torch.dtype, cases: list, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/store{ranks}{dtype}", rank=rank_, world_size=ranks,
                                timeout=datetime.timedelta(seconds=60))
    for kind, fault in cases:
        run = Run(fault, place(folder, kind, fault, ranks, dtype), steps)
        losses = TRAINERS[kind](run)
        if rank() == 0 or losses[0] is not None:
            (run.folder / "losses.json").write_text(json.dumps(losses))
    if ranks > 1:
        dist.destroy_process_group()


def place(folder, kind: str, fault: str, ranks: int, dtype: torch.dtype) -> pathlib.Path:
    return pathlib.Path(folder, f"{kind}_{fault or 'right'}_{ranks}_{str(dtype)[6:]}")


def record(folder, ranks: int, dtype: torch.dtype, cases=CASES, steps: int = 3) -> None:
    """Trains all cases on so many ranks, in forked processes."""
    torch.multiprocessing.start_processes(run_rank, (ranks, dtype, cases, str(folder), steps), nprocs=ranks,
                                          start_method="fork")


def verdict(folder, kind: str, fault: str, ranks: int, dtype: torch.dtype) -> list[str]:
    """The lines that `python -m same_numbers` prints; none where the numbers are the same."""
    try:
        one = Recording(place(folder, kind, "", 1, dtype))
        many = Recording(place(folder, kind, fault, ranks, dtype), one.aliases)
        return [each["line"] for each in Comparison(one, many).found]
    except ValueError as error:
        return [f"error: {error}"]


def judged(kind: str, fault: str, lines: list[str]) -> tuple[bool, bool, bool]:
    """Found, placed right, named right."""
    known, said = FAULTS[kind][fault], lines[0] if lines else ""
    return bool(lines), bool(said and re.search(known.place, said)), bool(said and re.search(known.cause, said))
