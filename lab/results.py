"""A look at one optimizer step of a program, and what two of them have in common.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss
    result.picture("step.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(result))
"""

import argparse
import html
import itertools
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch

import lab
from lab.program import Edit, Program
from lab.ranks import SMALL, Result, check, run, threads
from lab.watch import Watch

NAMES = [name.lower() for name, module in lab.MODULES.items() if module.startswith("watch.")]
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
DEFAULT = ("messages", "schedule")


def choose(names: Sequence[str]) -> list[Watch]:
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"nothing is called {unknown[0]} that watches: choose from {', '.join(NAMES)}")
    return [getattr(lab, name.title())() for name in names]


def arguments(program: Program) -> argparse.Namespace:
    """What its train.py makes of the flags. Raises UserError, a class of the step's own, where it refuses one."""
    with mock.patch.object(sys, "argv", ["train.py", *SMALL, *program.flags]):
        train = program.load().train
        return train.parse_args(*[train.__doc__] * (program.step == "9"))


def ranks_of(args: argparse.Namespace) -> int:
    if getattr(args, "pipelines", None):
        return args.tp_size * sum(map(len, args.pipelines))
    return args.dp_size * args.pp_size * args.tp_size * getattr(args, "cp_size", 1)


def one_step(program: Program, args: argparse.Namespace) -> tuple[Program, int]:
    """The program for a single optimizer step, or for as many as its idea needs. And how many these are."""
    if any(word.partition("=")[0] in ("--max_tokens", "--steps") for word in program.flags):
        return program, 0
    steps = max(1, getattr(args, "local_steps", 0))  # replicas exchange after so many
    if program.step == "9":
        return program.with_flags([*program.flags, "--steps", steps]), steps
    samples = args.micro_batch_size * getattr(args, "gradient_accumulation_steps", 1) * args.dp_size ** (program.step != "2")
    return program.with_flags([*program.flags, "--max_tokens", steps * samples * args.seq_len]), steps


def look(step: int | str, flags: str | Sequence = (), edits: Sequence[Edit] = (), watch: Sequence[str] = DEFAULT,
         say=lambda text: None) -> Result:
    """One optimizer step of this step of the course on threads, watched. Raises ValueError for what is not possible."""
    program = Program(step, shlex.split(flags) if isinstance(flags, str) else flags, edits)
    watches = choose(watch)
    args = arguments(program)
    ranks = threads(ranks_of(args))
    check(ranks, watches)
    program, steps = one_step(program, args)
    say(f"{ranks.size} ranks, {steps or 'as many as asked for'} optimizer step{'s' * (steps != 1)}: "
        f"{args.num_hidden_layers} layers, sequences of {args.seq_len} tokens, {args.dtype}")
    return run(program, ranks, watches)


# The result as text


class Line(NamedTuple):
    """A message, or a collective of all its ranks, in words."""

    number: int
    what: str
    when: str


def messages(result: Result) -> list[Line]:
    schedule, found, starts = result.watch("Schedule"), {}, defaultdict(list)
    for event in result.world.events:
        if event.kind != "receive" and event.number >= 0:
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
    words = WORDS.get(action.kind, action.kind) + f" {action.microbatch}" * (action.kind in WORDS)
    after = "after " * (event.posted > action.end and event.kind != "send")  # a send is the result of an action
    return after + words + f", chunk {action.chunk}" * (action.chunk > 0)


def folded(lines: list[Line]) -> Iterator[str]:
    """A line for each message; of those that follow each other at the same time, one for equal ones."""
    for _, group in itertools.groupby(lines, key=lambda line: line.when):
        counts: dict[str, list[Line]] = defaultdict(list)
        for each in group:
            counts[each.what].append(each)
        for equal in counts.values():
            number, what, when = equal[0]
            yield f"{number:5}  {what}" + f", {when}" * bool(when) + f"  ({len(equal)} times)" * (len(equal) > 1)


def sums(result: Result) -> str:
    count, size = Counter(), Counter()
    for event in result.world.events:
        if event.kind != "receive" and event.number >= 0:
            count[event.kind, event.number] += 1
            size[event.kind] += event.num_bytes
    kinds = Counter(kind for kind, _ in count)
    return "; ".join(f"{number} {kind}, {size[kind]:,} bytes" for kind, number in kinds.items())


def losses(result: Result) -> str:
    return "\n".join(f"loss {row['loss']:.6f}" + f" after step {row['step']}" * (len(result.rows) > 1) for row in result.rows)


def text(result: Result) -> str:
    parts = ["\n".join(folded(messages(result)))] * bool(result.watch("Messages"))
    return "\n".join([*parts, f"sent by all ranks: {sums(result)}", losses(result)])


def as_html(result: Result) -> str:
    from lab.picture import svg

    parts = [f"<p>{html.escape(losses(result))}</p>"]
    if result.watch("Schedule"):
        parts.append(f'<div style="overflow-x:auto">{svg(result)}</div>')
    parts.append(f"<details><summary>{html.escape(sums(result))}</summary><pre>{html.escape(text(result))}</pre></details>")
    return "\n".join(parts)


# Two results


def compare(result: Result, other: Result) -> str:
    """In what the first one differs from the second one: of each kind of findings the first difference."""
    return "\n".join(differences(result, other))


def differences(result: Result, other: Result) -> Iterator[str]:
    yield first("losses", [losses(result)], [losses(other)])
    if result.watch("Messages"):
        yield first("messages", *([f"message {number}: {what}, {when}" for number, what, when in messages(each)] for each in (result, other)))
    if result.watch("Schedule"):
        yield first("schedule", *([f"rank {a.rank} {a.kind}{a.microbatch}" for a in each.watch("Schedule").actions]
                                  for each in (result, other)))
    if result.watch("Numbers"):
        yield numbers(result, other)


def first(what: str, ours: list[str], theirs: list[str]) -> str:
    for k in range(max(len(ours), len(theirs))):
        here, there = (each[k] if k < len(each) else "nothing" for each in (ours, theirs))
        if here != there:
            return f"{what}, first difference: {here}\n    unchanged: {there}"
    return f"no difference in {what}"


def numbers(result: Result, other: Result) -> str:
    for kind in ("gradients", "weights"):
        ours, theirs = (getattr(each.watch("Numbers"), kind) for each in (result, other))
        for rank in sorted(ours):
            for step, (mine, yours) in enumerate(zip(ours[rank], theirs[rank]), 1):
                for name in mine:
                    if not torch.equal(mine[name], yours[name]):
                        return (f"numbers, first difference: {kind} of {name} on rank {rank}, step {step}, "
                                f"by up to {(mine[name] - yours[name]).abs().max():.2g}")
    return "no difference in numbers"
