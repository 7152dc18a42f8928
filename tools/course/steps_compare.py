"""What changed between two steps, file by file: see steps.py."""

import os
import re
import subprocess
from collections import namedtuple

PREDECESSORS = {10: 8, 17: 8, 18: 12, 19: 8}  # of the others, the step with the number before
Change = namedtuple("Change", "what counts")  # "new" "+190", "changed" "+12 -3", "removed" "-40" or "unchanged" ""


def git_diff(old, new, *options, cwd=None):
    """Diff two files wherever they lie; spelled out, for the user's git settings must not alter the counts."""
    try:
        done = subprocess.run(["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-ext-diff", "--no-prefix",
                               "--text", "--diff-algorithm=myers", "-U3", *options, "--", old, new], cwd=cwd,
                              capture_output=True)
    except FileNotFoundError:  # nothing else here needs it: the files may be out of a ZIP
        raise ValueError("git, which compares the steps, is not installed: install it, or use diff -ruN") from None
    if not 0 <= done.returncode <= 1:
        raise ValueError(f"git diff: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def find_steps(root):
    """{number: directory} of the stepN_* directories in root and in beyond/, in order."""
    steps = {}
    for path in sorted([*root.glob("step*/"), *root.glob("beyond/step*/")]):
        match = re.fullmatch(r"step(\d+)(_\w+)?", path.name)
        if match and path.is_dir() and steps.setdefault(int(match[1]), path) is not path:
            raise ValueError(f"{path.name} and {steps[int(match[1])].name} have the same number: rename one of them")
    if not steps:
        raise ValueError(f"no step1_*, step2_*, ... directories in {root}: name the right directory with --root")
    return dict(sorted(steps.items()))


def predecessor(steps, number):
    """The directory of the step that step `number` is a diff to; None for the first one."""
    return steps.get(PREDECESSORS.get(number, number - 1))


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


def count_lines(changes):
    """(added, removed) lines of all these changes, {name: Change}."""
    counts = " ".join(change.counts for change in changes.values())
    return tuple(sum(map(int, re.findall(sign + r"(\d+)", counts))) for sign in (r"\+", "-"))
