"""The figure of sanity_check.py: for the loss and the gradient norm, a panel of the curves and one of what parts them.

A run is a sanity_check.Run.
"""

import itertools
import math
import pathlib
import textwrap

from lab.launch import writing

PANELS = {"loss": ("loss", "|loss - baseline|"),
          "grad_norm": ("gradient norm", "|gradient norm - baseline| / baseline")}
COLOURS = ["#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#004d40", "#1fa187", "#999933", "#aa4499", "#882255",
           "#666666", "#f0a3c6", "#a65628", "#4daf4a", "#5e3c99",
           "#c0ca33", "#00bcd4"]  # as many as sanity_check.py has rows beside the baseline


def draw(runs: list, picture: pathlib.Path, dtype: str, tolerance: dict) -> None:
    """The first run is the baseline; `tolerance`: of each key in PANELS, the sanity_check.Limit."""
    from matplotlib.figure import Figure

    height = 1 + 4 * len(PANELS)  # inches
    figure = Figure(figsize=(11.6, height), dpi=100)
    panels = figure.subplots(len(PANELS), 2)
    figure.subplots_adjust(left=0.052, right=0.865, top=1 - 1.0 / height, bottom=0.5 / height, wspace=0.17, hspace=0.22)
    for (left, right), key in zip(panels, PANELS):
        draw_curves(left, runs, key)
        draw_gaps(right, runs, key, tolerance[key])
        for axes, title in zip((left, right), PANELS[key]):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set(axisbelow=True)
            axes.locator_params(axis="x", integer=True)
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set(xlabel="optimizer step")
    recipe, steps = runs[0].recipe, len(runs[0].values["loss"])
    labels = textwrap.shorten(", ".join(run.label for run in runs[1:]), 110, placeholder=" ...")
    what = [pathlib.Path(recipe["model_name"]).name, dtype,
            f"{steps} steps of {runs[0].tokens_per_step:,} tokens",
            *(f"{run.label} stops after {length}" for run in runs if (length := len(run.values["loss"])) < steps)]
    figure.text(0.016, 1 - 0.3 / height, f"{runs[0].label} against {labels}", fontsize=13, weight="bold")
    figure.text(0.016, 1 - 0.56 / height, "  \u00b7  ".join(what), fontsize=10.5, color="#555555")
    with writing(picture):
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, pil_kwargs={"optimize": True})


def draw_curves(axes, runs: list, key: str) -> None:
    """The baseline as a broad band; upon it each run in dashes of its own phase, so that no run hides another."""
    baseline = runs[0].values[key]
    axes.plot(range(1, len(baseline) + 1), baseline, color="#d4d4d4", linewidth=10,
              solid_capstyle="round", label=f"{runs[0].label} (the band)")
    for i, (run, colour) in enumerate(zip(runs[1:], itertools.cycle(COLOURS))):
        dashes = (-4 * i, (4, 4 * (len(runs) - 2)))  # in line widths: the phase, then on and off
        axes.plot(range(1, len(run.values[key]) + 1), run.values[key], color=colour, linewidth=3, linestyle=dashes,
                  dash_capstyle="butt")
    axes.legend(frameon=False, fontsize=10.5, loc="upper right")


def draw_gaps(axes, runs: list, key: str, limit) -> None:
    """Zero has no logarithm: differences of exactly zero are dots in a strip of their own, below all others."""
    baseline, runs, last = runs[0], runs[1:], len(runs[0].values[key])
    gaps, allowed = [run.gaps(baseline, key) for run in runs], math.log10(limit.largest)
    positive = [math.log10(gap) for run_gaps in gaps for gap in run_gaps if gap > 0]
    floor, top = math.floor(min(positive, default=-16)) - 0.1, max([allowed, *positive]) + 0.9
    strip = 0.2 * (top - floor)  # decades high; run i has its own height in it
    axes.set(ylim=(floor - strip, top), xlim=(0, last + 1))
    axes.axhspan(floor - strip, floor, color="#f1f1f1", zorder=0)
    axes.hlines(allowed, 1, min(limit.steps or last, last), "#333333", linestyle=(0, (5, 3)), linewidth=1.2)
    axes.text(1, allowed + 0.02 * (top - floor), f"tolerance: {limit.words}", color="#333333", fontsize=9,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}, zorder=5)
    ticks = range(math.ceil(floor), math.floor(top) + 1, max(1, round((top - floor) / 6)))
    axes.set_yticks([floor - strip / 2, *ticks], ["exactly\n0", *(f"$10^{{{tick}}}$" for tick in ticks)])
    ends = []
    for i, (run, run_gaps, colour) in enumerate(zip(runs, gaps, itertools.cycle(COLOURS))):
        zero = floor - strip * (i + 0.5) / len(runs)
        heights = [math.log10(gap) if gap else math.nan for gap in run_gaps]
        zeros = [math.nan if gap else zero for gap in run_gaps]
        steps = range(1, len(run_gaps) + 1)
        marker = "osD^vPX*p"[i % 9]
        axes.plot(steps, heights, color=colour, linewidth=1.5, marker=marker, markersize=4, markeredgewidth=0)
        axes.plot(steps, zeros, color=colour, linewidth=0, marker="o", markersize=3, markeredgewidth=0)
        ends.append(((heights[-1] if run_gaps[-1] else zero) - floor + strip, run.label, colour))
    # The labels, at the lines' ends where there is room: a line's colour says what it is, in all panels.
    places, height = [], top - floor + strip
    for end, *_ in sorted(ends):
        places.append(max(end / height, places[-1] + 0.075 if places else 0))
    for (end, label, colour), place in zip(sorted(ends), places):
        arrow = dict(arrowstyle="-", color=colour, linewidth=0.8, relpos=(0, 0.5), shrinkA=0, shrinkB=2)
        axes.annotate(label, (1, end / height), (1.05, place - max(0, places[-1] - 1)), xycoords="axes fraction",
                      color=colour, fontsize=10.5, weight="bold", va="center", arrowprops=arrow)
