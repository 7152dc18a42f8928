"""What a compressed wire costs: loss curves of each --wire_dtype and --gradient_wire_dtype against full precision.

    python tools/maintain/wire_curves.py [--steps 50] [--figure PICTURE]

One pipeline of three stages compresses what passes between them, three pipelines of one stage what they sum. Every run
has the same initial weights and samples. Prints a row a run, in markdown, and draws the curves.
"""

import tools_path  # noqa: F401  before launch

import argparse
import math
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from launch import ROOT, fork, losses

SEQ_LEN = 64
KINDS = {  # title -> the flag, pipelines, micro-batches of 4 samples
    "between 3 stages": ("--wire_dtype", "3,3,2", "8"),
    "gradients of 3 pipelines": ("--gradient_wire_dtype", "8;8;8", "3,3,2"),
}
COLOURS = {"float32": "#999999", "bfloat16": "#4477aa", "int8": "#ee7733"}


def train(folder: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    """title -> wire dtype -> losses."""
    curves = {}
    for title, (flag, pipelines, counts) in KINDS.items():
        for dtype in COLOURS:
            fork(9, 3, flag, dtype, "--pipelines", pipelines, "--num_microbatches", counts, "--batch_size", 4,
                 "--seq_len", SEQ_LEN, "--max_steps", steps, "--dtype", "float32", "--run_name", f"{title}, {dtype}",
                 "--log_dir", folder, "--checkpoint_dir", folder / "checkpoints", timeout=600,
                 script=ROOT / "cluster" / "train_distributed.py")
    for title in KINDS:
        curves[title] = {dtype: losses(folder, f"{title}, {dtype}") for dtype in COLOURS}
    return curves


def draw(curves: dict, figure: Path) -> None:
    picture, axes = plt.subplots(2, 2, figsize=(10, 5.5), dpi=120, sharex=True, layout="constrained", squeeze=False,
                                 height_ratios=(3, 2))
    for (above, below), (title, by_dtype) in zip(axes.T, curves.items()):
        for dtype, curve in by_dtype.items():
            steps = range(1, len(curve) + 1)
            above.plot(steps, curve, color=COLOURS[dtype], linewidth=3 if dtype == "float32" else 1.2, label=dtype)
            if dtype != "float32":
                off = [abs(a - b) or math.nan for a, b in zip(curve, by_dtype["float32"])]  # zero: no logarithm
                below.semilogy(steps, off, color=COLOURS[dtype], linewidth=1.2)
        above.set_title(title, loc="left")
        below.set_xlabel("step")
        for panel in (above, below):
            panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("difference to float32")
    axes[1, 1].sharey(axes[1, 0])
    axes[0, 0].legend(frameon=False)
    picture.savefig(figure)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--figure", type=Path, default=ROOT / "runs" / "wire.png",
                        help="where to draw it (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        curves = train(Path(folder), args.steps)
    print("| compressed | wire | first loss | last loss | largest difference | mean of the last ten |\n"
          "| --- | --- | ---: | ---: | ---: | ---: |")
    for title, by_dtype in curves.items():
        for dtype, curve in by_dtype.items():
            off = [abs(a - b) for a, b in zip(curve, by_dtype["float32"])]
            print(f"| {title} | {dtype} | {curve[0]:.4f} | {curve[-1]:.4f} | {max(off):.4f} | "
                  f"{sum(off[-10:]) / len(off[-10:]):.4f} |")
    draw(curves, args.figure)


if __name__ == "__main__":
    sys.exit(main())
