"""A space-time diagram of a run: a row a rank, time to the right. Its colours are those of the chapters' figures.

Time is logical: a forward takes 1 unit and a backward 2, or 1 where gradients of weights (W) are a part of their own,
which takes 1 too. Messages take none. A rank waits where the log of messages says so.
"""

import importlib.util
import math
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
WHITE, JOINT = "#ffffff", COLOURS["all-reduce"]
ENDINGS = (".svg", ".png")
ROW, BAR, LEFT, TOP = 46, 26, 64, 34  # pixels
STYLE = f""".lab{{font:12px sans-serif}}.lab .line{{fill:none;stroke-width:1.2}}
svg.lab:root{{color:{INK};background:{GROUND}}}
@media(prefers-color-scheme:dark){{svg.lab:root{{color:#e4e4e0;background:#1c1c1e}}}}"""


class Timed(NamedTuple):
    """When what happens, in units of time."""

    bars: list[tuple]  # (action, start, end)
    arrows: list[tuple]  # (event of the receiver, when it was sent, when it was taken)
    joints: dict[int, tuple]  # number -> (event of one of the ranks, when all had come)
    clocks: dict[int, float]  # rank -> its end


def timed(actions, events) -> Timed:
    """When each rank does its actions, and messages pass. What ranks exchange before the first action is left out."""
    passes = [action for action in actions if action.kind in FILLS]
    first = min((action.start for action in passes), default=0)
    lasts = {"F": 1, "B": 1 if any(action.kind == "W" for action in passes) else 2, "W": 1}
    begins: dict[int, int] = {}  # of each message; who receives it may wait since before
    for event in events:
        if event.kind != "receive":
            begins[event.number] = min(event.posted, begins.get(event.number, event.posted))
    marks = [(moment, action.rank, action) for action in passes for moment in (action.start, action.end)]
    marks += [(moment, event.rank, event) for event in events if event.number >= 0 and begins[event.number] > first
              for moment in {event.posted, event.done}]
    marks.sort(key=lambda mark: mark[0])
    inside = {action: sum(rank == action.rank and action.start < moment < action.end for moment, rank, _ in marks)
              for action in passes}
    found, current, begun = Timed([], [], {}, defaultdict(float)), {}, defaultdict(dict)
    clocks = found.clocks
    for moment, rank, what in marks:
        if running := current.get(rank):  # messages divide an action into equal parts
            clocks[rank] += lasts[running.kind] / (inside[running] + 1)
        if what is running:
            found.bars.append((what, begun[what], clocks[rank]))
            del current[rank]
        elif hasattr(what, "microbatch"):
            begun[what], current[rank] = clocks[rank], what
            continue
        elif moment == what.posted:
            begun[what.number][rank] = clocks[rank]
        if moment == getattr(what, "done", None) and what.kind != "send":
            passed = max(begun[what.number].values())
            clocks[rank] = max(clocks[rank], passed)
            if what.kind == "receive":
                found.arrows.append((what, begun[what.number][what.peer], clocks[rank]))
            else:
                found.joints[what.number] = (what, passed)
    return found


def shapes(result) -> tuple[list[tuple], float, float]:
    """What to draw, in pixels from the upper left, and the picture's width and height."""
    drawn, size = timed(result.watch("Schedule").actions, result.world.events), result.world.size
    chunks = types.SimpleNamespace(num_chunks=1 + max((action.chunk for action, *_ in drawn.bars), default=0))
    end = max(drawn.clocks.values(), default=1)
    inside = {event.number for event, _, taken in drawn.arrows for action, start, stop in drawn.bars
              if action.rank == event.rank and start < taken < stop}
    unit = max(15, min(160 if inside else 60, 1000 / end))

    def x(time: float) -> float:
        return LEFT + time * unit

    def y(rank: int) -> float:
        return TOP + rank * ROW

    rows = [("rect", LEFT, y(rank), end * unit, BAR, "faint", f"rank {rank} waits") for rank in range(size)]
    texts = [("text", 8, y(rank) + BAR / 2, f"rank {rank}", "start", "ink") for rank in range(size)]
    for action, start, stop in drawn.bars:
        title, middle = name(chunks, action.kind, action.microbatch, action.chunk), x((start + stop) / 2)
        rows.append(("rect", x(start), y(action.rank), (stop - start) * unit - 1, BAR, FILLS[action.kind],
                     f"rank {action.rank}: {title}"))
        texts.append(("text", middle, y(action.rank) + BAR / 2, title, "middle", INK if action.kind == "W" else WHITE))
    for event, time in drawn.joints.values():
        title, down = f"{event.number}: {event.kind} of ranks {', '.join(map(str, event.group))}", BAR + 4
        rows.append(("line", x(time), y(event.group[0]) + down, x(time), y(event.group[-1]) + down, JOINT, title))
        rows += [("dot", x(time), y(rank) + down, JOINT, title) for rank in event.group]
    for event, sent, taken in drawn.arrows:  # those that an action itself exchanges are many, so they have no tips
        down, title = event.rank > event.peer, f"{event.number}: rank {event.peer} to rank {event.rank}"
        rows.append(("line" if event.number in inside else "arrow", x(sent), y(event.peer) + BAR * down, x(taken),
                     y(event.rank) + BAR * (not down), "ink", title))
    place = LEFT
    for kind, words in (("F", "forward"), ("B", "backward"), ("W", "gradients of weights"), ("", "collective")):
        if kind in {"", *(action.kind for action, *_ in drawn.bars)} and (kind or drawn.joints):
            rows.append(("rect", place, 9, 11, 11, FILLS.get(kind, JOINT), words))
            texts.append(("text", place + 16, 14.5, words, "start", "ink"))
            place += 36 + 7 * len(words)
    return rows + texts, max(x(end), place) + 16, y(size) - ROW + BAR + 16


def svg(result) -> str:
    found, width, height = shapes(result)
    lines = [f'<svg class="lab" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
             f'viewBox="0 0 {width:.0f} {height:.0f}"><style>{STYLE}</style>']
    return "\n".join([*lines, *(ELEMENTS[kind](*rest) for kind, *rest in found), "</svg>"]) + "\n"


def paint(colour: str) -> str:
    return {"ink": 'currentColor"', "faint": 'currentColor" fill-opacity="0.1"'}.get(colour, f'{colour}"')


def line(x1: float, y1: float, x2: float, y2: float, colour: str, title: str) -> str:
    return (f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{paint(colour)}>'
            f"<title>{escape(title)}</title></path>")


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str, title: str) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in tip(x1, y1, x2, y2))
    return f'{line(x1, y1, x2, y2, colour, title)}<polygon points="{corners}" fill="{paint(colour)}/>'


def tip(x1: float, y1: float, x2: float, y2: float) -> list[tuple[float, float]]:
    """The corners of an arrow's tip."""
    length = math.hypot(x2 - x1, y2 - y1) or 1
    along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
    return [(x2, y2), *((x2 - 7 * along[0] + side * across[0], y2 - 7 * along[1] + side * across[1])
                        for side in (3, -3))]


ELEMENTS = {
    "rect": lambda x, y, w, h, colour, title: f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
    f'fill="{paint(colour)}><title>{escape(title)}</title></rect>',
    "text": lambda x, y, text, anchor, colour: f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" '
    f'fill="{paint(colour)}>{escape(text)}</text>',
    "dot": lambda x, y, colour, title: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{paint(colour)}/>',
    "line": line, "arrow": arrow}


def png(result, path: pathlib.Path) -> None:
    """The same shapes on the chapters' light ground. Raises ImportError, with the remedy, without matplotlib."""
    from matplotlib.figure import Figure  # imported here: an .svg needs none
    from matplotlib.patches import Circle, Polygon, Rectangle

    found, width, height = shapes(result)
    figure = Figure(figsize=(width / 72, height / 72), dpi=144, facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for kind, x, y, *rest, colour, _ in ((*shape, "") if shape[0] == "text" else shape for shape in found):
        colour = {"ink": INK, "faint": COLOURS["bubble"]}.get(colour, colour)
        if kind == "text":
            axes.text(x, y, rest[0], ha={"start": "left", "middle": "center"}[rest[1]], va="center", color=colour,
                      fontsize=9)
        elif kind in ("line", "arrow"):
            axes.plot((x, rest[0]), (y, rest[1]), color=colour, linewidth=1)
        if kind in ("rect", "dot", "arrow"):
            axes.add_patch({"rect": lambda: Rectangle((x, y), *rest), "dot": lambda: Circle((x, y), 2.5),
                            "arrow": lambda: Polygon(tip(x, y, *rest))}[kind]())
            axes.patches[-1].set(facecolor=colour, linewidth=0)
    figure.savefig(path)


def check_place(path: pathlib.Path) -> None:
    """Raises ValueError, before the run, where no picture can be written there."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"a picture's name ends in {' or '.join(ENDINGS)}, unlike {path}")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a .png needs matplotlib: pip install -e '.[test]', or choose .svg")
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"can't write {path} ({error.strerror}): choose another place") from None
    if is_new:
        path.unlink()


def save(result, path: str | pathlib.Path) -> None:
    path = pathlib.Path(path)
    check_place(path)
    with writing(path):
        if path.suffix == ".svg":
            path.write_text(svg(result), encoding="utf-8")
        else:
            png(result, path)
