"""Keep the step directories honest: show what changed, find drift.

Each step is a full copy of the one before plus one idea, so the diff between two steps is what the reader studies.
A copy that changes unannounced is drift. Every README therefore declares, under `## Files`, what its step changed:

    | file       | what    | lines  | why                        |
    | ---------- | ------- | ------ | -------------------------- |
    | `model.py` | new     | +190   | the network                |
    | `train.py` | changed | +12 -3 | one process becomes many   |
    | `old.py`   | removed | -40    | replaced by `model.py`     |

Usage (exit code 1: drift; 2: the command makes no sense as given):
    python tools/steps.py diff 5 6 [train.py ...]     the diff a reader sees; README.md, where it is named
    python tools/steps.py check [--fix-counts]                   drift, foreign imports, sizes, budgets
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from course.steps_check import run_check
from course.steps_compare import compare, find_steps, git_diff, pick


def run_diff(steps, args):
    """Print what changed between two steps, file by file."""
    before, after = pick(steps, *args.steps, names=args.files)
    colour = bool(sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    for name, change in compare(before, after, "*").items():
        wanted = name in args.files or not args.files and change.what != "unchanged" and not name.endswith(".md")
        if not wanted:
            continue
        print(f"# {name}: {change.what} {change.counts}")
        if change.what in ("removed", "unchanged") or name.endswith(".svg") or b"\0" in (after / name).read_bytes():
            continue  # the name says it all: gone, or a picture
        old, new = (os.path.relpath(step / name, args.root) for step in (before, after))
        old, colours = old if change.what == "changed" else os.devnull, f"--color={'always' if colour else 'never'}"
        text = git_diff(old, new, colours, cwd=args.root)
        print("\033[1m" * colour + "".join(text.partition("--- ")[1:]), end="")  # without git's own heading
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="diff | check")
    diff, check = (commands.add_parser(name) for name in ("diff", "check"))
    for command, run in ((diff, run_diff), (check, run_check)):
        command.set_defaults(run=run)
        command.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="where the steps are")
    diff.add_argument("steps", type=int, nargs=2, metavar="step")
    diff.add_argument("files", nargs="*")
    check.add_argument("--fix-counts", action="store_true", help="rewrite the line counts in the READMEs")
    args = parser.parse_args(argv)
    try:
        return args.run(find_steps(args.root), args)
    except (ValueError, OSError) as error:  # OSError: no git, say
        print(f"steps.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `steps.py diff 5 6 | head` ends quietly
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
