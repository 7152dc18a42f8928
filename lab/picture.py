"""A space-time diagram of a run: a row a rank, time to the right. Its colours are those of the chapters' figures.

Time is logical: a forward takes 1 unit and a backward 2, or 1 where gradients of weights (W) are a part of their own,
which takes 1 too. Messages take none. A rank waits where the log of messages says so.
"""

import pathlib
import types
from collections import defaultdict
from html import escape
from typing import NamedTuple

from lab.launch import writing
from lab.watch.schedule import name

COLOURS = {"forward": "#4477aa", "backward": "#228833", "weight gradients": "#ccbb44", "all-reduce": "#ee7733",
           "wait": "#aa3377", "optimizer": "#777777", "reduce-scatter": "#ee7733", "all-gather": "#66ccee",
           "bubble": "#e3e3e0", "transfer": "#66ccee"}
GROUND, INK = "#fcfcfa", "#222222"
FILLS = {"F": COLOURS["forward"], "B": COLOURS["backward"], "W": COLOURS["weight gradients"]}
ENDINGS = (".svg", ".png")
ROW, BAR, LEFT, TOP = 46, 26, 64, 34  # pixels
STYLE = """.lab{font:12px sans-serif;color:inherit}svg.lab:root{color:#222222;background:#fcfcfa}
@media(prefers-color-scheme:dark){svg.lab:root{color:#e4e4e0;background:#1c1c1e}}"""


class Bar(NamedTuple):
    rank: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


class Timed(NamedTuple):
    bars: list[Bar]
    arrows: list[tuple]  # (sender, time, receiver, time, what it is)
    joints: list[tuple]  # (ranks, time, what it is)
    end: float


def timed(actions, events) -> Timed:
    """When each rank does its actions, and messages pass. What ends before the first action is left out."""
    passes = [action for action in actions if action.kind in FILLS]
    first = min((action.start for action in passes), default=0)
    seconds = {"F": 1, "B": 1 if any(action.kind == "W" for action in passes) else 2, "W": 1}
    marks = sorted([(moment, action.rank, action) for action in passes for moment in (action.start, action.end)]
                   + [(moment, event.rank, event) for event in events if event.posted > first
                      for moment in {event.posted, event.done}], key=lambda mark: mark[0])
    inside, current = defaultdict(int), {}  # the number of marks in each action
    for _, rank, what in marks:
        if what in passes_of(current, rank):
            del current[rank]
        elif hasattr(what, "microbatch"):
            current[rank] = what
        elif rank in current:
            inside[current[rank]] += 1
    clocks, begun, bars, arrows, joints = defaultdict(float), defaultdict(dict), [], [], {}
    for moment, rank, what in marks:
        action = current.get(rank)
        if action:
            clocks[rank] += seconds[action.kind] / (inside[action] + 1)
        if hasattr(what, "microbatch"):
            if action is what:
                start, end = begun[what], clocks[rank]
                bars.append(Bar(rank, what.kind, what.microbatch, what.chunk, start, end))
                del current[rank]
            else:
                begun[what], current[rank] = clocks[rank], what
            continue
        if moment == what.posted:
            begun[what.number][rank] = clocks[rank]
        if moment == what.done and what.kind != "send":
            clocks[rank] = max(clocks[rank], *begun[what.number].values())
            if what.kind == "receive":
                arrows.append((what.peer, begun[what.number][what.peer], rank, clocks[rank], what))
            elif len(what.group) > 1:
                joints[what.number] = (what.group, max(begun[what.number].values()), what)
    return Timed(bars, arrows, [*joints.values()], max([*clocks.values(), 1]))


def passes_of(current: dict, rank: int) -> list:
    return [current[rank]] if rank in current else []


def shapes(result) -> tuple[list[tuple], float, float]:
    """What to draw, in pixels from the upper left, and the picture's width and height."""
    schedule, events = result.watch("Schedule"), result.world.events
    drawn = timed(schedule.actions, events)
    chunks = types.SimpleNamespace(num_chunks=1 + max((bar.chunk for bar in drawn.bars), default=0))
    unit = max(15, min(34, 1000 / drawn.end))

    def x(time: float) -> float:
        return LEFT + time * unit

    def y(rank: int) -> float:
        return TOP + rank * ROW

    found = [("text", 8, y(rank) + BAR / 2, f"rank {rank}", "start", "ink") for rank in range(result.world.size)]
    found += [("rect", LEFT, y(rank), drawn.end * unit, BAR, "faint", "idle") for rank in range(result.world.size)]
    for bar in drawn.bars:
        title, width = name(chunks, *bar[1:4]), (bar.end - bar.start) * unit
        found.append(("rect", x(bar.start), y(bar.rank), width, BAR, FILLS[bar.kind], f"rank {bar.rank}: {title}"))
        found.append(("text", x(bar.start) + width / 2, y(bar.rank) + BAR / 2, title, "middle",
                      INK if bar.kind == "W" else "#ffffff"))
    for ranks, time, what in drawn.joints:
        found.append(("line", x(time), y(min(ranks)) - 3, x(time), y(max(ranks)) + BAR + 3, COLOURS["all-reduce"], what))
        found += [("dot", x(time), y(rank) + BAR + 3, COLOURS["all-reduce"]) for rank in ranks]
    for sender, sent, receiver, taken, what in drawn.arrows:
        down = receiver > sender
        found.append(("arrow", x(sent), y(sender) + BAR * down, x(taken), y(receiver) + BAR * (not down), "ink", what))
    return found, LEFT + drawn.end * unit + 16, TOP + result.world.size * ROW + 4


def svg(result) -> str:
    found, width, height = shapes(result)
    lines = [f'<svg class="lab" xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
             f'viewBox="0 0 {width:g} {height:g}"><style>{STYLE}</style>']
    for kind, *rest in found:
        lines.append(ELEMENTS[kind](*rest))
    return "\n".join([*lines, "</svg>"])


def colour(given: str) -> str:
    return {"ink": 'currentColor"', "faint": 'currentColor" opacity="0.12"'}.get(given, f'{given}"')


def line(x1, y1, x2, y2, given, what, more="") -> str:
    return (f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}{more}" fill="none" stroke-width="1.3" stroke="{colour(given)}>'
            f"<title>{escape(what.kind)} {what.number}</title></path>")


ELEMENTS = {
    "rect": lambda x, y, w, h, given, title: f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" '
    f'fill="{colour(given)}><title>{escape(title)}</title></rect>',
    "text": lambda x, y, text, anchor, given: f'<text x="{x:g}" y="{y + 4:g}" text-anchor="{anchor}" '
    f'fill="{colour(given)}>{escape(text)}</text>',
    "dot": lambda x, y, given: f'<circle cx="{x:g}" cy="{y:g}" r="2.5" fill="{colour(given)}/>',
    "line": line, "arrow": line}


def save(result, path) -> None:
    with writing(path):
        pathlib.Path(path).write_text(svg(result), encoding="utf-8")
