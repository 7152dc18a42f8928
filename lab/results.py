"""What a run leaves, in words and in a picture, and where two runs differ."""

import html
import itertools
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lab.picture import save, svg
from lab.program import StepModules
from lab.thread_ranks import World
from lab.watch import Watch

WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}


class Result(NamedTuple):
    """Printed, it is the messages in their order, sums, and the loss; a notebook shows the picture, too."""

    rows: list[dict]  # metrics.jsonl: one for each optimizer step
    modules: list[StepModules]  # by rank
    world: World | None
    watches: list[Watch]

    def watch(self, name: str) -> Watch | None:
        """The watch of this class, None where it was not installed."""
        return next((watch for watch in self.watches if type(watch).__name__ == name), None)

    def picture(self, path: str | pathlib.Path) -> None:
        """Draws what a Schedule has watched, and below it what a Memory has, as .svg or .png."""
        save(self, path)

    def beside(self, unchanged: "Result") -> str:
        """The first differences from the result of the unchanged program."""
        return compare(self, unchanged)

    def __str__(self) -> str:
        return "\n".join([*folded(self), tables(self)])

    def _repr_html_(self) -> str:
        """In the colours of a notebook, whether these are light or dark."""
        drawing = f'<div style="overflow-x:auto">{svg(self)}</div>' if self.watch("Schedule") else ""
        lines = html.escape("\n".join(folded(self)))
        folds = f"<details><summary>messages</summary><pre>{lines}</pre></details>" if lines else ""
        return f"{drawing}<pre>{html.escape(tables(self))}</pre>{folds}"


def messages(result: Result) -> list[tuple[int, str, str]]:
    """Of each message, and of each collective once for all of its ranks: its number, what it is, and when it begins."""
    schedule, found, actions = result.watch("Schedule"), {}, defaultdict(list)
    for event in result.world.events:
        if event.kind != "receive" and event.number:
            found[event.number] = min(event, found.get(event.number, event), key=lambda each: each.posted)
    done = [*schedule.actions, *filter(None, schedule.open.values())] if schedule else []
    for action in sorted(done, key=lambda action: action.start):
        actions[action.rank].append(action)
    return [(number, what(event, result.world.size), when(event, actions[event.rank]))
            for number, event in sorted(found.items())]


def what(event, size: int) -> str:
    ranks = "all ranks" if len(event.group) == size else f"ranks {', '.join(map(str, event.group))}"
    who = f"rank {event.rank} -> rank {event.peer}" if event.kind == "send" else ranks
    shape = " x ".join(map(str, event.shape)) or "scalar"
    return f"{who}  {event.kind}" + f" {shape} {event.dtype}" * bool(event.dtype)


def when(event, actions: list) -> str:
    """What its rank does, or did last before."""
    action = next((action for action in reversed(actions) if action.start < event.posted), None)
    if action is None:
        return "before the first forward" * bool(actions)
    return "after " * (event.posted > action.end and event.kind != "send") + named(action)  # sends are results


def named(action) -> str:
    number = f" {action.microbatch}" * (action.kind in WORDS)
    return WORDS.get(action.kind, action.kind) + number + f", chunk {action.chunk}" * (action.chunk > 0)


def folded(result: Result) -> Iterator[str]:
    """A line for each message; of those that follow each other in the same action, one for equal ones."""
    lines = messages(result) if result.watch("Messages") else []
    for _, group in itertools.groupby(lines, lambda line: line[2] or line[1]):
        equal = defaultdict(list)
        for number, *words in group:
            equal[", ".join(filter(None, words))].append(number)
        for words, numbers in equal.items():
            yield f"{numbers[0]:5}  {words}" + f"  ({len(numbers)} times)" * (len(numbers) > 1)


def summary(result: Result) -> str:
    if result.world is None:  # processes keep no log of messages
        return losses(result)
    events = [event for event in result.world.events if event.number and event.kind != "receive"]
    counts, sizes = Counter(kind for kind, _ in {(event.kind, event.number) for event in events}), Counter()
    for event in events:
        sizes[event.kind] += event.num_bytes
    found = "; ".join(f"{counts[kind]} {kind}, {size:,} bytes" for kind, size in sizes.items())
    return f"sent by all ranks: {found or 'nothing'}\n{losses(result)}"


def losses(result: Result) -> str:
    return "\n".join(f"loss {row['loss']:.6f}" + f" after step {row['step']}" * (len(result.rows) > 1)
                     for row in result.rows)


def tables(result: Result) -> str:
    return "\n".join(filter(None, [*(str(result.watch(name) or "") for name in ("Memory", "Types", "Waits")),
                                   summary(result)]))


def findings(result: Result) -> dict[str, list[str]]:
    """What was watched, in lines."""
    found = {"losses": [f"step {row['step']}: {row['loss']!r}" for row in result.rows]} if result.rows else {}
    if result.watch("Messages"):
        found["messages"] = [f"message {number}: {', '.join(words)}" for number, *words in messages(result)]
    if schedule := result.watch("Schedule"):
        actions = sorted(schedule.actions, key=lambda action: (action.rank, action.start))
        found["actions"] = [f"rank {action.rank}: {named(action)}" for action in actions]
    for name in ("Memory", "Types", "Waits"):
        if watch := result.watch(name):
            found[name.lower()] = str(watch).splitlines()
    return found


def compare(result: Result, unchanged: Result) -> str:
    """The first difference of each kind of findings."""
    lines, ours, theirs = [], findings(result), findings(unchanged)
    for noun in [noun for noun in ours if noun in theirs]:
        pairs = itertools.zip_longest(ours[noun], theirs[noun], fillvalue="none")
        found = next((pair for pair in pairs if pair[0] != pair[1]), None)
        lines.append("first difference of {}:\n    changed    {}\n    unchanged  {}".format(noun, *found) if found else
                     f"no difference in {noun}")
    if (numbers := result.watch("Numbers")) and (others := unchanged.watch("Numbers")):
        lines.append(differing(numbers, others))
    return "\n".join(lines)


def differing(ours, theirs) -> str:
    """The first tensor that differs, in the order of updates, gradients before weights."""
    ranks = sorted(ours.gradients.keys() | theirs.gradients.keys())
    updates = max((len(each.gradients[rank]) for each in (ours, theirs) for rank in ranks), default=0)
    for update, kind, rank in itertools.product(range(updates), ("gradients", "weights"), ranks):
        mine, other = (getattr(each, kind)[rank][update] if update < len(getattr(each, kind)[rank]) else {}
                       for each in (ours, theirs))
        for name in mine | other:
            both, where = [mine.get(name), other.get(name)], f"{kind} of {name} on rank {rank} in update {update + 1}"
            if any(each is None for each in both) or both[0].shape != both[1].shape:
                return f"first difference of numbers: {where} are not there in both, or have another shape"
            if not torch.equal(*both):
                return (f"first difference of numbers: {where}, by up to {(both[0] - both[1]).abs().max():.2g}, "
                        f"where unchanged ones are up to {both[1].abs().max():.2g}")
    return "no difference in numbers"
