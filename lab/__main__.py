"""One optimizer step of a step of the course on ranks that are threads of this process: to look at, to change.

    python -m lab 8 --pp_size 4 --gradient_accumulation_steps 8 --picture step8.svg
    python -m lab 8 --pp_size 4 --edit pipeline_parallel.py "num_stages - stage - 1" "num_stages - stage"

Flags that are not the laboratory's own are those of the step's train.py: its --help lists them. Without --model_name,
--seq_len and the like, the model and its samples are small. A changed step runs beside the unchanged one. docs/LAB.md
says more, of the debugger, too.
"""

import argparse
import pathlib
import signal
import sys
from unittest import mock

from lab.launch import Help
from lab.picture import check_place
from lab.program import Edit, Program


ENDS = {"StopError": (2, ""), "UserError": (2, ""), "Violation": (1, ""), "BdbQuit": (1, "ended by `q`"),
        "KeyboardInterrupt": (130, "interrupted")}  # what ends a run early: exit code, and words where it has none


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(f"{message} (--help lists the flags)")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m lab", description=__doc__, formatter_class=Help, allow_abbrev=False)
    parser.add_argument("step", help="a step of the course, from 2 on")
    parser.add_argument("--watch", default="messages,schedule", type=lambda names: names.split(","),
                        help="of messages, schedule, memory, numbers; or types, or waits (default: messages,schedule)")
    parser.add_argument("--picture", metavar="FILE", type=pathlib.Path,
                        help="draws what the ranks do over time into this .svg or .png")
    parser.add_argument("--edit", nargs=3, action="append", default=[], metavar=("FILE", "OLD", "NEW"),
                        help="replaces the text OLD, which FILE of the step contains once, by NEW; repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="WHERE",
                        help="stop in a debugger: FILE:LINE of the step, the name of a function, message:N; repeatable")
    parser.add_argument("--rank", type=int, help="the only rank that stops (default: each one that comes there)")
    return parser


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args, flags = make_parser().parse_known_args(argv)
        if args.step != argv[0]:
            raise ValueError(f"the step comes first, as in: python -m lab 8 {argv[0]} ...")
        program = Program(args.step, flags, [Edit(*each) for each in args.edit])
        if args.picture and "schedule" not in args.watch:
            raise ValueError("--picture draws what the watch `schedule` notes: add it to --watch")
        if args.picture:
            check_place(args.picture)
        say(f"step {args.step}: {program.folders[0].name}/train.py {' '.join(flags)}")
        return show(args, program)
    except (KeyboardInterrupt, Exception) as error:
        kind, is_of_rank = type(error).__name__, hasattr(error, "rank")
        users = isinstance(error, (ValueError, SyntaxError, ImportError)) and not is_of_rank
        if kind not in ENDS and not users:
            raise  # a fault of the program, or of an edit of it: with its traceback
        code, words = ENDS.get(kind, (2, ""))
        print(words or error if kind == "Violation" else f"error: {words or error}",
              file=sys.stdout if kind == "Violation" else sys.stderr, flush=True)
        return code


def show(args: argparse.Namespace, program: Program) -> int:
    """Runs the step, and before it the unchanged one if there are edits, and prints what was watched."""
    import torch  # takes seconds

    from lab.one_step import look
    from lab.results import summary
    from lab.stop import Stop, StopError

    torch.set_num_threads(1)  # of ranks, one computes at a time
    unchanged = None
    if program.edits:
        say(program.diff())
        with mock.patch.object(sys, "breakpointhook", lambda *_, **__: None):  # the changed one stops
            unchanged = look(args.step, program.flags, (), args.watch, lambda text: say(f"unchanged, {text}"), False)
        say(f"{summary(unchanged)}\n")
    changed = "changed, " * bool(unchanged)
    stop = Stop(*args.stop, rank=args.rank)
    result = look(args.step, program.flags, program.edits, args.watch, lambda text: say(changed + text), stop)
    say(str(result))
    if unchanged:
        say(f"\n{result.beside(unchanged)}")
    if args.picture:
        result.picture(args.picture)
        say(f"picture: {args.picture}")
    if args.stop and (missed := stop.missed()):
        raise StopError(missed)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly where `head` reads no more
    sys.exit(main())
