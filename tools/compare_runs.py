"""The same runs in other programs: metrics.jsonl as TensorBoard's files, and a run's offline W&B files read back.

    python tools/compare_runs.py tensorboard runs/baseline runs/tp4     # then: tensorboard --logdir runs/tensorboard
    python tools/compare_runs.py wandb runs/baseline runs/tp4           # what --use_wandb recorded, as metrics.jsonl
    python tools/sanity_check.py --plot runs/baseline runs/tp4          # a table and a figure, with no other program

Each argument is a run's folder. metrics.jsonl is the record of a run; TensorBoard and W&B are views of it.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys

from launch import ROOT, Help


def read_metrics(run: pathlib.Path) -> list[dict]:
    """A row for each optimizer step. Raises ValueError for a folder without a run."""
    try:
        with open(run / "metrics.jsonl") as file:
            rows = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise ValueError(f"{run} holds no run ({error}): name a folder with metrics.jsonl") from None
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl is empty: wait for the first step")
    return rows


def folder_for(run: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The folder in `out` of the run's name. Raises ValueError where that is the run itself."""
    target = out.resolve() / run.resolve().name
    if target == run.resolve():
        raise ValueError(f"--out {out} would overwrite the run {run}: choose another folder")
    return target


def to_tensorboard(run: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Writes each number of each step as a scalar, into a folder of the run's name."""
    from torch.utils.tensorboard import SummaryWriter

    target, rows = folder_for(run, out), read_metrics(run)
    shutil.rmtree(target, ignore_errors=True)  # else the curves of an earlier call would lie below
    with SummaryWriter(str(target)) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])
    return target


def wandb_rows(run: pathlib.Path) -> list[dict]:
    """The rows that a run with --use_wandb has logged, out of the file that W&B keeps beside it, offline or online."""
    logs = sorted(run.glob("wandb/*run-*/*.wandb"))
    if not logs:
        raise ValueError(f"{run} holds no W&B files: start the run with --use_wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(logs[-1])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"wandb can't read {logs[-1]}: {done.stderr.strip().splitlines()[-1:]}")
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [record["history"]["item"] for record in records if record.get("type") == "history"]
    if not rows:
        raise ValueError(f"{logs[-1]} holds no step: was the run killed before its first one was written?")
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def from_wandb(run: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Writes what W&B has recorded as a run's folder, which sanity_check.py --plot reads."""
    target, rows = folder_for(run, out), wandb_rows(run)
    target.mkdir(parents=True, exist_ok=True)
    (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(run / "config.json", target / "config.json")
    return target


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("program", choices=["tensorboard", "wandb"], help="write for it, or read from it")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN_DIR",
                        help="its folder, such as runs/baseline")
    parser.add_argument("--out", type=pathlib.Path, help="default: runs/tensorboard, or runs/from_wandb")
    args = parser.parse_args(argv)
    out = args.out or ROOT / "runs" / ("tensorboard" if args.program == "tensorboard" else "from_wandb")
    convert = to_tensorboard if args.program == "tensorboard" else from_wandb
    try:
        for run in args.runs:
            print(convert(run, out), flush=True)
    except (ValueError, ImportError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    if args.program == "tensorboard":
        print(f"look at them: tensorboard --logdir {out}")
    else:
        folders = " ".join(str(folder_for(run, out)) for run in args.runs)
        print(f"compare them: python tools/sanity_check.py --plot {folders}")


if __name__ == "__main__":
    main()
