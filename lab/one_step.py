"""A look at one optimizer step of a step of the course, on ranks that are threads of this process.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss; a notebook shows the picture, too
    result.picture("step8.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(look("8", "--pp_size 4")))
"""

import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import lab
from lab.program import Edit, Program
from lab.rank_alone import alone
from lab.ranks import SMALL, check, run, threads
from lab.results import Result
from lab.stop import Stop

SECONDS = 600  # that a look may take
NAMES = ("messages", "schedule", "memory", "numbers", "types", "waits")


def look(step: int | str, flags: str | Sequence = (), edits: Sequence[Edit] = (),
         watch: Sequence[str] = ("messages", "schedule"), say: Callable[[str], None] = lambda text: None,
         stop: Stop | None | bool = None) -> Result:
    """One optimizer step of a step of the course on ranks of this process, which stand where `stop` says, or with False
    nowhere. say() is told what runs, before it does.

    Raises ValueError for what can't be looked at, and else what run() raises.
    """
    if str(step) == "1":
        raise ValueError("step 1 trains in one process, without messages: choose a step from 2 on")
    if str(step) == "2" and (early := {"memory", "types", "waits"} & {*watch}):
        raise ValueError(f"{early.pop()} needs a step that trains on samples: choose one from 3 on")
    if str(step) in ("3", "9") and "types" in watch:
        raise ValueError(f"types are not known of step {step}: choose another one that divides a model or samples")
    known = [name for name in NAMES if name.title() in lab.MODULES]
    if unknown := [name for name in watch if name not in known]:
        raise ValueError(f"there is no watch {unknown[0]!r}: choose from {', '.join(known)}")
    watches = [getattr(lab, name.title())() for name in dict.fromkeys(watch)]
    program, size, words = one_step(Program(step, shlex.split(flags) if isinstance(flags, str) else flags, edits))
    if "types" in watch and (program.sizes.zero or size == 1):
        raise ValueError("types are not known of ZeRO's shards: leave --zero out" if program.sizes.zero else
                         "one rank has no collectives for types to check: give it more, as with --tp_size 2")
    if {"types", "waits"} & {*watch} and any(flag.startswith("--generators") for flag in program.flags):
        raise ValueError("types and waits watch a rank alone, which gets no answers: leave --generators out")
    of_one = any("threads" not in watch.places for watch in watches)
    if of_one and stop and stop.where:
        raise ValueError("a stop is one of ranks in this process, and types and waits watch a rank that is alone")
    stop = Stop() if stop is None else stop or None  # without, a breakpoint() of the step stops all the same
    check(ranks := alone(0, size) if of_one else threads(size, stop=stop), watches)
    say(f"rank 0 of {words}" if of_one else words)
    if "waits" in watch:  # in a process of its own, which registers a device
        watches[0].found = waits_of(program, size)
        return Result([], [], None, watches)
    return run(program, ranks, watches, timeout=SECONDS)


def waits_of(program: Program, size: int) -> str:
    from lab.watch.waits import start

    done = start(program, 0, size, check=False).result()
    lines = done.stderr.splitlines()
    if done.returncode == 0:
        read, copied, cast = re.findall(r"\w+ (\d+|\[.*\])", done.stdout)
        return (f"the host waits nowhere in the middle of a step. It reads {read} values where it logs, {copied} "
                f"copies to the device do not block, and each weight is cast {cast.strip('[]')} times")
    if not (said := [line for line in lines if line.startswith("in the middle of a step the host")]):
        raise RuntimeError(f"the step has failed:\n{done.stderr}")
    where = [line.strip() for line in lines if f"{program.folders[0].name}{os.sep}" in line]
    return f"{said[0]}, {where[-1]}"


def one_step(program: Program) -> tuple[Program, int, str]:
    """The program with the flags of a single optimizer step, or of as many as its idea needs; its number of ranks; and
    both in words. Raises the step's UserError for flags that it refuses."""
    with mock.patch.object(sys, "argv", ["train.py", *SMALL, *program.flags]):
        train = program.load().train
        args = train.parse_args(*[train.__doc__] * (program.step == "9"))
    if getattr(args, "profile_batch", 0):
        raise ValueError("--profile_batch measures time, which means nothing for ranks that take turns: leave it out")
    pipelines = getattr(args, "pipelines", None) or [[1] * args.pp_size] * args.dp_size
    generators = getattr(args, "generators", None) or 0
    size = args.tp_size * sum(map(len, pipelines)) * getattr(args, "cp_size", 1) + generators
    samples = args.micro_batch_size * (getattr(args, "group_size", None) or 1)
    steps, replicas = getattr(args, "local_steps", 0) or 1, 1 if program.step == "2" else args.dp_size
    steps = 2 + args.lag if generators else steps  # weights have come back then
    micro_batches = getattr(args, "num_microbatches", None) or getattr(args, "gradient_accumulation_steps", 1)
    words = f"{steps} optimizer steps, as ranks exchange weights after so many" if steps > 1 else "one optimizer step"
    if any(word.partition("=")[0] in ("--max_tokens", "--steps") for word in program.flags):
        words = "optimizer steps as the flags say"
    elif program.step == "9":
        program = program.with_flags([*program.flags, "--steps", steps])
    else:
        tokens = steps * replicas * micro_batches * samples * args.seq_len
        program = program.with_flags([*program.flags, "--max_tokens", tokens])
    return program, size, (
        f"{size} rank{'s' * (size > 1)}, {words}: {args.num_hidden_layers} layers of "
        f"{pathlib.Path(args.model_name).name}, micro-batches: {str(micro_batches).strip('[]')} of "
        f"{samples} x {args.seq_len} tokens, {args.dtype}")
