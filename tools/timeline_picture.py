"""A recorded timeline as a picture: one row per rank, time to the right.

    python tools/timeline_picture.py runs/default_run/timeline_batch5_all.json timeline.png

Blocks are forward and backward passes, with the number of their micro-batch; with zero bubble, gradients of weights are
blocks of their own. What stays grey between the first and the
last of them is the bubble. A line leads from the end of the pass that made a tensor to the end of its receive. Bars
under a row are all-reduces of gradients.
"""

import argparse
import json
import sys

COMPUTE = ("forward", "backward", "weight gradients")
COLOURS = {"forward": "#4477aa", "backward": "#228833", "weight gradients": "#ccbb44", "optimizer": "#aa3377",
           "bubble": "#dddddd", "transfer": "#ee7733", "all-reduce": "#66ccee"}
HEIGHT = 0.62  # of a block; rows are 1 apart


def draw(trace_path: str, png_path: str) -> None:
    """Draws what Timeline.write() has written. Raises ImportError, with the remedy, without matplotlib."""
    try:
        import matplotlib  # imported here: training needs none
    except ImportError:
        raise ImportError("a picture of the timeline needs matplotlib: pip install -e '.[test]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(trace_path) as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    compute = [event for event in spans if event["cat"] in COMPUTE]
    start = min(event["ts"] for event in compute) / 1e3
    length = max(event["ts"] + event["dur"] for event in compute) / 1e3 - start
    bubble = 1 - sum(event["dur"] for event in compute) / 1e3 / (length * len(names))
    figure, axes = plt.subplots(figsize=(12, 0.75 * len(names) + 1.4), dpi=120, layout="constrained")
    axes.barh(list(names), length, left=start, height=HEIGHT, color=COLOURS["bubble"])
    for event in spans:
        draw_span(axes, event)
    draw_transfers(axes, spans)
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(max(names) + 0.6, min(names) - 0.6)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.01)
    axes.set_xlabel("milliseconds")
    counts = {event["pid"]: event["args"]["microbatch"] + 1 for event in compute}  # of a pipeline, the last counts
    axes.set_title(f"{len(names)} ranks, up to {max(counts.values())} micro-batches: {length:.0f} ms from the first "
                   f"forward to the last backward, bubble {bubble:.0%}", loc="left", fontsize=10, pad=26)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = {name: colour for name, colour in COLOURS.items()
             if name != "weight gradients" or any(event["cat"] == name for event in compute)}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
    axes.legend(handles, shown, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                fontsize=9, borderaxespad=0.2)
    figure.savefig(png_path)
    plt.close(figure)


def draw_span(axes, event: dict) -> None:
    start, length, row = event["ts"] / 1e3, event["dur"] / 1e3, event["pid"]
    if event["cat"] == "all-reduce":
        axes.barh(row + HEIGHT / 2 + 0.06, length, left=start, height=0.08, color=COLOURS["all-reduce"])
    elif event["cat"] in (*COMPUTE, "optimizer"):
        axes.barh(row, length, left=start, height=HEIGHT, color=COLOURS[event["cat"]], edgecolor="white", linewidth=0.5)
        if "microbatch" in event["args"]:
            axes.text(start + length / 2, row, event["args"]["microbatch"], ha="center", va="center", color="white",
                      fontsize=7, clip_on=True)


def draw_transfers(axes, spans: list[dict]) -> None:
    """For each transfer, a line from the end of the sender's pass to the end of the receive, which a point marks.

    A stage receives outputs of forward passes from a lower rank, and gradients of backward passes from a higher one.
    """
    computed = {(event["pid"], event["cat"], event["args"]["microbatch"]): event["ts"] + event["dur"]
                for event in spans if event["cat"] in ("forward", "backward")}
    for event in spans:
        if event["cat"] == "receive":
            sender, receiver, microbatch = event["args"]["peer"], event["pid"], event["args"]["microbatch"]
            kind, edge = ("forward", HEIGHT / 2) if sender < receiver else ("backward", -HEIGHT / 2)
            times = (computed[sender, kind, microbatch] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            axes.plot(times, (sender + edge, receiver - edge), color=COLOURS["transfer"], linewidth=1,
                      marker="o", markevery=[1], markersize=2.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace_path", help="timeline_batch<N>_all.json of a run with --profile_batch N")
    parser.add_argument("png_path", help="where to write the picture")
    try:
        draw(**vars(parser.parse_args()))
    except (ImportError, OSError) as error:
        sys.exit(f"error: {error}")
