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
    if str(step) == "2" and "memory" in watch:
        raise ValueError("memory watches what trains on samples: choose a step from 3 on")
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


def messages(result: Result) -> list[tuple[int, str, str]]:
    """Of each message, and of each collective once for all of its ranks: its number, what it is, and when it begins."""
    schedule, found, actions = result.watch("Schedule"), {}, defaultdict(list)
    for event in result.world.events:
        if event.kind != "receive" and event.number:
            found[event.number] = min(event, found.get(event.number, event), key=lambda each: each.posted)
    for action in sorted(schedule.actions if schedule else [], key=lambda action: action.start):
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
    memory = result.watch("Memory")
    return f"{memory}\n{summary(result)}" if memory else summary(result)


def text(result: Result) -> str:
    return "\n".join([*folded(result), tables(result)])


def as_html(result: Result) -> str:
    """For a notebook, in its colours, whether these are light or dark."""
    picture = f'<div style="overflow-x:auto">{svg(result)}</div>' if result.watch("Schedule") else ""
    lines = html.escape("\n".join(folded(result)))
    folds = f"<details><summary>messages</summary><pre>{lines}</pre></details>" if lines else ""
    return f"{picture}<pre>{html.escape(tables(result))}</pre>{folds}"


def findings(result: Result) -> dict[str, list[str]]:
    """What was watched, in lines."""
    found = {"losses": losses(result).splitlines()}
    if result.watch("Messages"):
        found["messages"] = [f"message {number}: {', '.join(words)}" for number, *words in messages(result)]
    if schedule := result.watch("Schedule"):
        actions = sorted(schedule.actions, key=lambda action: (action.rank, action.start))
        found["actions"] = [f"rank {action.rank}: {named(action)}" for action in actions]
    if memory := result.watch("Memory"):
        found["memory"] = str(memory).splitlines()
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
