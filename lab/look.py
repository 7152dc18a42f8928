"""A look at one optimizer step of a program, and what two of them have in common.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss
    result.picture("step.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(result))
"""

import argparse
import html
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

import lab
from lab.program import Edit, Program
from lab.ranks import SMALL, Result, check, run, threads
from lab.watch import Watch

NAMES = [name.lower() for name, module in lab.MODULES.items() if module.startswith("watch.")]
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


def describe(event, during: str) -> str:
    what = f" {' x '.join(map(str, event.shape))} {event.dtype}" if event.dtype else ""
    who = f"rank {event.rank} -> rank {event.peer}" if event.kind == "send" else f"ranks {', '.join(map(str, event.group))}"
    return f"{who}  {event.kind}{what}{during}"


def messages(result: Result) -> list[tuple[int, str]]:
    """Number and description of each message, and of each collective, once for all of its ranks."""
    schedule, found = result.watch("Schedule"), {}
    for event in result.world.events:
        if event.kind != "receive" and (event.number not in found or event.posted < found[event.number].posted):
            found[event.number] = event
    starts = defaultdict(list)
    for action in sorted(schedule.actions if schedule else [], key=lambda action: action.start):
        starts[action.rank].append(action)
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}

    def during(event) -> str:
        action = next((each for each in reversed(starts[event.rank]) if each.start < event.posted), None)
        if action is None:
            return ", before the first forward" if schedule else ""
        number = f" {action.microbatch}" + f", chunk {action.chunk}" * (action.chunk > 0)
        return f", {names[action.kind]}{number}" if action.kind in names else f", {action.kind}"

    return [(number, describe(event, during(event))) for number, event in sorted(found.items())]


def folded(lines: list[tuple[int, str]]) -> Iterator[str]:
    """Equal lines that follow each other become one."""
    k = 0
    while k < len(lines):
        count = next((i for i in range(len(lines) - k) if lines[k + i][1] != lines[k][1]), len(lines) - k)
        yield f"{lines[k][0]:5}  {lines[k][1]}" + f"  ({count} times)" * (count > 1)
        k += count


def sums(result: Result) -> str:
    count, size = Counter(), Counter()
    for event in result.world.events:
        if event.kind != "receive":
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
        yield first("messages", *([f"message {n}: {what}" for n, what in messages(each)] for each in (result, other)))
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
