"""One optimizer step of a step of the course, on ranks that are threads of this process, to look at, to stop, to change.

    python -m lab 8 --pp_size 4 --gradient_accumulation_steps 8

Flags that are not the laboratory's own are those of the step's train.py.
"""

import argparse
import sys

from lab.launch import Help
from lab.program import Edit, Program


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__, formatter_class=Help,
                                     allow_abbrev=False)
    parser.add_argument("step", help="a step of the course, from 2 on")
    parser.add_argument("--edit", nargs=3, action="append", default=[], metavar=("FILE", "OLD", "NEW"),
                        help="replaces the text OLD, which FILE of the step contains once, by NEW; repeatable")
    parser.add_argument("--watch", default="messages,schedule", help="what to watch, of messages, schedule, numbers")
    parser.add_argument("--picture", metavar="FILE", help="draws the ranks' work over time into this .svg or .png")
    return parser


def main(argv: list[str] | None = None) -> int:
    args, flags = make_parser().parse_known_args(argv)
    try:
        program = Program(args.step, flags, [Edit(*each) for each in args.edit])
        print(f"step {args.step}, {program.folders[0].name}: importing torch", flush=True)
        return show(args, program)
    except Exception as error:
        if type(error).__name__ == "Violation":
            print(error)
            return 1
        if type(error).__name__ == "UserError" or isinstance(error, ValueError) and not hasattr(error, "rank"):
            print(f"error: {error}", file=sys.stderr)
            return 2
        raise


def show(args: argparse.Namespace, program: Program) -> int:
    """Runs the step, and before it the unchanged one if there are edits, and prints what was watched."""
    from lab.results import look  # and with it torch

    watch, unchanged = args.watch.split(","), None
    if args.edit:
        print(program.diff())
        unchanged = look(args.step, program.flags, watch=watch, say=lambda text: print(f"unchanged: {text}", flush=True))
        print(f"unchanged: {str(unchanged).splitlines()[-1]}", flush=True)
    result = look(args.step, program.flags, program.edits, watch, lambda text: print(text, flush=True))
    print(result)
    if args.picture:
        result.picture(args.picture)
        print(f"picture: {args.picture}")
    if unchanged:
        print(result.beside(unchanged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
