"""What a step changed, as HTML: two columns for a changed file, one for a new one. Unchanged code is folded.

Each line of the new file has an anchor, `model.py-12`.
"""

import difflib
import html
import itertools
import pathlib
import re
from typing import NamedTuple

from site_code import Line, line_html, tokens_by_line
from steps_compare import Change, compare, git_diff

CONTEXT = 3  # unchanged lines shown around a change
SHORTEST_FOLD = 4
WORD = re.compile(r"\w+|\s+|.")


class FileDiff(NamedTuple):
    """A file that a step changed. `blocks`: rows that belong together; the rows of a block are all changed or none."""

    name: str
    change: Change
    blocks: list[tuple[bool, list[tuple[int | None, int | None]]]]  # (is changed, [(old, new), ...])
    old: list[str]
    new: list[str]

    @property
    def added(self) -> set[int]:
        """Numbers of the lines that the step added or changed."""
        return {new for is_changed, rows in self.blocks if is_changed for _, new in rows if new}


def diff_step(before: pathlib.Path | None, after: pathlib.Path) -> list[FileDiff]:
    """The Python files that step `after` changed, new ones first: they are what it is about."""
    order = {"new": 0, "changed": 1, "removed": 2}
    changes = [(name, change) for name, change in compare(before, after).items() if change.what != "unchanged"]
    return [diff_file(before, after, name, change)
            for name, change in sorted(changes, key=lambda item: (order[item[1].what], item[0]))]


def diff_file(before: pathlib.Path | None, after: pathlib.Path, name: str, change: Change) -> FileDiff:
    """One file's diff, by git, so that its lines are those that the chapters count."""
    old = (before / name).read_text(encoding="utf-8") if change.what != "new" else ""
    new = (after / name).read_text(encoding="utf-8") if change.what != "removed" else ""
    if change.what == "changed":
        text = git_diff(before / name, after / name, f"-U{len(old) + len(new)}")
        signs = [line[:1] for line in text[text.index("\n@@") + 1 :].splitlines()[1:]]
    else:
        signs = ["+"] * len(new.splitlines()) + ["-"] * len(old.splitlines())
    return FileDiff(name, change, blocks(signs), old.splitlines(), new.splitlines())


def blocks(signs: list[str]) -> list[tuple[bool, list[tuple[int | None, int | None]]]]:
    """Runs of changed and of unchanged rows. In a changed run, old and new lines stand beside each other in order."""
    found, old, new = [], 0, 0
    signs = [sign for sign in signs if sign in ("+", "-", " ")]
    for is_changed, run in itertools.groupby(signs, lambda sign: sign != " "):
        run = "".join(run)
        removed, added = (sum(sign in pair for sign in run) for pair in ("- ", "+ "))
        rows = [(old + i + 1 if i < removed else None, new + i + 1 if i < added else None)
                for i in range(max(removed, added))]
        found.append((is_changed, rows))
        old, new = old + removed, new + added
    return found


def marks(old: str, new: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The characters in which two lines differ, word by word; nothing where the lines have little in common."""
    words = [WORD.findall(line) for line in (old, new)]
    matcher = difflib.SequenceMatcher(None, *words, autojunk=False)
    if matcher.ratio() < 0.5:
        return [], []
    ends = [[sum(map(len, line[:i])) for i in range(len(line) + 1)] for line in words]
    codes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return ([(ends[0][i], ends[0][j]) for _, i, j, _, _ in codes if j > i],
            [(ends[1][i], ends[1][j]) for _, _, _, i, j in codes if j > i])


class Drawing:
    """One file's diff as HTML."""

    def __init__(self, diff: FileDiff):
        self.diff = diff
        self.old = tokens_by_line("\n".join(diff.old), diff.name)
        self.new = tokens_by_line("\n".join(diff.new), diff.name)

    def html(self) -> str:
        """All lines of the file, those far from a change folded."""
        if self.diff.change.what == "new":
            return "".join(self.cell("new", k, line, ()) for k, line in enumerate(self.new, start=1))
        if self.diff.change.what == "removed":
            rows = "".join(self.cell("old", k, line, ()) for k, line in enumerate(self.old, start=1))
            return fold(f"{len(self.old)} lines that this step removes", rows)
        return "".join(
            f'<div class="change">{"".join(self.row(*row, True) for row in rows)}</div>' if is_changed
            else self.same(k, rows) for k, (is_changed, rows) in enumerate(self.diff.blocks))

    def cell(self, side: str, number: int | None, line: Line, marked) -> str:
        """A line of one side, or its empty place; lines of the new file have an anchor."""
        if number is None:
            return f'<code class="{side} none"></code>'
        if side == "old":
            return f'<code class="old"><span class="no">{number}</span>{line_html(line, marked)}</code>'
        name = html.escape(f"{self.diff.name}-{number}")
        return (f'<code class="new"><a class="no" id="{name}" href="#{name}">{number}</a>'
                f"{line_html(line, marked)}</code>")

    def row(self, old: int | None, new: int | None, is_changed: bool) -> str:
        """Two lines beside each other."""
        before, after = (), ()
        if is_changed and old and new:
            before, after = marks(self.diff.old[old - 1], self.diff.new[new - 1])
        return ('<div class="row">' + self.cell("old", old, self.old[old - 1] if old else [], before)
                + self.cell("new", new, self.new[new - 1] if new else [], after) + "</div>")

    def same(self, k: int, rows: list) -> str:
        """Unchanged rows: those near a change are shown, the others folded."""
        first, last = CONTEXT * (k > 0), len(rows) - CONTEXT * (k < len(self.diff.blocks) - 1)
        shown, parts = {*range(first), *range(last, len(rows))}, []
        for is_shown, run in itertools.groupby(range(len(rows)), lambda i: i in shown):
            lines = [self.row(*rows[i], False) for i in run]
            text = f'<div class="same">{"".join(lines)}</div>'
            is_whole = is_shown or len(lines) < SHORTEST_FOLD
            parts.append(text if is_whole else fold(f"{len(lines)} unchanged lines", text))
        return "".join(parts)


def fold(summary: str, text: str) -> str:
    """Lines that a click shows."""
    return f'<details class="fold"><summary>{summary}</summary>{text}</details>'
