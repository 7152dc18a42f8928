"""Runs in TensorBoard: their metrics.jsonl as its files.

    python tools/compare_runs.py runs/baseline runs/tp4                 # then: tensorboard --logdir runs/tensorboard
    python tools/sanity_check.py --plot runs/baseline runs/tp4          # a table and a figure, with no other program

Each argument is a run's folder. metrics.jsonl is the record of a run; TensorBoard and W&B are views of it.
"""

import argparse
import pathlib
import shutil
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.launch import ROOT, Help, metrics, writing


def to_tensorboard(run: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Writes each number of each step as a scalar, into a folder of the run's name in `out`.

    Raises ValueError for a folder without a run, or where the files would lie in the run itself.
    """
    from torch.utils.tensorboard import SummaryWriter

    run, target = run.resolve(), out.resolve() / run.resolve().name
    if target == run:
        raise ValueError(f"--out {out} would overwrite the run {run}: choose another folder")
    try:
        rows = metrics(run.parent, run.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{run} holds no run ({error}): name a folder with metrics.jsonl") from None
    shutil.rmtree(target, ignore_errors=True)  # else the curves of an earlier call would lie below
    with SummaryWriter(str(target)) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])
    return target


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN_DIR", help="such as runs/baseline")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "tensorboard", help="the folder to write")
    args = parser.parse_args(argv)
    try:
        for run in args.runs:
            with writing(args.out):
                print(to_tensorboard(run, args.out), flush=True)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(f"look at them: tensorboard --logdir {args.out}")


if __name__ == "__main__":
    main()
