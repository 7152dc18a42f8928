"""Schedules without a process: timed, drawn, and checked for what can't work between stages.

    played = play([list(one_f_one_b(stage, 4, 8)) for stage in range(4)], UNITS)
    played.end, played.peaks  # units of time; micro-batches that are alive at once, stage by stage
    print(draw(played))       # in columns, as the steps' docstrings show schedules

An action is (kind, micro-batch) or (kind, micro-batch, chunk). A forward F needs the F of the stage before, a backward
B the B of the stage after (on the last stage: its own F), and W, the gradients of weights, the stage's own B. Where a
rank has no W, its B takes W's time, too. A rank whose actions have chunks holds as many stages: rank r of p the stages
r, r + p, ..., or stage_of(r, chunk).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

UNITS = {"F": 1, "B": 1, "W": 0}
COLUMNS = 34  # that a picture has at most


class Span(NamedTuple):
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


class Played(NamedTuple):
    """What ran, rank by rank, and the actions (kind, micro-batch, chunk) that are left where ranks wait for ever."""

    spans: list[list[Span]]
    left: list[list[tuple]]
    missing: list[tuple | None]  # by rank: (kind, micro-batch, chunk, rank) that the first of those waits for
    num_chunks: int

    @property
    def ends(self) -> list[float]:
        return [spans[-1].end if spans else 0.0 for spans in self.spans]

    @property
    def end(self) -> float:
        return max(self.ends)

    @property
    def peaks(self) -> list[int]:
        """By rank, how many activations are alive at most: from F to W or, where backward is whole, to B."""
        peaks = []
        for spans in self.spans:
            last, alive, peak = "W" if any(span.kind == "W" for span in spans) else "B", 0, 0
            for span in spans:
                alive += (span.kind == "F") - (span.kind == last)
                peak = max(peak, alive)
            peaks.append(peak)
        return peaks


def interleaved_stages(num_ranks: int) -> Callable[[int, int], int]:
    return lambda rank, chunk: chunk * num_ranks + rank


def play(actions: list[list], seconds: dict[str, float] | Callable[[int, str, int], float],
         stage_of: Callable | None = None, hop: Callable[[int, int], float] = lambda source, target: 0) -> Played:
    """Each rank does its actions one after the other, as soon as what they need is there.

    An action takes `seconds` of its kind, or seconds(rank, kind, chunk); a message hop(source, target).
    """
    num_ranks, todo = len(actions), [[(*action, 0)[:3] for action in rank] for rank in actions]
    stage_of, split = stage_of or interleaved_stages(num_ranks), [any(a[0] == "W" for a in rank) for rank in todo]
    seconds_of = seconds if callable(seconds) else lambda r, kind, chunk: (
        seconds[kind] + (seconds["W"] if kind == "B" and not split[r] else 0))
    num_chunks = 1 + max((action[2] for rank in todo for action in rank), default=0)
    home = {stage_of(r, chunk): (r, chunk) for r in range(num_ranks) for chunk in range(num_chunks)}
    done, spans, missing, moved = {}, [[] for _ in todo], [None] * num_ranks, True
    while moved and any(todo):
        moved = False
        for r, rank in enumerate(todo):
            missing[r] = None
            while rank:
                kind, i, chunk = rank[0]
                s = stage_of(r, chunk)
                needs = {"F": [], "B": [("F", s)], "W": [("B", s)]}[kind]
                if (neighbour := s - 1 if kind == "F" else s + 1) in home and kind != "W":
                    needs.append((kind, neighbour))
                if absent := [need for need in needs if (*need, i) not in done]:
                    missing[r] = (absent[0][0], i, *home[absent[0][1]][::-1])
                    break
                start = max([spans[r][-1].end if spans[r] else 0, *(
                    done[(*need, i)] + (hop(source, r) if (source := home[need[1]][0]) != r else 0) for need in needs)])
                end = start + seconds_of(r, kind, chunk)
                spans[r].append(Span(*rank.pop(0), start, end))
                done[kind, s, i], moved = end, True
    return Played(spans, todo, missing, num_chunks)


def name(played: Played, kind: str, microbatch: int, chunk: int) -> str:
    """F2 is a forward of chunk 0, f2 of chunk 1. Where there are more than two chunks, F2' is one of chunk 1."""
    small = played.num_chunks < 3 and chunk
    return f"{kind.lower()}{microbatch}" if small else show((kind, microbatch, chunk))


def draw(played: Played) -> str:
    """A row for each rank and a column for each unit of time. A dot is idle time, and -- goes on with an action."""
    noun, end = "stage" if played.num_chunks == 1 else "rank", int(played.end)
    rows = []
    for r, spans in enumerate(played.spans):
        cells = ["."] * end
        for span in spans:
            first, behind = int(span.start), int(span.end)
            cells[first:behind] = [name(played, *span[:3]), *["--"] * (behind - first - 1)][: behind - first]
        rows.append((f"{noun} {r}", cells))
    width = max([2, *(len(cell) for _, cells in rows for cell in cells)])
    columns = COLUMNS * 3 // (width + 1)
    return "\n".join(f"    {title}   " + " ".join(cell.ljust(width) for cell in cells[:columns]).rstrip()
                     + " ..." * (end > columns) for title, cells in rows)


def problem(actions: list[list], num_microbatches: int, num_chunks: int = 1, seconds: dict[str, float] = UNITS,
            stage_of: Callable | None = None) -> str | None:
    """Why stages can't run these actions, in words and with a picture. None where they can."""
    noun = "stage" if num_chunks == 1 else "rank"
    for r, rank in enumerate(actions):
        if bad := wrong_action(rank, num_microbatches, num_chunks):
            return f"{noun} {r} {bad}. Its actions are\n    {' '.join(map(show, rank[:COLUMNS]))}"
    played = play(actions, seconds, stage_of)
    if any(played.left):
        lines = [f"  {noun} {r}: " + (f"before {name(played, *left[0])} it waits for {name(played, *miss[:3])} of "
                                      f"{f'{noun} {miss[3]}' if miss[3] != r else 'its own'}"
                                      if left else "has done everything")
                 for r, (left, miss) in enumerate(zip(played.left, played.missing))]
        return "deadlock: no {} can go on. Until then\n{}\n{}".format(noun, draw(played), "\n".join(lines))
    return wrong_order(played, stage_of or interleaved_stages(len(actions)), noun)


def show(action) -> str:
    """F2'' is a forward of micro-batch 2 and chunk 2."""
    return "{}{}{}".format(*action[:2], "'" * (*action, 0)[2]) if is_action(action) else repr(action)


def is_action(action) -> bool:
    return (isinstance(action, tuple) and len(action) in (2, 3) and action[0] in ("F", "B", "W")
            and all(type(number) is int for number in action[1:]))


def wrong_action(rank: list, num_microbatches: int, num_chunks: int) -> str | None:
    """What a rank's list of actions lacks, or has too much."""
    if bad := [action for action in rank if not is_action(action)]:
        return f"yields {bad[0]!r}, which is no action: its kind has to be F, B or W, its micro-batch a number"
    has_w, counts = any(action[0] == "W" for action in rank), defaultdict(int)
    for action in rank:
        counts[(*action, 0)[:3]] += 1
    wanted = [(kind, i, chunk) for kind in "FBW"[: 2 + has_w] for chunk in range(num_chunks)
              for i in range(num_microbatches)]
    where = f" (chunks 0 to {num_chunks - 1})" if num_chunks > 1 else ""
    for action in counts:
        if action not in wanted:
            return f"does {show(action)}, but the micro-batches are 0 to {num_microbatches - 1}{where}"
    for action in wanted:
        if counts[action] != 1:
            return f"does {show(action)} {counts[action]} times" if counts[action] else f"never does {show(action)}"
    return None


def wrong_order(played: Played, stage_of: Callable, noun: str) -> str | None:
    """Messages carry no name: a stage has to await them in the order in which its neighbour sends them."""
    num_ranks = len(played.spans)
    home = {stage_of(r, chunk): r for r in range(num_ranks) for chunk in range(played.num_chunks)}
    sent, awaited = defaultdict(list), defaultdict(list)
    for r, spans in enumerate(played.spans):
        for kind, i, chunk, *_ in spans:
            s, hop = stage_of(r, chunk), {"F": 1, "B": -1, "W": len(home)}[kind]
            sent[kind, r, home.get(s + hop)].append((s + hop, i))
            awaited[kind, home.get(s - hop), r].append((s, i))
    for kind, source, target in sent:
        mine, theirs = sent[kind, source, target], awaited[kind, source, target]
        if source != target and target is not None and mine != theirs:
            k = next(k for k in range(len(mine)) if mine[k] != theirs[k])
            return (f"{noun} {source} sends {noun} {target} the result of {kind}{mine[k][1]} as message {k + 1}, but "
                    f"{noun} {target} takes that for what its {kind}{theirs[k][1]} needs: messages carry no name, so "
                    f"both need the same order.\n{draw(played)}")
    return None


def check_schedules(modules) -> list[str]:
    """For each schedule of a step: that it is legal with up to 8 stages and 16 micro-batches, or the least size at
    which it is not, with a picture."""
    if not hasattr(modules, "pipeline_parallel"):
        return ["no schedule, so legal"]
    module = modules.virtual_stages if hasattr(modules, "virtual_stages") else modules.pipeline_parallel
    lines, schedules = [], getattr(module, "SCHEDULES", None) or {"afab": module.afab}
    for schedule in schedules.values():
        chunks = 2 if schedule.__name__.startswith("interleaved") else 1
        for p, m in itertools.product(range(1, 9), range(1, 17)):
            actions = [list(schedule(stage, p, m, *[chunks] * (chunks > 1))) for stage in range(p)]
            if wrong := problem(actions, m, chunks):
                lines.append(f"{schedule.__name__}: {p} stages, {m} micro-batches: {wrong}")
                break
        else:
            lines.append(f"{schedule.__name__}: legal with up to 8 stages and 16 micro-batches")
    return lines
