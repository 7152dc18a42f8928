"""Draws a run's timeline as a picture: a row a rank, time to the right.

    python tools/draw_timeline.py runs/pp4_afab/timeline_batch5_all.json assets/timeline_afab.png ["a title"]
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"forward": "#4477aa", "backward": "#228833", "optimizer": "#aa3377", "wait": "#dddddd"}


def draw(path: str, picture: str, title: str) -> None:
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    figure, axes = plt.subplots(figsize=(12, 0.6 * len(names) + 1.2), dpi=120, layout="constrained")
    for event in events:
        if event["ph"] != "X" or event["tid"] != 0 or event["cat"] not in COLOURS:
            continue
        start, length = event["ts"] / 1e3, event["dur"] / 1e3
        axes.barh(event["pid"], length, left=start, height=0.8, color=COLOURS[event["cat"]], edgecolor="white",
                  linewidth=0.5)
        if "microbatch" in event["args"] and event["cat"] != "wait":
            axes.text(start + length / 2, event["pid"], event["args"]["microbatch"], ha="center", va="center",
                      color="white", fontsize=7, clip_on=True)
    axes.set_yticks(list(names), list(names.values()))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, COLOURS, ncols=len(COLOURS), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
