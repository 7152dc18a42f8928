"""A look at one optimizer step of a step of the course, on ranks that are threads of this process.

    result = look("8", "--pp_size 4 --gradient_accumulation_steps 8")
    print(result)  # the messages in their order, and the loss; a notebook shows the picture, too
    result.picture("step8.svg")
    print(look("8", "--pp_size 4", edits=[Edit("train.py", old, new)]).beside(look("8", "--pp_size 4")))
"""

import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import lab
from lab.program import Edit, Program
from lab.ranks import SMALL, check, run, threads
from lab.results import Result
from lab.stop import Stop

NAMES = ("messages", "schedule", "memory", "numbers", "types", "waits")


def look(step: int | str, flags: str | Sequence = (), edits: Sequence[Edit] = (),
         watch: Sequence[str] = ("messages", "schedule"), say: Callable[[str], None] = lambda text: None,
         stop: Stop | None = None) -> Result:
    """One optimizer step of a step of the course on ranks of this process, which stand where `stop` says. say() is told
    what runs, before it does.

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
    check(ranks := threads(size, stop=stop), watches)
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
