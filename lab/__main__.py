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
    parser.add_argument("--stop", action="append", default=[], metavar="WHERE",
                        help="stop in a debugger: FILE:LINE of the step, the name of a function, message:N; repeatable")
    parser.add_argument("--rank", type=int, help="the only rank that stops (default: each one that comes there)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args, flags = make_parser().parse_known_args(argv)
    try:
        program = Program(args.step, flags, [Edit(*each) for each in args.edit])
    except ValueError as error:
        print(f"python -m lab: {error}", file=sys.stderr)
        return 2
    from lab.flags import sizes  # and with it torch
    from lab.ranks import run, threads
    from lab.stop import Stop, exit_code
    from lab.watch.messages import Messages

    found, messages = sizes(flags), Messages()
    size = found.dp_size * found.pp_size * found.cp_size * found.tp_size
    print(f"step {args.step} on {size} ranks", flush=True)
    stop = Stop(*args.stop, rank=args.rank)

    def look() -> int:
        result = run(program, threads(size, stop=stop), [messages])
        print(*messages.events, sep="\n")
        print(f"loss {result.rows[0]['loss']:.6f}")
        return 0

    return exit_code(look, stop)


if __name__ == "__main__":
    sys.exit(main())
