"""Figures out of what runs have recorded: traces, metrics, a plan. make_figures.py starts the runs."""

import json
import pathlib
import re
from typing import NamedTuple

from matplotlib.figure import Figure

COLOURS = {"forward": "#4477aa", "backward": "#228833", "weight gradients": "#ccbb44", "all-reduce": "#ee7733",
           "wait": "#aa3377", "optimizer": "#777777", "reduce-scatter": "#ee7733", "all-gather": "#66ccee"}
GROUND, BUBBLE, INK, FAINT = "#fcfcfa", "#e3e3e0", "#222222", "#666666"
COMPUTE = ("forward", "backward", "weight gradients")
SCHEDULES = {"afab": "all forward, all backward (AFAB)", "1f1b": "one forward, one backward (1F1B)",
             "zb": "zero bubble", "interleaved": "interleaved 1F1B, two chunks per rank",
             "interleaved_zb": "interleaved zero bubble, two chunks per rank"}


class Span(NamedTuple):
    """A slice of a trace; seconds from the first compute of the trace on. `place`: dp, pp, tp of the rank."""

    rank: int
    place: tuple[int, ...]
    kind: str
    microbatch: int | None
    start: float
    end: float
    chunk: int = 0


def read_trace(path: pathlib.Path) -> list[Span]:
    events = json.loads(path.read_text())["traceEvents"]
    places = {event["pid"]: tuple(map(int, re.findall(r"\d+", event["args"]["name"])[1:]))
              for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    origin = min(event["ts"] for event in spans if event["cat"] in COMPUTE)
    numbers = [re.search(r"(\d+)(?: chunk (\d+))?$", event["name"]) for event in spans]  # as in "forward 3 chunk 1"
    return [Span(event["pid"], places[event["pid"]], event["cat"], number and int(number[1]),
                 (event["ts"] - origin) / 1e6, (event["ts"] + event["dur"] - origin) / 1e6,
                 int(number[2] or 0) if number else 0) for event, number in zip(spans, numbers)]


def bubble_of(spans: list[Span]) -> float:
    """The share of the time from the first forward to the last backward in which stages did neither."""
    compute = [span for span in spans if span.kind in COMPUTE]
    window = max(span.end for span in compute) - min(span.start for span in compute)
    return 1 - sum(span.end - span.start for span in compute) / (window * len({span.rank for span in compute}))


def seconds_of(spans: list[Span]) -> float:
    """Of the whole step."""
    return max(span.end for span in spans)


def last_backward(spans: list[Span]) -> list[Span]:
    """That of the last micro-batch, on each rank."""
    last = max(span.microbatch for span in spans if span.kind == "backward")
    return [span for span in spans if (span.kind, span.microbatch) == ("backward", last)]


def seconds_of_last_backward(spans: list[Span]) -> float:
    """From its begin on the first rank to the arrival of the last sum."""
    return seconds_of(spans) - min(span.start for span in last_backward(spans))


def panels(width: float, height: float, rows: int, columns: int = 1, **options):
    figure = Figure(figsize=(width, height), dpi=150, facecolor=GROUND, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for one in axes.flat:
        one.set_facecolor(GROUND)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=11, colors=INK)
    return figure, axes


def legend(figure, kinds: list[str], **more: str) -> None:
    from matplotlib.patches import Patch

    names = {kind: COLOURS[kind] for kind in kinds} | more
    figure.legend([Patch(color=colour) for colour in names.values()], names, loc="outside upper left", frameon=False,
                  fontsize=11.5, ncols=len(names))


def draw_compute(axes, spans: list[Span], numbers: bool = True) -> None:
    """A row a rank: its passes on a shaded ground, which is the bubble where nothing lies on it."""
    compute = [span for span in spans if span.kind in COMPUTE]
    end = max(span.end for span in compute)
    for row in {span.rank for span in compute}:
        axes.barh(row, end, height=0.72, color=BUBBLE)
    for span in compute:
        axes.barh(span.rank, span.end - span.start, left=span.start, height=0.72, color=COLOURS[span.kind],
                  alpha=0.65 if span.chunk else 1, edgecolor=GROUND, linewidth=0.6)
        if numbers and span.end - span.start > 0.012 * end:
            axes.text((span.start + span.end) / 2, span.rank, span.microbatch, ha="center", va="center",
                      fontsize=9.5, color="white" if span.kind != "weight gradients" else INK)
    axes.invert_yaxis()


def timelines(traces: dict[str, pathlib.Path], picture: pathlib.Path) -> None:
    """Schedules of one model, one below the other on one time axis, with their bubbles in percent."""
    figure, axes = panels(10, 0.4 + 2.4 * len(traces), len(traces), sharex=True)
    for one, (engine, path) in zip(axes[:, 0], traces.items()):
        spans = read_trace(path)
        draw_compute(one, spans)
        stages = sorted({span.rank for span in spans})
        one.set_yticks(stages, [f"stage {stage}" for stage in stages])
        seconds = max(span.end for span in spans if span.kind in COMPUTE)
        one.set_title(f"{SCHEDULES[engine]}: bubble {bubble_of(spans):.0%}, {seconds:.2f} s", loc="left", fontsize=13,
                      color=INK)
    lighter = "; the lighter blocks are chunk 1" if "interleaved" in traces else ""
    axes[-1, 0].set_xlabel(f"seconds; the number in a block is its micro-batch{lighter}", fontsize=12)
    axes[-1, 0].set_xlim(0, None)
    legend(figure, list(COMPUTE if {"zb", "interleaved_zb"} & traces.keys() else COMPUTE[:2]), bubble=BUBBLE)
    figure.savefig(picture)


def alive(spans: list[Span], rank: int) -> tuple[list[float], list[int]]:
    """Micro-batches whose activations a stage holds, from the start of a forward to the end of what needs them last."""
    last = {}
    for span in spans:
        if span.rank == rank and span.kind in ("backward", "weight gradients"):
            last[span.microbatch] = max(span.end, last.get(span.microbatch, 0))
    changes = [(span.start, 1) for span in spans if span.rank == rank and span.kind == "forward"]
    times, counts = [0.0], [0]
    for moment, change in sorted(changes + [(end, -1) for end in last.values()]):
        times.append(moment)
        counts.append(counts[-1] + change)
    return times, counts


def activations(traces: dict[str, pathlib.Path], picture: pathlib.Path) -> None:
    figure, axes = panels(10, 4.0, 1, len(traces), sharey=True)
    shades = ["#08306b", "#2171b5", "#6baed6", "#b3cde3"]
    for one, (engine, path) in zip(axes[0], traces.items()):
        spans = read_trace(path)
        for rank, shade in zip(sorted({span.rank for span in spans}), shades):
            times, counts = alive(spans, rank)
            one.step(times, counts, where="post", color=shade, linewidth=2.4, label=f"stage {rank}: {max(counts)}")
        one.set_title({"afab": "AFAB", "1f1b": "1F1B", "zb": "zero bubble"}[engine], loc="left", fontsize=13, color=INK)
        one.set_xlabel("seconds", fontsize=12)
        one.set(ylim=(0, 11.8), yticks=range(0, 9, 2))
        one.legend(frameon=False, fontsize=10.5, ncols=2, loc="upper center", title="at most", title_fontsize=10.5,
                   columnspacing=1.0, handlelength=1.2)
    axes[0, 0].set_ylabel("micro-batches alive", fontsize=12)
    figure.savefig(picture)


def buckets(trace: pathlib.Path, picture: pathlib.Path) -> None:
    """The last backward of a step on each rank, and the all-reduces of the buckets below it."""
    spans = read_trace(trace)
    ranks = sorted({span.rank for span in spans})
    figure, axes = panels(10, 3.9, 1)
    one, backwards = axes[0, 0], last_backward(spans)
    zero, end = min(span.start for span in backwards), 0.0
    for rank in ranks:
        sums = [span for span in spans if span.rank == rank and span.kind == "all-reduce" and span.end > zero]
        for span in spans:
            if span.rank != rank or span.end <= zero:
                continue
            if span in backwards or span.kind == "wait":
                one.barh(3 * rank, span.end - span.start, left=span.start - zero, height=0.9,
                         color=COLOURS[span.kind], edgecolor=GROUND)
                end = max(end, span.end - zero)
        for k, span in enumerate(sums):
            one.barh(3 * rank + 0.75 + 0.95 * (k + 0.5) / len(sums), span.end - span.start, left=span.start - zero,
                     height=0.8 / len(sums), color=COLOURS["all-reduce"])
    one.set_yticks([row for rank in ranks for row in (3 * rank, 3 * rank + 1.2)],
                   [text for rank in ranks for text in (f"rank {rank}", f"its {len(sums)} buckets")])
    one.set(xlim=(0, 1.02 * end))
    one.invert_yaxis()
    one.set_xlabel("seconds since the last micro-batch's backward began", fontsize=12)
    legend(figure, ["backward", "all-reduce", "wait"])
    figure.savefig(picture)


def transfers(trace: pathlib.Path, picture: pathlib.Path) -> None:
    """A step on each rank: its passes, its waits and its optimizer, and below it what is gathered and scattered."""
    spans = read_trace(trace)
    ranks = sorted({span.rank for span in spans})
    figure, axes = panels(10, 4.2, 1)
    one, kinds = axes[0, 0], ["forward", "backward", "wait", "optimizer", "all-gather", "reduce-scatter"]
    for span in spans:
        if span.kind in kinds:
            row = 4 * span.rank + max(0, kinds.index(span.kind) - 3)
            one.barh(row, span.end - span.start, left=span.start, height=0.8, color=COLOURS[span.kind],
                     alpha=1.0 if row == 4 * span.rank else 0.6, linewidth=0)
    one.set_yticks([4 * rank + row for rank in ranks for row in range(3)],
                   [text for rank in ranks for text in (f"rank {rank}", "all-gathers", "reduce-scatters")])
    one.set(xlim=(min(span.start for span in spans), 1.01 * seconds_of(spans)))
    one.invert_yaxis()
    one.set_xlabel("seconds since the step's first forward began", fontsize=12)
    legend(figure, kinds)
    figure.savefig(picture)


def expert_load(runs: dict[str, list[dict]], picture: pathlib.Path) -> None:
    """The largest load of an expert and the loss, step by step, of runs by their names: rows of metrics.jsonl."""
    figure, axes = panels(10, 4.2, 1, 2)
    for one, what, title in zip(axes[0], ("expert_load", "loss"), ("largest load of an expert, mean = 1", "loss")):
        for (name, rows), colour in zip(runs.items(), ("#aa3377", "#4477aa", "#228833")):
            steps, values = [row["step"] for row in rows], [row[what] for row in rows]
            one.plot(steps, values, color=colour, label=name, linewidth=1.6)
        one.set_title(title, loc="left", fontsize=13, color=INK)
        one.set_xlabel("optimizer step", fontsize=12)
    axes[0, 0].set_ylim(bottom=1)
    axes[0, 1].legend(frameon=False, fontsize=11.5)
    figure.savefig(picture)


def unlike(trace: pathlib.Path, picture: pathlib.Path) -> None:
    """Pipelines of unlike shapes: a row a rank, and the bubble of each pipeline."""
    spans = read_trace(trace)
    figure, axes = panels(10, 3.6, 1)
    one = axes[0, 0]
    draw_compute(one, spans)
    places = dict(sorted({(span.rank, span.place) for span in spans}))
    layers = {(0, 0): "8 layers", (1, 0): "layers 0-4", (1, 1): "layers 5-7"}
    one.set_yticks(list(places), [f"rank {rank}: pipeline {dp}\nstage {pp}, {layers[dp, pp]}"
                                  for rank, (dp, pp, _) in places.items()])
    for pipeline in sorted({place[0] for place in places.values()}):
        own = [span for span in spans if span.place[0] == pipeline]
        seconds = max(span.end for span in own if span.kind in COMPUTE)
        counts = 1 + max(span.microbatch for span in own if span.kind == "forward")
        one.set_title(one.get_title(loc="left") + f"{'   ' * pipeline}pipeline {pipeline}: {counts} micro-batches in "
                      f"{seconds:.2f} s" + (f", bubble {bubble_of(own):.0%}" if pipeline else ";"), loc="left",
                      fontsize=13, color=INK)
    one.set_xlabel("seconds; the number in a block is its micro-batch", fontsize=12)
    legend(figure, ["forward", "backward"], bubble=BUBBLE)
    figure.savefig(picture)


def memory(gigabytes: dict[str, float], floor: float, picture: pathlib.Path) -> None:
    """Peak memory of the rank that needs most, for each topology. `floor`: of a process that trains almost nothing."""
    figure, axes = panels(10, 4.0, 1)
    one, names = axes[0, 0], list(gigabytes)
    one.barh(names, [min(floor, value) for value in gigabytes.values()], color=BUBBLE, height=0.66)
    one.barh(names, [max(0, value - floor) for value in gigabytes.values()], left=floor, color="#4477aa", height=0.66)
    for row, value in enumerate(gigabytes.values()):
        one.text(value, row, f"  {value:.2f} GB", va="center", fontsize=11.5, color=INK)
    one.set(xlim=(0, 1.12 * max(gigabytes.values())))
    one.invert_yaxis()
    one.set_xlabel("GB of the rank that needs most, at its peak", fontsize=12)
    legend(figure, [], **{"Python and torch": BUBBLE, "parameters, gradients, AdamW's state, activations": "#4477aa"})
    figure.savefig(picture)


def plan(cluster: dict, planned: dict, spans: list[tuple], picture: pathlib.Path) -> None:
    """Measured machines, and what the planner gives them: layers, micro-batches, the simulated step.

    `spans`: (rank, kind F or B, micro-batch, start, end) of the simulation.
    """
    figure, axes = panels(10, 4.4, 1, 2, width_ratios=(1, 2.3))
    left, right = axes[0]
    machines = {rank: (k, layers, pipeline["num_microbatches"]) for k, pipeline in enumerate(planned["pipelines"])
                for rank, layers in zip(pipeline["machines"], pipeline["layers"])}
    speeds = [1e3 * seconds for seconds in cluster["seconds"]]
    ranks = range(len(speeds))
    left.barh(ranks, speeds, color="#b8c4cc", height=0.6)
    for rank in ranks:
        left.text(speeds[rank], rank, f" {speeds[rank]:.0f} ms", va="center", fontsize=11.5, color=INK)
    left.set_yticks(ranks, [f"machine {rank}" for rank in ranks])
    left.set(xlim=(0, 1.4 * max(speeds)), xticks=[])
    left.set_title("measured: the whole model,\na micro-batch of one sample", loc="left", fontsize=12, color=INK)
    right.set_title(f"planned: {planned['global_batch']} samples in micro-batches of {planned['micro_batch_size']}, "
                    f"{planned['predicted']['step_seconds']:.2f} s a step", loc="left", fontsize=12, color=INK)
    kinds = {"F": "forward", "B": "backward"}
    draw_compute(right, [Span(rank, (), kinds[kind], i, start, end) for rank, kind, i, start, end in spans])
    right.set_yticks(ranks, [f"pipeline {machines[rank][0]}\n{machines[rank][1]} layers" if rank in machines else "idle"
                             for rank in ranks])
    left.set_ylim(right.get_ylim())
    right.set_xlabel("seconds, simulated", fontsize=12)
    legend(figure, ["forward", "backward"], bubble=BUBBLE)
    figure.savefig(picture)
