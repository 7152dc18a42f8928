"""Figures out of what runs have recorded: traces, a plan. make_figures.py starts the runs."""

import pathlib
import statistics

from matplotlib.patches import Patch

from lab.picture import COLOURS
from maintain.figures_drawn import INK, canvas
from timeline_picture import COMPUTE, Span, bubble_of, computed, draw_compute, read_trace, seconds_of

SCHEDULES = {"afab": "all forward, all backward (AFAB)", "1f1b": "one forward, one backward (1F1B)",
             "zb": "zero bubble", "interleaved": "interleaved 1F1B, two chunks per rank",
             "interleaved_zb": "interleaved zero bubble, two chunks per rank"}


def last_backward(spans: list[Span]) -> list[Span]:
    """From where the last micro-batch's backward begins on the first rank, to the last sum. Of several runs, that is
    shortest where the ranks begin together: where one is late, the others' sums wait for it."""
    last = max(span.microbatch for span in spans if span.kind == "backward")
    begin = min(span.start for span in spans if (span.kind, span.microbatch) == ("backward", last))
    return [span._replace(start=max(span.start, begin) - begin, end=span.end - begin) for span in spans
            if span.end > begin and span.kind in ("backward", "all-reduce", "wait")]


def save(figure, axes, picture: pathlib.Path, label: str, kinds=()) -> None:
    """`label`: of the last row's x axes. The legend has the kinds."""
    for one in axes[-1]:
        one.set_xlabel(label, fontsize=12)
    if kinds:
        figure.legend([Patch(color=COLOURS[kind]) for kind in kinds], kinds, loc="outside upper left", frameon=False,
                      fontsize=11.5, ncols=len(kinds))
    figure.savefig(picture)


def timelines(traces: dict[str, pathlib.Path], picture: pathlib.Path) -> None:
    """Schedules of one model, one below the other on one time axis, with their bubbles in percent."""
    row = "rank" if "interleaved" in traces else "stage"
    figure, axes = canvas(10, 0.4 + 2.4 * len(traces), 1, len(traces), bare=False, sharex=True)
    for one, (engine, path) in zip(axes[:, 0], traces.items()):
        spans = read_trace(path)
        draw_compute(one, spans, {rank: f"{row} {rank}" for rank in sorted({span.rank for span in spans})},
                     f"{SCHEDULES[engine]}: bubble {bubble_of(spans):.0%}, {seconds_of(computed(spans)):.2f} s")
    lighter = "; the lighter blocks are chunk 1" if "interleaved" in traces else ""
    axes[-1, 0].set_xlim(0, None)
    save(figure, axes, picture, f"seconds; the number in a block is its micro-batch{lighter}",
         (*(COMPUTE if {"zb", "interleaved_zb"} & traces.keys() else COMPUTE[:2]), "bubble"))


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
    figure, axes = canvas(10, 4.0, len(traces), bare=False, sharey=True)
    shades = ["#08306b", "#2171b5", "#6baed6", "#b3cde3"]
    for one, (engine, path) in zip(axes[0], traces.items()):
        spans = read_trace(path)
        for rank, shade in zip(sorted({span.rank for span in spans}), shades):
            times, counts = alive(spans, rank)
            one.step(times, counts, where="post", color=shade, linewidth=2.4, label=f"stage {rank}: {max(counts)}")
        one.set_title({"afab": "AFAB", "1f1b": "1F1B", "zb": "zero bubble"}[engine], loc="left", fontsize=13, color=INK)
        one.set(ylim=(0, 11.8), yticks=range(0, 9, 2))
        one.legend(frameon=False, fontsize=10.5, ncols=2, loc="upper center", title="at most", title_fontsize=10.5,
                   columnspacing=1.0, handlelength=1.2)
    axes[0, 0].set_ylabel("micro-batches alive", fontsize=12)
    save(figure, axes, picture, "seconds")


def transfers(spans: list[Span], background: tuple[str, ...], picture: pathlib.Path, label: str, title: str) -> None:
    """On each rank, its passes, waits and optimizer, and below them a row for each kind of message."""
    figure, axes = canvas(10, 4.2, bare=False)
    one, rows = axes[0, 0], 1 + len(background)
    spans = [span for span in spans if span.kind in (*COMPUTE, "wait", "optimizer", *background)]
    for span in spans:
        if span.kind in background:
            others = [other for other in spans if (other.rank, other.kind) == (span.rank, span.kind)]
            lane = 0.9 * (others.index(span) % 3 + 0.5) / 3 - 0.45  # some are under way at the same time
            one.barh(rows * span.rank + 1 + background.index(span.kind) + lane, span.end - span.start, left=span.start,
                     height=0.3, color=COLOURS[span.kind])
        else:
            one.barh(rows * span.rank, span.end - span.start, left=span.start, height=0.8, color=COLOURS[span.kind],
                     linewidth=0)
    ranks = range(1 + max(span.rank for span in spans))
    one.set_yticks([*range(rows * len(ranks))], [text for rank in ranks for text in (
        f"rank {rank}", *(f"its {kind}s" for kind in background))])
    one.set(xlim=(min(span.start for span in spans), 1.01 * seconds_of(spans)))
    one.set_title(title, loc="left", fontsize=13, color=INK)
    one.invert_yaxis()
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
    save(figure, axes, picture, label, kinds)


def unlike(trace: pathlib.Path, picture: pathlib.Path) -> None:
    """Pipelines of unlike shapes: a row a rank, and the bubble of each pipeline."""
    spans = read_trace(trace)
    layers, titles = {(0, 0): "8 layers", (1, 0): "layers 0-4", (1, 1): "layers 5-7"}, []
    for pipeline in (0, 1):
        own = [span for span in computed(spans) if span.place[0] == pipeline]
        titles.append(f"pipeline {pipeline}: {1 + max(span.microbatch for span in own)} micro-batches in "
                      f"{seconds_of(own):.2f} s" + (f", bubble {bubble_of(own):.0%}" if pipeline else ""))
    figure, axes = canvas(10, 3.6, bare=False)
    draw_compute(axes[0, 0], spans, {rank: f"rank {rank}: pipeline {dp}\nstage {pp}, {layers[dp, pp]}" for rank, (
        dp, pp, _) in sorted({(span.rank, span.place) for span in spans})}, ";   ".join(titles))
    save(figure, axes, picture, "seconds; the number in a block is its micro-batch", (*COMPUTE[:2], "bubble"))


def muon(found: dict, picture: pathlib.Path) -> None:
    """The singular values of an update, and losses over tokens and over seconds: see course_muon.compare()."""
    figure, ((left, middle, right),) = canvas(10, 3.7, 3, bare=False)
    shades = {"adamw": "#ee7733", "muon": "#4477aa"}
    for values, colour, label in zip(found["singular_values"], ("#999999", shades["muon"]), ("before", "after")):
        left.semilogy(range(1, len(values) + 1), values, color=colour, linewidth=2.2, label=label)
    left.set_title("singular values of an update", loc="left", fontsize=12, color=INK)
    left.set_xlabel("number", fontsize=12)
    runs = [run for run in found["runs"] if found["best"][run["name"][0]] == run["name"][1]]
    for run in runs:
        kind, losses = run["name"][0], run["losses"]
        smooth = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        seconds = statistics.median(run["seconds"])
        label = {"adamw": "AdamW", "muon": "Muon"}[kind] if run["name"][2] == runs[0]["name"][2] else None
        for axes, unit in ((middle, 1.024), (right, seconds)):
            axes.plot([unit * (i + 1) for i in range(9, len(smooth))], smooth[9:], color=shades[kind], linewidth=1.6,
                      label=label)
    for axes, label in ((middle, "thousand tokens"), (right, "seconds of one core")):
        axes.set_title("loss, mean of ten steps", loc="left", fontsize=12, color=INK)
        axes.set_xlabel(label, fontsize=12)
    for axes in (left, middle):
        axes.legend(frameon=False, fontsize=11)
    figure.savefig(picture)


def plan(seconds: list[float], planned: dict, spans: list[tuple], picture: pathlib.Path) -> None:
    """Measured machines, and what the planner gives them: layers, micro-batches, the simulated step.

    `seconds`: of the whole model on each machine. `spans`: (rank, kind F or B, micro-batch, start, end) as simulated.
    """
    figure, ((left, right),) = canvas(10, 4.4, 2, bare=False, width_ratios=(1, 2.3))
    labels = dict.fromkeys(range(len(seconds)), "idle")
    for k, pipeline in enumerate(planned["pipelines"]):
        for rank, layers in zip(pipeline["machines"], pipeline["layers"]):
            labels[rank] = f"pipeline {k}\n{layers} layers"
    left.barh(list(labels), [1e3 * each for each in seconds], color="#b8c4cc", height=0.6)
    for rank, each in enumerate(seconds):
        left.text(1e3 * each, rank, f" {1e3 * each:.0f} ms", va="center", fontsize=11.5, color=INK)
    left.set_yticks(list(labels), [f"machine {rank}" for rank in labels])
    left.set(xlim=(0, 1.4e3 * max(seconds)), xticks=[])
    left.set_title("measured: the whole model,\na micro-batch of one sample", loc="left", fontsize=12, color=INK)
    kinds = {"F": "forward", "B": "backward"}
    draw_compute(right, [Span(rank, (), kinds[kind], i, start, end) for rank, kind, i, start, end in spans], labels,
                 f"planned: {planned['global_batch']} samples in micro-batches of {planned['micro_batch_size']}, "
                 f"{planned['predicted']['step_seconds']:.2f} s a step")
    left.set_ylim(right.get_ylim())
    save(figure, [[right]], picture, "seconds, simulated", (*COMPUTE[:2], "bubble"))
