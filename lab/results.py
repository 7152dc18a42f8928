"""A look at one optimizer step of a program, and what two of them have in common.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss
    result.picture("step.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(result))
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
from lab.program import Edit, Program
from lab.ranks import SMALL, Result, check, run, threads
from lab.watch import Watch

WATCHES = [name for name in ("messages", "schedule", "memory", "numbers", "types", "waits") if name.title() in lab.MODULES]
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
DEFAULT = ("messages", "schedule")


def choose(names: Sequence[str]) -> list[Watch]:
    """Watches by their names. Raises ValueError for another name."""
    if unknown := [name for name in names if name not in WATCHES]:
        raise ValueError(f"there is no watch {unknown[0]!r}: choose from {', '.join(WATCHES)}")
    return [getattr(lab, name.title())() for name in dict.fromkeys(names)]


def arguments(program: Program) -> argparse.Namespace:
    """What its train.py makes of the flags. Raises its UserError where it refuses one."""
    with mock.patch.object(sys, "argv", ["train.py", *SMALL, *program.flags]):
        train = program.load().train
        return train.parse_args(*[train.__doc__] * (program.step == "9"))


def one_step(program: Program, args: argparse.Namespace) -> tuple[Program, int, str]:
    """The program with the flags of a single optimizer step, or of as many as its idea needs; its number of ranks; and
    both in words."""
    pipelines = getattr(args, "pipelines", None) or [[1] * args.pp_size] * args.dp_size
    size = args.tp_size * sum(map(len, pipelines)) * getattr(args, "cp_size", 1)
    steps, replicas = getattr(args, "local_steps", 0) or 1, 1 if program.step == "2" else args.dp_size
    micro_batches = getattr(args, "num_microbatches", None) or getattr(args, "gradient_accumulation_steps", 1)
    said = f"{steps} optimizer steps, as replicas exchange after so many" if steps > 1 else "one optimizer step"
    if any(word.partition("=")[0] in ("--max_tokens", "--steps") for word in program.flags):
        said = "optimizer steps as the flags say"
    elif program.step == "9":
        program = program.with_flags([*program.flags, "--steps", steps])
    else:
        tokens = steps * replicas * micro_batches * args.micro_batch_size * args.seq_len
        program = program.with_flags([*program.flags, "--max_tokens", tokens])
    return program, size, (
        f"{size} rank{'s' * (size > 1)}, {said}: {args.num_hidden_layers} layers of {pathlib.Path(args.model_name).name}, "
        f"micro-batches: {str(micro_batches).strip('[]')} of {args.micro_batch_size} x {args.seq_len} tokens, {args.dtype}")


def look(step: int | str, flags: str | Sequence = (), edits: Sequence[Edit] = (),
         watch: Sequence[str] = ("messages", "schedule"), say: Callable[[str], None] = lambda text: None) -> Result:
    """One optimizer step of a step of the course on ranks of this process. say() is told what runs, before it does.

    Raises ValueError for what can't be looked at, and else what run() raises.
    """
    if str(step) == "1":
        raise ValueError("step 1 trains in one process, without messages: choose a step from 2 on")
    program, watches = Program(step, shlex.split(flags) if isinstance(flags, str) else flags, edits), choose(watch)
    args = arguments(program)
    if getattr(args, "profile_batch", 0):
        raise ValueError("--profile_batch measures time, which means nothing for ranks that take turns: leave it out")
    program, size, said = one_step(program, args)
    check(ranks := threads(size), watches)
    say(said)
    return run(program, ranks, watches)


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


def summary(result: Result) -> str:
    return f"sent by all ranks: {sums(result) or 'nothing'}\n{losses(result)}"


def text(result: Result) -> str:
    lines = folded(messages(result)) if result.watch("Messages") else ()
    return "\n".join([*lines, summary(result)])


def as_html(result: Result) -> str:
    """For a notebook: in its own colours, whether these are light or dark."""
    from lab.picture import svg

    picture = f'<div style="overflow-x:auto">{svg(result)}</div>' if result.watch("Schedule") else ""
    lines = html.escape("\n".join(folded(messages(result)))) if result.watch("Messages") else ""
    return (f"{picture}<p>{html.escape(losses(result))}</p><details><summary>sent by all ranks: "
            f"{html.escape(sums(result) or 'nothing')}</summary><pre>{lines}</pre></details>")


# Two results


def compare(result: Result, other: Result) -> str:
    """In what the first one differs from the second one: of each kind of findings the first difference."""
    return "\n".join(differences(result, other))


def differences(result: Result, other: Result) -> Iterator[str]:
    yield first("losses", losses(result).splitlines(), losses(other).splitlines())
    if result.watch("Messages"):
        yield first("messages", *([f"message {number}: {', '.join(words)}" for number, *words in messages(each)]
                                  for each in (result, other)))
    if result.watch("Schedule"):
        yield first("actions", *(actions(each.watch("Schedule")) for each in (result, other)))
    if result.watch("Numbers"):
        yield numbers(result.watch("Numbers"), other.watch("Numbers"))


def actions(schedule) -> list[str]:
    """Forwards and backwards, rank by rank."""
    return [f"rank {each.rank}, {WORDS[each.kind]} {each.microbatch}" + f", chunk {each.chunk}" * (each.chunk > 0)
            for each in sorted(schedule.actions, key=lambda each: (each.rank, each.start)) if each.kind in WORDS]


def first(noun: str, ours: list[str], theirs: list[str]) -> str:
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
    found = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if not found:
        return f"no difference in {noun}"
    return f"first difference of {noun}:\n    changed    {found[0]}\n    unchanged  {found[1]}"


def numbers(ours, theirs) -> str:
    """The first tensor that differs, in the order of updates, gradients before weights."""
    updates = max((len(steps) for steps in ours.gradients.values()), default=0)
    for update, kind, rank in itertools.product(range(updates), ("gradients", "weights"), sorted(ours.gradients)):
        mine, other = ({**each[rank][update]} if update < len(each[rank]) else {}
                       for each in (getattr(ours, kind), getattr(theirs, kind)))
        for name in mine | other:
            a, b = mine.get(name), other.get(name)
            if a is None or b is None or a.shape != b.shape:
                return f"first difference of numbers: {kind} of {name} on rank {rank}, which one has not, or of another shape"
            if not torch.equal(a, b):
                return (f"first difference of numbers: {kind} of {name} on rank {rank} in update {update + 1}, by up to "
                        f"{(a - b).abs().max():.2g} where the largest is {b.abs().max():.2g}")
    return "no difference in numbers"
