"""A look at one optimizer step of a program, in words, and where two such results differ.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss; a notebook shows the picture, too
    result.picture("step8.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(look("8", "--pp_size 4")))
"""

import argparse
import html
import itertools
import pathlib
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch

import lab
from lab.picture import svg
from lab.program import Edit, Program
from lab.ranks import SMALL, Result, check, run, threads

NAMES = ("messages", "schedule", "memory", "numbers", "types", "waits")
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}


def look(step: int | str, flags: str | Sequence = (), edits: Sequence[Edit] = (),
         watch: Sequence[str] = ("messages", "schedule"), say: Callable[[str], None] = lambda text: None) -> Result:
    """One optimizer step of a step of the course on ranks of this process. say() is told what runs, before it does.

    Raises ValueError for what can't be looked at, and else what run() raises.
    """
    if str(step) == "1":
        raise ValueError("step 1 trains in one process, without messages: choose a step from 2 on")
    known = [name for name in NAMES if name.title() in lab.MODULES]
    if unknown := [name for name in watch if name not in known]:
        raise ValueError(f"there is no watch {unknown[0]!r}: choose from {', '.join(known)}")
    watches = [getattr(lab, name.title())() for name in dict.fromkeys(watch)]
    program, size, words = one_step(Program(step, shlex.split(flags) if isinstance(flags, str) else flags, edits))
    check(ranks := threads(size), watches)
    say(words)
    return run(program, ranks, watches)


def one_step(program: Program) -> tuple[Program, int, str]:
    """The program with the flags of a single optimizer step, or of as many as its idea needs; its number of ranks; and
    both in words. Raises the step's UserError for flags that it refuses."""
    with mock.patch.object(sys, "argv", ["train.py", *SMALL, *program.flags]):
        train = program.load().train
        args = train.parse_args(*[train.__doc__] * (program.step == "9"))
    if getattr(args, "profile_batch", 0):
        raise ValueError("--profile_batch measures time, which means nothing for ranks that take turns: leave it out")
    pipelines = getattr(args, "pipelines", None) or [[1] * args.pp_size] * args.dp_size
    size = args.tp_size * sum(map(len, pipelines)) * getattr(args, "cp_size", 1)
    steps, replicas = getattr(args, "local_steps", 0) or 1, 1 if program.step == "2" else args.dp_size
    micro_batches = getattr(args, "num_microbatches", None) or getattr(args, "gradient_accumulation_steps", 1)
    words = f"{steps} optimizer steps, as replicas exchange after so many" if steps > 1 else "one optimizer step"
    if any(word.partition("=")[0] in ("--max_tokens", "--steps") for word in program.flags):
        words = "optimizer steps as the flags say"
    elif program.step == "9":
        program = program.with_flags([*program.flags, "--steps", steps])
    else:
        tokens = steps * replicas * micro_batches * args.micro_batch_size * args.seq_len
        program = program.with_flags([*program.flags, "--max_tokens", tokens])
    return program, size, (
        f"{size} rank{'s' * (size > 1)}, {words}: {args.num_hidden_layers} layers of "
        f"{pathlib.Path(args.model_name).name}, micro-batches: {str(micro_batches).strip('[]')} of "
        f"{args.micro_batch_size} x {args.seq_len} tokens, {args.dtype}")


class Line(NamedTuple):
    """A message, or a collective of all its ranks, in words."""

    number: int
    what: str
    when: str


def messages(result: Result) -> list[Line]:
    schedule, found, starts = result.watch("Schedule"), {}, defaultdict(list)
    for event in result.world.events:
        if event.kind != "receive" and event.number:
            found[event.number] = min(event, found.get(event.number, event), key=lambda each: each.posted)
    for action in sorted(schedule.actions if schedule else [], key=lambda action: action.start):
        starts[action.rank].append(action)
    return [Line(number, what(event, result.world.size), when(event, starts[event.rank]))
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
    for _, group in itertools.groupby(messages(result) if result.watch("Messages") else (), lambda line: line.when):
        counts: dict[str, list[Line]] = defaultdict(list)
        for each in group:
            counts[each.what].append(each)
        for equal in counts.values():
            number, *words = equal[0]
            yield f"{number:5}  {', '.join(filter(None, words))}" + f"  ({len(equal)} times)" * (len(equal) > 1)


def summary(result: Result) -> str:
    events = [event for event in result.world.events if event.number and event.kind != "receive"]
    counts, sizes = Counter(kind for kind, _ in {(event.kind, event.number) for event in events}), Counter()
    for event in events:
        sizes[event.kind] += event.num_bytes
    found = "; ".join(f"{counts[kind]} {kind}, {size:,} bytes" for kind, size in sizes.items())
    return f"sent by all ranks: {found or 'nothing'}\n{losses(result)}"


def losses(result: Result) -> str:
    return "\n".join(f"loss {row['loss']:.6f}" + f" after step {row['step']}" * (len(result.rows) > 1)
                     for row in result.rows)


def text(result: Result) -> str:
    memory = result.watch("Memory")
    return "\n".join([*folded(result), *[str(memory)] * bool(memory), summary(result)])


def as_html(result: Result) -> str:
    """For a notebook, in its colours, whether these are light or dark."""
    picture = f'<div style="overflow-x:auto">{svg(result)}</div>' if result.watch("Schedule") else ""
    lines = html.escape("\n".join(folded(result)))
    folds = f"<details><summary>messages</summary><pre>{lines}</pre></details>" if lines else ""
    memory = f"{result.watch('Memory') or ''}\n\n".lstrip()
    return f"{picture}<pre>{html.escape(memory + summary(result))}</pre>{folds}"


def compare(result: Result, unchanged: Result) -> str:
    """The first difference of each kind of findings."""
    pairs = {"losses": [losses(each).splitlines() for each in (result, unchanged)]}
    if result.watch("Messages"):
        pairs["messages"] = [[f"message {number}: {', '.join(words)}" for number, *words in messages(each)]
                             for each in (result, unchanged)]
    if result.watch("Schedule"):
        pairs["actions"] = [[f"rank {action.rank}: {named(action)}" for action in sorted(
            each.watch("Schedule").actions, key=lambda action: (action.rank, action.start))]
            for each in (result, unchanged)]
    if result.watch("Memory"):
        pairs["memory"] = [str(each.watch("Memory")).splitlines() for each in (result, unchanged)]
    lines = []
    for noun, both in pairs.items():
        found = next((pair for pair in itertools.zip_longest(*both, fillvalue="none") if pair[0] != pair[1]), None)
        lines.append(f"first difference of {noun}:\n    changed    {found[0]}\n    unchanged  {found[1]}" if found else
                     f"no difference in {noun}")
    if result.watch("Numbers"):
        lines.append(differing(result.watch("Numbers"), unchanged.watch("Numbers")))
    return "\n".join(lines)


def differing(ours, theirs) -> str:
    """The first tensor that differs, in the order of updates, gradients before weights."""
    updates = max((len(steps) for steps in ours.gradients.values()), default=0)
    for update, kind, rank in itertools.product(range(updates), ("gradients", "weights"), sorted(ours.gradients)):
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
