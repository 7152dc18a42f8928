"""Keep the step directories honest: show what changed, find drift, carry a fix onwards.

Each step is a full copy of the one before plus one idea, so the diff between two steps is what the reader studies.
A copy that changes unannounced is drift. Every README therefore declares, under `## Files`, what its step changed:

    | file       | what    | lines  | why                        |
    | ---------- | ------- | ------ | -------------------------- |
    | `model.py` | new     | +190   | the network                |
    | `train.py` | changed | +12 -3 | one process becomes many   |
    | `old.py`   | removed | -40    | replaced by `model.py`     |

Usage (exit code 1: drift or a conflict; 2: the command makes no sense as given):
    python tools/steps.py diff 5 6 [train.py ...] [--readme]     the diff a reader sees
    python tools/steps.py table                                  files and line counts of all steps, in markdown
    python tools/steps.py check [--fix-counts]                   drift, foreign imports, sizes, budgets
    python tools/steps.py propagate 4 model.py [--dry-run]       merge an uncommitted fix of step 4 into steps 5, 6, ...
"""

import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from steps_check import run_check
from steps_compare import compare, count_lines, find_steps, git, git_diff, pick, predecessor

CONFLICT = re.compile(r"^<{7} .*?^>{7} [^\n]*\n", re.S | re.M)


def run_diff(steps, args):
    """Print what changed between two steps, file by file."""
    before, after = pick(steps, *args.steps, names=args.files)
    colour = bool(sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    for name, change in compare(before, after, "*").items():
        wanted = name in args.files or not args.files and change.what != "unchanged" and not name.endswith(".md")
        if not wanted and not (args.readme and name == "README.md"):
            continue
        print(f"# {name}: {change.what} {change.counts}")
        if change.what in ("removed", "unchanged") or name.endswith(".svg") or b"\0" in (after / name).read_bytes():
            continue  # the name says it all: gone, or a picture
        old, new = (os.path.relpath(step / name, args.root) for step in (before, after))
        old, colours = old if change.what == "changed" else os.devnull, f"--color={'always' if colour else 'never'}"
        text = git_diff(old, new, colours, cwd=args.root)
        print("\033[1m" * colour + "".join(text.partition("--- ")[1:]), end="")  # without git's own heading
    return 0


def run_table(steps, _):
    """Print a markdown table, a row per step; code files only."""
    print("| step | new modules | changed files | total | lines |\n| --- | --- | --- | --- | --- |")
    for number, step in steps.items():
        changes = compare(predecessor(steps, number), step)
        new, changed = (", ".join(f"`{name}` {'removed ' * (c.what == 'removed')}{c.counts}"
                                  for name, c in changes.items() if c.what in kinds)
                        for kinds in (("new",), ("changed", "removed")))
        added, removed = count_lines(changes)
        lines = sum(len(path.read_bytes().splitlines()) for path in step.glob("*.py"))
        print(f"| `{step.name}` | {new} | {changed} | +{added} -{removed} | {lines} |")
    return 0


def propagate_file(steps, args, name, base):
    """Carry the change base -> working tree of one file through the later steps; False at a conflict."""
    files, changes = ("ours", "base", "theirs"), {args.step: (base, (steps[args.step] / name).read_bytes().decode())}
    if base == changes[args.step][1]:
        print(f"{steps[args.step].name}/{name}: the same as in {args.base}, nothing to carry")
        return True
    for number in (n for n in steps if n > args.step):
        source, path, where = predecessor(steps, number), steps[number] / name, f"{steps[number].name}/{name}"
        (before,) = (n for n, step in steps.items() if step == source)
        if before not in changes:
            continue
        if not path.is_file():
            print(f"{where}: no such file, so the change ends at {source.name}")
            continue
        ours, (base, theirs) = path.read_bytes().decode(), changes[before]
        with tempfile.TemporaryDirectory() as scratch:
            for file, content in zip(files, (ours, base, theirs)):
                Path(scratch, file).write_bytes(content.encode())
            labels = ("-L", where, "-L", f"{source.name}/{name} before", "-L", f"{source.name}/{name}")
            conflicts, merged = git("merge-file", "-p", "--diff3", *labels, *files, cwd=scratch, most=127)
        if conflicts:
            print(f"{where}: conflict:", *CONFLICT.findall(merged), sep="\n", end="")
            print(f"stopped: this file and all that follow are as they were. Change it by hand, then: "
                  f"propagate {number} {name}")
            return False
        if merged == ours:  # a rerun: go on with the same change, there is none from here to carry
            print(f"{where}: has the change already")
            changes[number] = changes[before]
            continue
        print(f"{where}: {'would be ' * args.dry_run}{'merged' if merged != theirs else 'the same as ' + source.name}")
        if not args.dry_run:
            path.write_bytes(merged.encode())
        changes[number] = ours, merged
    return True


def run_propagate(steps, args):
    (source,), bases = pick(steps, args.step, names=args.files), {}
    for name in args.files:  # all of them before anything is written
        try:
            bases[name] = git("show", f"{args.base}:./{name}", cwd=source)[1]
        except ValueError as error:
            raise ValueError(f"{source.name}/{name} as it was before your change is not in {args.base} ({error}): name "
                             "a revision that has it with --base REV (--base :0 for what `git add` staged)") from None
    return 0 if all(propagate_file(steps, args, name, base) for name, base in bases.items()) else 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="diff | table | check | propagate")
    diff, table, check, propagate = (commands.add_parser(name) for name in ("diff", "table", "check", "propagate"))
    for command, run in ((diff, run_diff), (table, run_table), (check, run_check), (propagate, run_propagate)):
        command.set_defaults(run=run)
        command.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="where the steps are")
    diff.add_argument("steps", type=int, nargs=2, metavar="step")
    diff.add_argument("files", nargs="*")
    diff.add_argument("--readme", action="store_true", help="show README.md as well")
    check.add_argument("--fix-counts", action="store_true", help="rewrite the line counts in the READMEs")
    propagate.add_argument("step", type=int)
    propagate.add_argument("files", nargs="+")
    propagate.add_argument("--base", default="HEAD", metavar="REV", help="revision before the change")
    propagate.add_argument("--dry-run", action="store_true", help="say what would happen, write nothing")
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
