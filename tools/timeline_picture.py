"""A recorded timeline as a picture: one row per rank, time to the right.

    python tools/timeline_picture.py runs/default_run/timeline_batch5_all.json timeline.png

Blocks are forward and backward passes, with the number of their micro-batch; with zero bubble, gradients of weights are
blocks of their own. What stays grey between the first and the last of them is the bubble. A line leads from the end of
the pass that made a tensor to the end of its receive. Bars under a row are collectives in the background; how much of
the gradients' all-reduces backward hides is printed.
"""

import argparse
import json
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.launch import writing
from lab.picture import COLOURS, GROUND, INK

COMPUTE = ("forward", "backward", "weight gradients")
HEIGHT = 0.72  # of a block; rows are 1 apart


class Span(NamedTuple):
    """A slice of a trace; seconds from the first compute of the trace on. `place`: dp, pp, tp of the rank."""

    rank: int
    place: tuple[int, ...]
    kind: str
    microbatch: int | None
    start: float
    end: float
    chunk: int = 0
    peer: int | None = None  # the sender of what was received


def read_trace(path: str | pathlib.Path) -> list[Span]:
    events = json.loads(pathlib.Path(path).read_text(encoding="utf-8-sig"))["traceEvents"]
    places = {event["pid"]: tuple(map(int, re.findall(r"\d+", event["args"]["name"])[1:]))
              for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    origin = min(event["ts"] for event in spans if event["cat"] in COMPUTE)
    numbers = [re.search(r"(\d+)(?: chunk (\d+))?$", event["name"]) for event in spans]  # as in "forward 3 chunk 1"
    return [Span(event["pid"], places[event["pid"]], event["cat"], number and int(number[1]),
                 (event["ts"] - origin) / 1e6, (event["ts"] + event["dur"] - origin) / 1e6,
                 int(number[2] or 0) if number else 0, event.get("args", {}).get("peer"))
            for event, number in zip(spans, numbers)]


def computed(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind in COMPUTE]


def seconds_of(spans: list[Span]) -> float:
    return max(span.end for span in spans)


def bubble_of(spans: list[Span]) -> float:
    """The share of the time from the first forward to the last backward in which stages did neither."""
    compute = computed(spans)
    window = seconds_of(compute) - min(span.start for span in compute)
    return 1 - sum(span.end - span.start for span in compute) / (window * len({span.rank for span in compute}))


def overlap_of(spans: list[Span]) -> str:
    """How much of rank 0's all-reduces of gradients lay under its backward."""
    end = max(span.end for span in spans if (span.rank, span.kind) == (0, "backward"))
    sums = [span for span in spans if (span.rank, span.kind) == (0, "all-reduce")]
    during = sum(min(span.end, end) - min(span.start, end) for span in sums)
    after = max([span.end - end for span in sums] + [0.0])
    return f"rank 0: {len(sums)} all-reduces, {1e3 * during:.1f} ms during backward and {1e3 * after:.1f} ms after it"


def draw_compute(axes, spans: list[Span], labels: dict[int, str], title: str) -> None:
    """A row a rank: its passes on a shaded ground, which is the bubble where nothing lies on it."""
    compute, end = computed(spans), seconds_of(computed(spans))
    for row in {span.rank for span in compute}:
        axes.barh(row, end, height=HEIGHT, color=COLOURS["bubble"])
    for span in compute:
        axes.barh(span.rank, span.end - span.start, left=span.start, height=HEIGHT, color=COLOURS[span.kind],
                  alpha=0.65 if span.chunk else 1, edgecolor=GROUND, linewidth=0.6)
        if span.end - span.start > 0.012 * end:
            axes.text((span.start + span.end) / 2, span.rank, span.microbatch, ha="center", va="center",
                      fontsize=9.5, color="white" if span.kind != "weight gradients" else INK)
    axes.invert_yaxis()
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_title(title, loc="left", fontsize=13, color=INK)


def draw(trace_path: str, png_path: str) -> None:
    """Draws what Timeline.write() has written. Raises ImportError, with the remedy, without matplotlib."""
    try:
        from matplotlib.figure import Figure  # imported here: training needs none
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("a picture of the timeline needs matplotlib: pip install -e '.[test]'") from None
    spans = read_trace(trace_path)
    names = {span.rank: "rank {}: dp {} pp {} tp {}".format(span.rank, *span.place) for span in spans}
    count, seconds = 1 + max(span.microbatch for span in computed(spans)), seconds_of(computed(spans))
    figure = Figure(figsize=(12, 0.75 * len(names) + 1.4), dpi=120, layout="constrained", facecolor=GROUND)
    axes = figure.subplots()
    draw_compute(axes, spans, names, f"{len(names)} ranks, up to {count} micro-batches: {seconds:.3g} s from the first "
                                     f"forward to the last backward, bubble {bubble_of(spans):.0%}")
    background = [span for span in spans if span.kind in COLOURS and span.kind not in (*COMPUTE, "wait")]
    for span in background:
        y, height = (0, HEIGHT) if span.kind == "optimizer" else (HEIGHT / 2 + 0.06, 0.08)
        axes.barh(span.rank + y, span.end - span.start, left=span.start, height=height, color=COLOURS[span.kind])
    draw_transfers(axes, spans)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = sorted({"bubble", "transfer", *(span.kind for span in computed(spans) + background)}, key=[*COLOURS].index)
    figure.legend([Patch(color=COLOURS[kind]) for kind in shown], shown, ncols=len(shown), loc="outside upper left",
                  frameon=False)
    with writing(png_path):
        pathlib.Path(png_path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png_path)


def draw_transfers(axes, spans: list[Span]) -> None:
    """For each transfer, a line from the end of the sender's pass to the end of the receive, which a point marks.

    A stage receives outputs of forward passes from a lower rank, and gradients of backward passes from a higher one.
    """
    ends = {(span.rank, span.kind, span.microbatch): span.end for span in spans}
    for span in spans:
        if span.kind == "receive":
            kind, edge = ("forward", HEIGHT / 2) if span.peer < span.rank else ("backward", -HEIGHT / 2)
            times = (ends[span.peer, kind, span.microbatch], span.end)
            axes.plot(times, (span.peer + edge, span.rank - edge), color=COLOURS["transfer"], linewidth=1,
                      marker="o", markevery=[1], markersize=2.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace_path", help="timeline_batch<N>_all.json of a run with --profile_batch N")
    parser.add_argument("png_path", help="where to write the picture")
    try:
        args = parser.parse_args()
        draw(**vars(args))
        print(overlap_of(read_trace(args.trace_path)))
    except (ImportError, OSError) as error:
        sys.exit(f"error: {error}")
