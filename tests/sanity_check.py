"""All topologies of steps 3 to 8 on the same tokens: is the loss of each that of one process?

    python tests/sanity_check.py                                # 50 steps of the tiny Llama, minutes on two cores
    python tests/sanity_check.py --dtype float64 --max_tokens 81920
    python tests/sanity_check.py --preset 1b --limit "TP 4=409600" # for a GPU machine; a slow row may stop earlier
    python tests/sanity_check.py --plot runs/baseline runs/tp4  # draws runs that exist, the first is the baseline

Trains one row after the other, prints a table, draws a figure, and exits with 1 where a row fails or differs by more
than TOLERANCE: in float64 over all steps, in float32 over the first 20 (rounding grows from step to step).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

from launch import ROOT, STEPS, losses, metrics, torchrun

TOLERANCE = {"float64": (1e-11, None), "float32": (1e-4, 20), "bfloat16": (5e-2, 20)}  # largest difference, first steps
TINYLLAMA = dict(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
                 num_attention_heads=32, num_key_value_heads=4, head_dim=64, initializer_range=0.02)
PRESETS = {  # seq_len, max_tokens, learning rate
    "tiny": (128, 204_800, 3e-3),
    "1b": (1024, 4_096_000, 3e-4),
}


@dataclasses.dataclass
class Row:
    """A topology. All read 32 samples a step in 8 micro-batches a rank: dp ranks take smaller ones."""

    name: str
    step: int
    dp: int = 1
    pp: int = 1
    tp: int = 1
    engine: str | None = None

    @property
    def run_name(self) -> str:
        return self.name.lower().replace(" ", "_")

    def command(self, flags: dict) -> list[str]:
        sizes = {"dp_size": self.dp, "pp_size": self.pp, "tp_size": self.tp, "micro_batch_size": 4 // self.dp,
                 "gradient_accumulation_steps": 8, "run_name": self.run_name, **flags}
        if self.engine and self.step >= 8:
            sizes["pp_engine"] = self.engine
        words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
        return torchrun(self.dp * self.pp * self.tp, STEPS[str(self.step)] / "train.py", *words)


ROWS = [
    Row("Baseline", 3), Row("TP 4", 4, tp=4), Row("TP 2", 4, tp=2),
    Row("Naive DP 4", 5, dp=4), Row("Bucket DP 4", 6, dp=4),
    Row("PP 4 AFAB", 7, pp=4, engine="afab"), Row("PP 4 1F1B", 8, pp=4, engine="1f1b"),
    Row("3D 2x2x2", 8, dp=2, pp=2, tp=2, engine="1f1b"),
]


@dataclasses.dataclass
class Result:
    name: str
    losses: list[float]
    tokens_per_second: float

    @classmethod
    def read(cls, folder: pathlib.Path, name: str | None = None) -> "Result":
        rows = metrics(folder.parent, folder.name)
        speed = statistics.median(row["tokens_per_second"] for row in rows[1:] or rows)
        return cls(name or folder.name, losses(folder.parent, folder.name), speed)

    def difference(self, baseline: "Result", steps: int | None = None) -> float:
        """Largest |loss - baseline| over the first `steps` steps, of those that both have."""
        return max(abs(a - b) for a, b in list(zip(self.losses, baseline.losses))[:steps])


def table(results: list[Result]) -> str:
    """Markdown."""
    baseline = results[0]
    lines = ["| run | steps | final loss | largest difference, 20 steps | all steps | tokens/s |",
             "|---|--:|--:|--:|--:|--:|"]
    for result in results:
        differences = [f"{result.difference(baseline, steps):.1e}" for steps in (20, None)]
        differences = ["-", "-"] if result is baseline else differences
        speed = f"{result.tokens_per_second:,.0f}"
        cells = [result.name, len(result.losses), f"{result.losses[-1]:.4f}", *differences, speed]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def failures(results: list[Result], dtype: str) -> list[str]:
    """What exceeds the tolerance of `dtype`, a line each."""
    limit, steps = TOLERANCE[dtype]
    found = [(result.name, result.difference(results[0], steps)) for result in results[1:]]
    return [f"{name} differs from the baseline by {worst:.1e}, more than {limit:.0e} in {dtype}"
            for name, worst in found if not worst <= limit]


def draw(results: list[Result], picture: str, subtitle: str) -> None:
    """The loss curves, and below one another on a log axis what each differs from the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ["#222222", "#ee7733", "#ccbb44", "#66ccee", "#4477aa", "#228833", "#aa3377", "#ee6677", "#999933"]
    figure, (curves, differences) = plt.subplots(1, 2, figsize=(13, 5), dpi=120, layout="constrained")
    baseline, floor = results[0], 1e-17
    for i, result in enumerate(results):
        style = dict(color=colours[i % len(colours)], label=result.name)
        steps = range(1, len(result.losses) + 1)
        width = 1.2 + 1.3 * (len(results) - 1 - i)  # what lies below stays visible as a wider line
        curves.plot(steps, result.losses, linewidth=width, solid_capstyle="round", **style)
        if i:
            gaps = [max(abs(a - b), floor) for a, b in zip(result.losses, baseline.losses)]
            differences.semilogy(steps[: len(gaps)], gaps, linewidth=1.2, marker=".", markersize=5, **style)
    differences.axhline(floor, color="#999999", linewidth=0.8, linestyle=":")
    differences.text(1, floor * 1.5, "equal to the last bit", color="#777777", fontsize=9)
    differences.set_ylim(floor / 3, None)
    for axes, title in ((curves, "loss"), (differences, "|loss - baseline|")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False)
    figure.suptitle(subtitle, x=0.01, ha="left")
    pathlib.Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def make_1b_model(folder: pathlib.Path) -> pathlib.Path:
    """The shape of TinyLlama 1.1B with the embedded tokenizer, whose ids all fit its larger vocabulary."""
    embedded = ROOT / "assets" / "tiny_llama"
    shutil.copytree(embedded, folder, dirs_exist_ok=True)
    config = json.loads((embedded / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **TINYLLAMA}, indent=2))
    return folder


def train(row: Row, flags: dict, log_dir: pathlib.Path) -> Result | None:
    """Runs one row; None, with the end of its output, where it fails."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(row.command(flags), env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    print(f"{row.name}: exit code {done.returncode} after {time.perf_counter() - start:.0f} s", flush=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], flush=True)
        return None
    return Result.read(log_dir / row.run_name, row.name)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--dtype", choices=TOLERANCE, default=None, help="float32, or bfloat16 for the preset 1b")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--max_tokens", type=int, default=None, help="instead of the preset's")
    parser.add_argument("--rows", nargs="+", default=None, help="some rows only; the baseline is always run")
    parser.add_argument("--limit", nargs="+", default=[], metavar="ROW=TOKENS", help="rows that stop earlier")
    parser.add_argument("--log_dir", type=pathlib.Path, default=ROOT / "runs" / "sanity_check")
    parser.add_argument("--figure", default=None)
    parser.add_argument("--plot", nargs="+", type=pathlib.Path, metavar="RUN", help="draw these, train nothing")
    args = parser.parse_args()
    names = {row.name for row in ROWS}
    asked = {limit.partition("=")[0] for limit in args.limit} | set(args.rows or [])
    if unknown := asked - names:
        parser.error(f"no row {', '.join(sorted(unknown))}: there are {', '.join(sorted(names))}")
    args.dtype = args.dtype or ("bfloat16" if args.preset == "1b" else "float32")
    suffix = "" if args.preset == "tiny" else "_1b"
    args.figure = args.figure or str(ROOT / "assets" / f"sanity_check{suffix}.png")
    return args


def main() -> int:
    args = parse_args()
    if args.plot:
        results = [Result.read(folder.resolve()) for folder in args.plot]
        print(table(results))
        draw(results, args.figure, f"{len(results)} runs, the first is the baseline")
        return 0
    seq_len, max_tokens, learning_rate = PRESETS[args.preset]
    limits = dict(limit.split("=") for limit in args.limit)
    flags = {"seq_len": seq_len, "learning_rate": learning_rate, "dtype": args.dtype, "device": args.device,
             "log_dir": args.log_dir}
    if args.preset == "1b":
        flags["model_name"] = make_1b_model(args.log_dir / "tinyllama_1b")
    rows = [row for row in ROWS if args.rows is None or row.name in args.rows or row.name == "Baseline"]
    results = [train(row, {**flags, "max_tokens": limits.get(row.name, args.max_tokens or max_tokens)}, args.log_dir)
               for row in rows]
    failed = [f"{row.name} did not run" for row, result in zip(rows, results) if result is None]
    if results[0] is not None:
        results = [result for result in results if result is not None]
        print(table(results))
        shorter = [f"{name} stops at {int(tokens):,} tokens" for name, tokens in limits.items()]
        subtitle = f"{args.preset} Llama, {args.dtype}, 32 samples of {seq_len} tokens a step"
        draw(results, args.figure, "; ".join([subtitle, *shorter]))
        failed += failures(results, args.dtype)
    print("\n".join(failed) or f"every run reproduces the baseline; {args.figure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
