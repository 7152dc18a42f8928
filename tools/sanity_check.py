"""Every topology of steps 3 to 9 on the same samples: is its loss that of one process?

    python tools/sanity_check.py                                     # the tiny Llama, 50 steps, minutes on two cores
    python tools/sanity_check.py --dtype float64 --steps 20
    python tools/sanity_check.py --preset 1b                         # TinyLlama's shape, for a machine with GPUs
    python tools/sanity_check.py --preset 1b --rows tp4 3d --max_tokens 4096000 tp4=409600   # tp4 stops earlier
    python tools/sanity_check.py --plot runs/baseline runs/tp4       # trains nothing; the first run is the baseline

Trains one row after the other, prints a table and draws a figure. Exits with 1 where a row can't run, has read other
samples, or is further from the baseline than TOLERANCE allows. Rounding grows from step to step, since each step
starts from the weights of the one before: float64 is judged over all steps, the others over the first 20.
A choice of --rows without the baseline is compared with the baseline that an earlier call left in --log_dir.
"""

import argparse
import collections
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import textwrap
import time

from launch import ROOT, STEPS, metrics, torchrun

TOLERANCE = {"float64": (1e-11, None), "float32": (1e-4, 20), "bfloat16": (5e-2, 20)}  # |difference|, first steps
TINYLLAMA = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, head_dim=64,
                 num_key_value_heads=4, vocab_size=32000, initializer_range=0.02)
# seq_len, tokens to train on, learning rate, dtype
PRESETS = {"tiny": (128, 204_800, 3e-3, "float32"), "1b": (1024, 4_096_000, 3e-4, "bfloat16")}
# An optimizer step reads 32 samples: micro_batch_size * ACCUMULATION * dp_size. Rows with data parallelism take smaller
# micro-batches, not fewer: each row accumulates gradients, and fills a pipeline of 4 stages.
GLOBAL_BATCH, ACCUMULATION = 32, 8
COLOURS = ["#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#004d40", "#1fa187", "#aa4499", "#882255"]  # a hue an axis

Row = collections.namedtuple("Row", "name label step flags")  # name: on the command line, and the run's in --log_dir
ROWS = {row.name: row for row in [
    Row("baseline", "Baseline", 3, {}),
    Row("tp4", "TP 4", 4, {"tp_size": 4}),
    Row("tp2", "TP 2", 4, {"tp_size": 2}),
    Row("dp4_naive", "Naive DP 4", 5, {"dp_size": 4}),
    Row("dp4_bucket", "Bucket DP 4", 6, {"dp_size": 4}),
    Row("pp4_afab", "PP 4 AFAB", 7, {"pp_size": 4}),
    Row("pp4_1f1b", "PP 4 1F1B", 8, {"pp_size": 4, "pp_engine": "1f1b"}),
    Row("3d", "3D 2x2x2", 8, {"dp_size": 2, "pp_size": 2, "tp_size": 2, "pp_engine": "1f1b"}),
    Row("unlike", "Unlike 8;5,3", 9, {"pipelines": "8;5,3", "num_microbatches": "5,3"}),
]}


@dataclasses.dataclass
class Run:
    folder: pathlib.Path
    label: str
    config: dict
    losses: list[float]
    tokens_per_second: float  # the median, without the first step, which warms up

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Run":
        """Raises ValueError where the folder holds no run."""
        try:
            config, rows = json.loads((folder / "config.json").read_text()), metrics(folder.parent, folder.name)
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder} holds no run: {error}") from None
        if not rows or not all(math.isfinite(row["loss"]) for row in rows):
            raise ValueError(f"{folder} holds a run without a step, or with a loss that is no number")
        label = ROWS[folder.name].label if folder.name in ROWS else folder.name
        speeds = [row["tokens_per_second"] for row in rows[1:] or rows]
        return cls(folder, label, config, [row["loss"] for row in rows], statistics.median(speeds))

    @property
    def recipe(self) -> dict:
        """What must be the same for two runs to be comparable."""
        micro_batch, counts = self.config["micro_batch_size"], self.config.get("num_microbatches")
        like = self.config["gradient_accumulation_steps"] * self.config["topology"]["dp_size"]
        total = sum(map(int, counts.split(","))) if counts else like
        keys = ("model_name", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "dataset_name", "seed",
                "learning_rate", "seq_len", "dtype")
        return {"global batch": micro_batch * total, **{key: self.config[key] for key in keys}}

    def gaps(self, baseline: "Run") -> list[float]:
        """|loss - baseline| of each step that both have."""
        return [abs(a - b) for a, b in zip(self.losses, baseline.losses)]

    def worst(self, baseline: "Run", steps: int | None) -> float:
        return max(self.gaps(baseline)[:steps])


def tolerance(dtype: str) -> tuple[float, int | None, str]:
    """The largest difference that passes, the number of first steps it holds for (None: all), and both in words."""
    limit, steps = TOLERANCE[dtype]
    text = f"{limit:.0e}".replace("e-0", "e-")
    return limit, steps, f"{text} over the first {steps} steps" if steps else f"{text} over all steps"


def failures(runs: list[Run], dtype: str) -> list[str]:
    """What makes the check fail, a line each; the first run is the baseline."""
    baseline, (limit, steps, words), found = runs[0], tolerance(dtype), []
    for run in runs[1:]:
        for key, value in run.recipe.items():
            if value != (expected := baseline.recipe[key]):
                found.append(f"{run.label} can't be compared: its {key} is {value}, the baseline's {expected}")
        if not (worst := run.worst(baseline, steps)) <= limit:
            found.append(f"{run.label} is {worst:.1e} away from the baseline; {dtype} allows {words}")
    return found


def table(runs: list[Run]) -> str:
    """Markdown, in columns that line up."""
    lines = [["run", "ranks", "steps", "final loss", "max difference, first 20 steps", "all steps", "tokens/s"]]
    for run in runs:
        worst = ["", ""] if run is runs[0] else [f"{run.worst(runs[0], steps):.1e}" for steps in (20, None)]
        lines.append([run.label, str(run.config["topology"]["world_size"]), str(len(run.losses)),
                      f"{run.losses[-1]:.4f}", *worst, f"{run.tokens_per_second:,.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: list[Run], picture: pathlib.Path, dtype: str) -> None:
    """Two panels: the losses, one on top of the other, and on a log axis what separates each from the baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.6, 5), dpi=120)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.052, right=0.87, top=0.79, bottom=0.1, wspace=0.16)
    draw_losses(panels[0], runs)
    draw_gaps(panels[1], runs, dtype)
    for axes, title in zip(panels, ("loss", "|loss - baseline|")):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set(xlabel="optimizer step", axisbelow=True)
        axes.locator_params(axis="x", integer=True)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    recipe, steps = runs[0].recipe, len(runs[0].losses)
    labels = textwrap.shorten(", ".join(run.label for run in runs[1:]), 110, placeholder=" ...")
    what = [pathlib.Path(recipe["model_name"]).name, dtype,
            f"{steps} steps of {recipe['global batch'] * recipe['seq_len']:,} tokens",
            *(f"{run.label} stops after {len(run.losses)}" for run in runs if len(run.losses) < steps)]
    figure.text(0.016, 0.935, f"{runs[0].label} against {labels}", fontsize=13, weight="bold")
    figure.text(0.016, 0.88, "  \u00b7  ".join(what), fontsize=10.5, color="#555555")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def colours_of(runs: list[Run]) -> list[str]:
    """A row of this check has its own colour in every figure; other runs take them in turn."""
    labels = [row.label for row in ROWS.values()][1:]
    known = all(run.label in labels for run in runs)
    return [COLOURS[(labels.index(run.label) if known else i) % len(COLOURS)] for i, run in enumerate(runs)]


def draw_losses(axes, runs: list[Run]) -> None:
    """The baseline as a broad band; upon it each run in dashes of its own phase, so that no run hides another."""
    axes.plot(range(1, len(runs[0].losses) + 1), runs[0].losses, color="#d4d4d4", linewidth=10,
              solid_capstyle="round", label=f"{runs[0].label} (the band)")
    for i, (run, colour) in enumerate(zip(runs[1:], colours_of(runs[1:]))):
        dashes = (-4 * i, (4, 4 * (len(runs) - 2)))  # in line widths: the phase, then on and off
        axes.plot(range(1, len(run.losses) + 1), run.losses, color=colour, linewidth=3, linestyle=dashes,
                  dash_capstyle="butt")
    axes.legend(frameon=False, fontsize=10.5, loc="upper right")


def draw_gaps(axes, runs: list[Run], dtype: str) -> None:
    """Zero has no logarithm: differences of exactly zero are dots in a strip of their own, below all others."""
    baseline, runs, last = runs[0], runs[1:], len(runs[0].losses)
    gaps, (limit, judged, words) = [run.gaps(baseline) for run in runs], tolerance(dtype)
    positive = [math.log10(gap) for run_gaps in gaps for gap in run_gaps if gap > 0]
    floor, top = math.floor(min(positive, default=-16)) - 0.1, max([math.log10(limit), *positive]) + 0.9
    strip = 0.2 * (top - floor)  # decades high; run i has its own height in it
    axes.set(ylim=(floor - strip, top), xlim=(0, last + 1))
    axes.axhspan(floor - strip, floor, color="#f1f1f1", zorder=0)
    axes.hlines(math.log10(limit), 1, min(judged or last, last), "#333333", linestyle=(0, (5, 3)), linewidth=1.2)
    axes.text(1, math.log10(limit) + 0.02 * (top - floor), f"tolerance: {words}", color="#333333", fontsize=9)
    ticks = range(math.ceil(floor), math.floor(top) + 1, max(1, round((top - floor) / 6)))
    axes.set_yticks([floor - strip / 2, *ticks], ["exactly\n0", *(f"$10^{{{tick}}}$" for tick in ticks)])
    ends = []
    for i, (run, run_gaps, colour) in enumerate(zip(runs, gaps, colours_of(runs))):
        zero = floor - strip * (i + 0.5) / len(runs)
        heights = [math.log10(gap) if gap else math.nan for gap in run_gaps]
        zeros = [math.nan if gap else zero for gap in run_gaps]
        steps = range(1, len(run_gaps) + 1)
        marker = "osD^vPX*"[i % 8]
        axes.plot(steps, heights, color=colour, linewidth=1.5, marker=marker, markersize=4, markeredgewidth=0)
        axes.plot(steps, zeros, color=colour, linewidth=0, marker="o", markersize=3, markeredgewidth=0)
        ends.append(((heights[-1] if run_gaps[-1] else zero) - floor + strip, run.label, colour))
    # The labels, at the lines' ends where there is room: a line's colour says what it is, in both panels.
    places, height = [], top - floor + strip
    for end, *_ in sorted(ends):
        places.append(max(end / height, places[-1] + 0.065 if places else 0))
    for (end, label, colour), place in zip(sorted(ends), places):
        arrow = dict(arrowstyle="-", color=colour, linewidth=0.8, relpos=(0, 0.5), shrinkA=0, shrinkB=2)
        axes.annotate(label, (1, end / height), (1.05, place - max(0, places[-1] - 1)), xycoords="axes fraction",
                      color=colour, fontsize=10.5, weight="bold", va="center", arrowprops=arrow)


def make_1b_model(folder: pathlib.Path) -> pathlib.Path:
    """The shape of TinyLlama 1.1B with the embedded tokenizer, whose 1024 ids fit its larger vocabulary."""
    embedded, config = ROOT / "assets" / "tiny_llama", folder / "config.json"
    shutil.copytree(embedded, folder, dirs_exist_ok=True)
    config.write_text(json.dumps({**json.loads(config.read_text()), **TINYLLAMA}, indent=2))
    shutil.copystat(embedded / "config.json", config)  # the cache of tokens goes by a file's time
    return folder


def train(row: Row, flags: dict, log_dir: pathlib.Path) -> bool:
    """Runs one row, its output in <log_dir>/<name>.log; False, and the output's end printed, where it fails."""
    sizes = {axis: row.flags.get(axis, 1) for axis in ("tp_size", "dp_size", "pp_size")}
    stages = len(row.flags.get("pipelines", "").replace(";", ",").split(","))  # 1 where they are all alike
    ranks, output = math.prod(sizes.values()) * stages, log_dir / f"{row.name}.log"
    flags = {"micro_batch_size": GLOBAL_BATCH // ACCUMULATION // sizes["dp_size"], "run_name": row.name,
             "gradient_accumulation_steps": ACCUMULATION, "log_dir": log_dir, **flags, **row.flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}), **os.environ}
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / row.name / "metrics.jsonl").unlink(missing_ok=True)  # else a failure would leave an earlier run's
    print(f"{row.label}: {ranks} rank(s), output in {output} ... ", end="", flush=True)
    start = time.perf_counter()
    with open(output, "w") as file:
        done = subprocess.run(torchrun(ranks, STEPS[str(row.step)] / "train.py", *words), env=environment, stdout=file,
                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    end = f", FAILED with exit code {done.returncode}:\n{output.read_text()[-3000:]}" if done.returncode else ""
    print(f"{time.perf_counter() - start:.0f} s{end}", flush=True)
    return done.returncode == 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--dtype", choices=TOLERANCE, help="float32; 1b: bfloat16; --plot: what an auto was")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of --max_tokens")
    parser.add_argument("--max_tokens", nargs="+", default=[], metavar="[ROW=]N", help="for all rows, or for one")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="train these only")
    parser.add_argument("--log_dir", type=pathlib.Path, default=ROOT / "runs" / "sanity_check")
    parser.add_argument("--figure", type=pathlib.Path, help="assets/sanity_check.png, or sanity_check_1b.png")
    parser.add_argument("--table", type=pathlib.Path, help="write the table into this file too")
    parser.add_argument("--plot", nargs="+", type=pathlib.Path, metavar="RUN_DIR", help="draw these, train nothing")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib: pip install -e '.[test]'")
    if not (args.plot or "baseline" in args.rows or (args.log_dir / "baseline" / "metrics.jsonl").exists()):
        parser.error(f"{args.log_dir} holds no baseline to compare with: add it to --rows")
    (seq_len, budget, *_), budgets = PRESETS[args.preset], {}
    for word in args.max_tokens:
        name, _, number = word.rpartition("=")
        if not number.isdecimal() or name not in {"", *ROWS}:
            parser.error(f"--max_tokens {word}: use N or ROW=N, with a ROW among {', '.join(ROWS)}")
        budgets[name] = int(number)
    if args.steps is not None and "" in budgets:
        parser.error("--steps and --max_tokens N say the same thing: use one of them")
    budget = budgets.get("", budget if args.steps is None else args.steps * GLOBAL_BATCH * seq_len)
    args.budgets = {name: budgets.get(name, budget) for name in ROWS}
    args.figure = args.figure or ROOT / "assets" / f"sanity_check{'_1b' if args.preset == '1b' else ''}.png"
    args.log_dir = args.log_dir.resolve()
    return args


def main() -> int:
    args = parse_args()
    failed, folders, runs = [], [folder.resolve() for folder in args.plot or []], []
    if not args.plot:
        seq_len, _, rate, dtype = PRESETS[args.preset]
        flags = {"seq_len": seq_len, "learning_rate": rate, "dtype": args.dtype or dtype, "device": args.device}
        if args.preset == "1b":
            flags["model_name"] = make_1b_model(args.log_dir / "tinyllama_1b")
        folders = [args.log_dir / "baseline"]
        for name in sorted(args.rows, key=list(ROWS).index):  # the baseline first
            if train(ROWS[name], {**flags, "max_tokens": args.budgets[name]}, args.log_dir):
                folders.append(args.log_dir / name)
            else:
                failed.append(f"{ROWS[name].label} did not run")
    for folder in dict.fromkeys(folders):
        try:
            runs.append(Run.read(folder))
        except ValueError as error:
            failed.append(str(error))
    if runs and runs[0].folder == folders[0]:  # without the baseline there is nothing to compare
        if (dtype := runs[0].config["dtype"]) == "auto":
            print(f"a dtype of auto is taken for {(dtype := args.dtype or 'float32')}: --dtype says otherwise")
        print(table(runs))
        if args.table:
            args.table.write_text(table(runs) + "\n")
        failed += failures(runs, dtype)
        if len(runs) > 1:
            draw(runs, args.figure, dtype)
            print(f"figure: {args.figure}\ntolerance of {dtype}: {tolerance(dtype)[2]}")
    print("\n".join(failed) or "no run is further from the baseline")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
