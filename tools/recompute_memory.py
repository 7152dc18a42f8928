"""What recomputing activations saves and costs: step 8's two schedules on 4 stages, with and without --recompute.

    python tools/recompute_memory.py [--figure PICTURE]         # minutes on two cores

The memory is the peak of the rank that needs most, as train.py records it, with all that a process holds: torch, the
weights, and the activations of the micro-batches that are alive, which are all of a step's with AFAB and at most 4 with
1F1B. Recomputed layers keep their inputs only, so that a live micro-batch costs a fraction. For this, each backward
pass begins with the layer's forward pass: a step computes 4 units of work where it computed 3. With AFAB the last stage
needs most, since it keeps the loss's probabilities too, with 1F1B the first one.
"""

import argparse
import pathlib
import statistics
import tempfile
from typing import NamedTuple

from launch import ROOT, Help, launch, metrics

STAGES, MICRO_BATCHES, STEPS_A_RUN = 4, (4, 8, 16, 32), 5
LAYERS, SEQ_LEN, MICRO_BATCH_SIZE = 16, 128, 2
STYLES = {("afab", False): dict(color="#d55e00", marker="s"), ("1f1b", False): dict(color="#0072b2", marker="o"),
          ("afab", True): dict(color="#d55e00", marker="s", fillstyle="none", linestyle="--"),
          ("1f1b", True): dict(color="#0072b2", marker="o", fillstyle="none", linestyle="--")}


class Case(NamedTuple):
    engine: str
    recompute: bool
    m: int  # micro-batches a step

    @property
    def live(self) -> int:
        """Micro-batches whose activations the first stage keeps at most."""
        return self.m if self.engine == "afab" else min(self.m, STAGES)

    def flags(self) -> list[str]:
        flags = dict(pp_size=STAGES, pp_engine=self.engine, gradient_accumulation_steps=self.m, device="cpu",
                     dtype="float32", num_hidden_layers=LAYERS, seq_len=SEQ_LEN, micro_batch_size=MICRO_BATCH_SIZE,
                     max_tokens=STEPS_A_RUN * self.m * MICRO_BATCH_SIZE * SEQ_LEN)
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        return words + ["--recompute"] * self.recompute


class Measured(NamedTuple):
    gb: float
    tokens_per_second: float  # of the fastest step: what else the machine does can only slow down a step


def cases(micro_batches) -> list[Case]:
    """Those to be compared run one after the other, so that a busy machine slows down both."""
    return [Case(engine, recompute, m) for m in micro_batches for engine in ("afab", "1f1b")
            for recompute in (False, True)]


def measure(micro_batches) -> dict[Case, Measured]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(micro_batches):
            launch(8, STAGES, *case.flags(), "--log_dir", folder, timeout=300)
            rows = metrics(folder)
            speed = max(row["tokens_per_second"] for row in rows)
            found[case] = Measured(rows[-1]["memory_gb"], speed)
            print(f"{name_of(case.engine, case.recompute)}, {case.m} micro-batches: {found[case].gb:.2f} GB, "
                  f"{speed:,.0f} tokens/s", flush=True)
    return found


def name_of(engine: str, recompute: bool) -> str:
    return engine.upper() + (", recomputed" if recompute else "")


def table(found: dict[Case, Measured]) -> str:
    """Markdown: a row a series; GB for each number of micro-batches, and tokens/s and time for the largest one."""
    counts = sorted({case.m for case in found})
    most = counts[-1]
    header = ["schedule", *(f"m = {m}" for m in counts), f"tokens/s, m = {most}", "step time / not recomputed (all m)"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for engine, recompute in STYLES:
        own = [found[Case(engine, recompute, m)] for m in counts]
        times = [found[Case(engine, False, m)].tokens_per_second / one.tokens_per_second for m, one in zip(counts, own)]
        spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if recompute else "1"
        lines.append([name_of(engine, recompute), *(f"{one.gb:.2f} GB" for one in own),
                      f"{own[-1].tokens_per_second:,.0f}", spread])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def per_live_microbatch(found: dict[Case, Measured], recompute: bool) -> float:
    """MB: the slope of AFAB's memory."""
    points = [(case.live, 1e3 * one.gb) for case, one in found.items() if case[:2] == ("afab", recompute)]
    return statistics.linear_regression(*zip(*points)).slope


def draw(found: dict[Case, Measured], picture: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for (engine, recompute), style in STYLES.items():
        series = {case: one for case, one in found.items() if case[:2] == (engine, recompute)}
        gigabytes = [one.gb for one in series.values()]
        label = name_of(engine, recompute)
        panels[0].plot([case.m for case in series], gigabytes, label=label, linewidth=1.6, markersize=8, **style)
        panels[1].plot([case.live for case in series], gigabytes, label=label, linewidth=1.6, markersize=8, **style)
    panels[0].set_title("Peak memory of the largest rank (GB), 4 stages", loc="left", fontsize=13)
    panels[1].set_title("the same points, by what is alive", loc="left", fontsize=13)
    for axes, x in zip(panels, ("micro-batches of a step", "micro-batches alive in the first stage")):
        axes.set_xlabel(x, fontsize=12)
        axes.set_xticks(sorted({case.m for case in found}))
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlim=(0, None), ylim=(0, None), axisbelow=True)
    panels[0].legend(frameon=False, fontsize=12)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=MICRO_BATCHES, metavar="M", help="of a step")
    parser.add_argument("--figure", type=pathlib.Path, default=ROOT / "runs" / "recompute_memory.png",
                        help="where to draw it")
    args = parser.parse_args()
    if len(set(args.micro_batches)) < 2:
        parser.error(f"--micro_batches {args.micro_batches}: give two numbers at least, to draw a line")
    found = measure(sorted(set(args.micro_batches)))
    print(f"\n{table(found)}\n")
    slopes = [per_live_microbatch(found, recompute) for recompute in (False, True)]
    print(f"AFAB: {slopes[0]:.1f} MB a live micro-batch, {slopes[1]:.1f} MB recomputed")
    draw(found, args.figure)
    print(f"figure: {args.figure}")


if __name__ == "__main__":
    main()
