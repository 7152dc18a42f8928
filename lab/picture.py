"""A space-time diagram of a run: a row a rank, time to the right. Its colours are those of the chapters' figures.

Time is logical: a forward takes 1 unit and a backward 2, or 1 where gradients of weights (W) are a part of their own,
which takes 1 too. Messages take none. A rank waits where the log of messages says so.
"""

import importlib.util
import pathlib
import types
from collections import Counter, defaultdict
from html import escape
from typing import NamedTuple

from lab.launch import writing
from lab.watch.schedule import name

COLOURS = {"forward": "#4477aa", "backward": "#228833", "weight gradients": "#ccbb44", "all-reduce": "#ee7733",
           "wait": "#aa3377", "optimizer": "#777777", "reduce-scatter": "#ee7733", "all-gather": "#66ccee",
           "bubble": "#e3e3e0", "transfer": "#66ccee"}
GROUND, INK = "#fcfcfa", "#222222"
FILLS = {"F": COLOURS["forward"], "B": COLOURS["backward"], "W": COLOURS["weight gradients"]}
KINDS = {"weights": "#aa3377", "gradients": "#ee6677", "optimizer": "#777777", "activations": "#66ccee",
         "messages": "#ee7733"}  # of bytes
JOINT, ENDINGS = COLOURS["all-reduce"], (".svg", ".png")
ROW, BAR, LEFT, TOP = 46, 26, 64, 34  # pixels: from row to row, a bar's height, where bars begin
HEAD = f"""<svg class="lab" xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f"><style>
.lab{{font:12px sans-serif}}.lab path{{fill:none;stroke-width:1.2}}.lab rect{{shape-rendering:crispEdges}}
svg.lab:root{{color:{INK};background:{GROUND}}}
@media(prefers-color-scheme:dark){{svg.lab:root{{color:#e4e4e0;background:#1c1c1e}}}}</style><defs><marker id="lab-tip"
viewBox="0 0 7 6" refX="7" refY="3" markerWidth="7" markerHeight="6" markerUnits="userSpaceOnUse" orient="auto"><polygon
points="0,0 7,3 0,6" fill="currentColor"/></marker></defs>"""  # in a notebook its colours are those of the page
FORMS = {"rect": '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{colour}"><title>{title}</title>'
                 "</rect>",
         "line": '<path d="M{:.1f} {:.1f}L{:.1f} {:.1f}" stroke="{colour}"><title>{title}</title></path>',
         "dot": '<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="{colour}"><title>{title}</title></circle>',
         "start": '<text x="{:.1f}" y="{:.1f}" dy="4" fill="{colour}">{title}</text>',
         "middle": '<text x="{:.1f}" y="{:.1f}" dy="4" text-anchor="middle" fill="{colour}">{title}</text>'}
FORMS["arrow"] = FORMS["line"].replace("<path", '<path marker-end="url(#lab-tip)"')


class Timed(NamedTuple):
    """When what happens, in units of time."""

    bars: list[tuple]  # (action, start, end)
    arrows: list[tuple]  # (event of the receiver, when it was sent, when it was taken, whether within an action)
    joints: dict[int, tuple]  # number -> (event of one of the ranks, when all had come)
    clocks: dict[int, float]  # rank -> its end


def timed(actions, events) -> Timed:
    """When each rank does its actions, and messages pass. What ranks exchange before the first action is left out."""
    passes = [action for action in actions if action.kind in FILLS]
    first = min((action.start for action in passes), default=0)
    with_w = {action.rank for action in passes if action.kind == "W"}  # elsewhere a backward is both
    begins: dict[int, int] = {}  # of each message; who receives it may wait since before
    for event in events:
        if event.kind != "receive":
            begins[event.number] = min(event.posted, begins.get(event.number, event.posted))
    marks = [(moment, action.rank, action) for action in passes for moment in (action.start, action.end)]
    marks += [(moment, event.rank, event) for event in events if event.number and begins[event.number] > first
              for moment in {event.posted, event.done}]
    marks.sort(key=lambda mark: mark[0])
    inside, current = Counter(), {}  # how many messages begin or end within an action; what a rank does
    for _, rank, what in marks:
        if hasattr(what, "microbatch"):
            current[rank] = None if current.get(rank) is what else what
        else:
            inside[current.get(rank)] += 1
    found, begun = Timed([], [], {}, defaultdict(float)), defaultdict(dict)
    clocks = found.clocks
    for moment, rank, what in marks:
        if running := current.get(rank):  # messages divide an action into equal parts
            clocks[rank] += (2 if running.kind == "B" and rank not in with_w else 1) / (inside[running] + 1)
        if what is running:
            found.bars.append((what, begun[what], clocks[rank]))
            current[rank] = None
        elif hasattr(what, "microbatch"):
            begun[what], current[rank] = clocks[rank], what
            continue
        elif moment == what.posted:
            begun[what.number][rank] = clocks[rank]
        if moment == getattr(what, "done", None) and what.kind != "send":
            passed = max(begun[what.number].values())
            clocks[rank] = max(clocks[rank], passed)
            if what.kind == "receive":
                found.arrows.append((what, begun[what.number][what.peer], clocks[rank], running is not None))
            else:
                found.joints[what.number] = (what, passed)
    return found


def shapes(result) -> tuple[list[tuple], float, float]:
    """Forms, with numbers in pixels from the upper left, colours and titles; the picture's width and height."""
    drawn, size = timed(result.watch("Schedule").actions, result.world.events), result.world.size
    chunks = types.SimpleNamespace(num_chunks=1 + max((action.chunk for action, *_ in drawn.bars), default=0))
    end = max(drawn.clocks.values(), default=1)
    widest = 160 if any(within for *_, within in drawn.arrows) else 60
    unit, top = max(15, min(widest, 1000 // end)), [TOP + rank * ROW for rank in range(size)]
    rows = [("rect", (LEFT, y, end * unit, BAR), COLOURS["bubble"], f"rank {rank} waits") for rank, y in enumerate(top)]
    texts = [("start", (8, y + BAR / 2), INK, f"rank {rank}") for rank, y in enumerate(top)]
    for action, start, stop in drawn.bars:
        x, y, width = LEFT + start * unit, top[action.rank], (stop - start) * unit
        title = name(chunks, action.kind, action.microbatch, action.chunk)
        rows.append(("rect", (x, y, width - 1, BAR), FILLS[action.kind], f"rank {action.rank}: {title}"))
        texts.append(("middle", (x + width / 2, y + BAR / 2), "#000000" if action.kind == "W" else "#ffffff", title))
    for event, time in drawn.joints.values():
        x, ys = LEFT + time * unit, [top[rank] + BAR + 4 for rank in event.group]
        title = f"{event.number}: {event.kind} of ranks {', '.join(map(str, event.group))}"
        rows += [("line", (x, ys[0], x, ys[-1]), JOINT, title), *(("dot", (x, y), JOINT, title) for y in ys)]
    for event, sent, taken, within in drawn.arrows:
        down = event.rank > event.peer
        rows.append(("line" if within else "arrow",  # within an action they are many
                     (LEFT + sent * unit, top[event.peer] + BAR * down, LEFT + taken * unit,
                      top[event.rank] + BAR * (not down)), INK, f"{event.number}: rank {event.peer} to {event.rank}"))
    height, kinds = top[-1] + BAR + 16, {action.kind for action, *_ in drawn.bars}
    words = {"F": "forward", "B": "backward", "W": "gradients of weights"}
    right = legend(rows, texts, 9, {words[kind]: FILLS[kind] for kind in FILLS if kind in kinds}
                   | ({"collective": JOINT} if drawn.joints else {}))
    if memory := result.watch("Memory"):
        right = max(right, legend(rows, texts, height + 8, KINDS))
        height, end = held(rows, texts, memory, drawn, height + 32, unit), end + 1
    return rows + texts, max(LEFT + end * unit, right) + 16, height


def legend(rows: list, texts: list, y: float, colours: dict[str, str]) -> float:
    """Adds what colours mean. Returns where it ends."""
    right = LEFT
    for words, colour in colours.items():
        rows.append(("rect", (right, y, 11, 11), colour, words))
        texts.append(("start", (right + 16, y + 5.5), INK, words))
        right += 36 + 7 * len(words)
    return right


def held(rows: list, texts: list, memory, drawn: Timed, y: float, unit: float) -> float:
    """Adds the bytes that each rank holds, from the end of an action to that of the next, and after the optimizer's.
    Returns where they end."""
    end, bytes_of = max(drawn.clocks.values()), {}
    for rank, moments in sorted(memory.held.items()):
        passes = [kinds for phase, kinds in moments if phase.startswith(("forward", "backward", "weight gradients"))]
        last = [kinds for phase, kinds in moments if phase == "optimizer"][-1:]
        bytes_of[rank] = [{**passes[0], "activations": 0, "messages": 0}, *passes, *last]
    most = max(sum(kinds.values()) for moments in bytes_of.values() for kinds in moments) or 1
    for rank, moments in bytes_of.items():
        ends = [0, *(stop for action, _, stop in drawn.bars if action.rank == rank), end, end + 1]
        peak = f"{sum(memory.peak[rank][1].values()) / 1e6:.3g} MB"  # which may be within an action
        texts += [("start", (8, y + 8), INK, f"rank {rank}"), ("start", (8, y + 22), INK, peak)]
        for start, stop, kinds in zip(ends, ends[1:], moments):
            bottom = y + BAR + 8
            for kind in KINDS:
                size = kinds.get(kind, 0) / most * (BAR + 8)
                rows.append(("rect", (LEFT + start * unit, bottom := bottom - size, (stop - start) * unit, size),
                             KINDS[kind], f"rank {rank}: {kinds.get(kind, 0):,} bytes of {kind}"))
        y += ROW
    return y


def svg(result) -> str:
    found, *sizes = shapes(result)
    paint = {INK: "currentColor", COLOURS["bubble"]: 'currentColor" fill-opacity="0.1'}
    lines = (FORMS[form].format(*numbers, colour=paint.get(colour, colour), title=escape(title))
             for form, numbers, colour, title in found)
    return "\n".join([HEAD % (*sizes,), *lines, "</svg>\n"])


def png(result, path: pathlib.Path) -> None:
    """The same shapes on the chapters' light ground."""
    from matplotlib.figure import Figure  # imported here: an .svg needs none
    from matplotlib.patches import Circle, Rectangle

    found, width, height = shapes(result)
    figure = Figure(figsize=(width / 72, height / 72), dpi=144, facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for form, (x, y, *more), colour, title in found:
        if form in ("rect", "dot"):
            axes.add_patch(Rectangle((x, y), *more) if more else Circle((x, y), 2.5))
            axes.patches[-1].set(facecolor=colour, linewidth=0)
        elif more:
            style = {"arrowstyle": "-|>" if form == "arrow" else "-", "color": colour, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", more, (x, y), arrowprops=style)
        else:
            axes.text(x, y, title, ha={"start": "left"}.get(form, "center"), va="center", color=colour, fontsize=9)
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
    check_place(path := pathlib.Path(path))
    with writing(path):
        png(result, path) if path.suffix == ".png" else path.write_text(svg(result), encoding="utf-8")
