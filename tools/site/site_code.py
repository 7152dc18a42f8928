"""Code for the site, as HTML: Pygments colours it, with the classes of Sphinx's own code blocks.

Three things are drawn: what a step changed in a file (old lines above new ones, unchanged lines folded), the lines of a
tour's scene, and a whole file. Each line of a step's new file has an anchor, `model.py-12`; each line of a file, `L12`.
"""

import difflib
import functools
import html
import itertools
import pathlib
import re

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

from course.steps_compare import Change, git_diff
from course.tours import Scene, shown_lines

CONTEXT, SHORTEST_FOLD = 3, 4  # unchanged lines shown around a change; of fewer lines than that, none are folded
WORD = re.compile(r"\w+|\s+|.")
CHARACTER = re.compile(r"<[^>]+>|&#?\w+;|.")  # of highlighted text: a tag, or what stands for one character


@functools.cache  # a file stands in the scenes of tours and in diffs
def code_lines(text: str, name: str) -> list[str]:
    """The lines of a file, highlighted by what its name says it is."""
    try:
        lexer = get_lexer_for_filename(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False, ensurenl=False)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).removesuffix("\n").split("\n")


def file_lines(path: pathlib.Path) -> list[str]:
    return code_lines(path.read_text(encoding="utf-8"), path.name)


def box(lines, label: str, anchor: str = "") -> str:
    """The box around lines; a long line scrolls within it."""
    mark = f' id="{html.escape(anchor)}"' if anchor else ""
    return f'<div class="code highlight" role="region" tabindex="0" aria-label="{label}"{mark}>{"".join(lines)}</div>'


def line(text: str, number: int | None, kind: str = "", anchor: str = "") -> str:
    """A line with its number, to which `anchor` leads."""
    anchor = html.escape(anchor)
    shown = f'<a class="ln" id="{anchor}" href="#{anchor}">{number}</a>' if anchor else (
        f'<span class="ln">{number or ""}</span>')
    return f'<code class="{kind}">{shown}{text or " "}</code>'


def marked(text: str, ranges: list[tuple[int, int]]) -> str:
    """A highlighted line in which these ranges of characters are marked."""
    parts, at = [], 0
    for piece in CHARACTER.findall(text):
        is_tag = piece.startswith("<")
        is_marked = not is_tag and any(first <= at < last for first, last in ranges)
        parts.append(f"<mark>{piece}</mark>" if is_marked else piece)
        at += not is_tag
    return "".join(parts).replace("</mark><mark>", "")


def differences(old: str, new: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The characters in which two lines differ, word by word; nothing where the lines have little in common."""
    words = [WORD.findall(text) for text in (old, new)]
    matcher = difflib.SequenceMatcher(None, *words, autojunk=False)
    ends = [[0, *itertools.accumulate(map(len, text))] for text in words]
    codes = [code for code in matcher.get_opcodes() if code[0] != "equal"] if matcher.ratio() >= 0.5 else []
    return ([(ends[0][i], ends[0][j]) for _, i, j, _, _ in codes], [(ends[1][i], ends[1][j]) for *_, i, j in codes])


def diff_html(before: pathlib.Path | None, after: pathlib.Path, name: str, change: Change, anchors: bool = True) -> str:
    """What step `after` changed in a file. The lines are git's, so that they are those that the chapters count."""
    old, new = (folder / name for folder in (before or after, after))
    if change.what != "changed":
        path, kind = (new, "") if change.what == "new" else (old, "old")
        rows = [line(text, k, kind, f"{name}-{k}" * (anchors and not kind))
                for k, text in enumerate(file_lines(path), 1)]
        return box(rows if not kind else [fold(f"{len(rows)} lines that this step removes", rows)], name)
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (old, new)]
    drawn = [file_lines(path) for path in (old, new)]
    diff = git_diff(old, new, f"-U{len(texts[0]) + len(texts[1])}")
    signs = [row[:1] for row in diff[diff.index("\n@@") + 1 :].splitlines()[1:] if row[:1] in ("+", "-", " ")]
    parts, at = [], [0, 0]  # lines of the old and of the new file that have been drawn

    def rows(side: int, count: int, kind: str, marks=()) -> list[str]:
        """The next `count` lines of one side."""
        numbers = range(at[side], at[side] + count)
        at[side] += count
        return [line(marked(drawn[side][k], marks[i]) if i < len(marks) else drawn[side][k], k + 1, kind,
                     f"{name}-{k + 1}" * (anchors and side)) for i, k in enumerate(numbers)]

    runs = [(is_same, list(run)) for is_same, run in itertools.groupby(signs, lambda sign: sign == " ")]
    for k, (is_same, run) in enumerate(runs):
        if is_same:
            at[0] += len(run)
            parts += folded(rows(1, len(run), ""), k > 0, k < len(runs) - 1)
            continue
        removed, added = run.count("-"), run.count("+")
        pairs = zip(texts[0][at[0] : at[0] + removed], texts[1][at[1] : at[1] + added])
        marks = [*zip(*itertools.starmap(differences, pairs))] or [(), ()]
        parts += rows(0, removed, "old", marks[0]) + rows(1, added, "new", marks[1])
    return box(parts, name)


def folded(rows: list[str], is_after: bool, is_before: bool) -> list[str]:
    """Unchanged lines: those near a change are shown, the others wait for a click."""
    first, last = CONTEXT * is_after, len(rows) - CONTEXT * is_before
    if last - first < SHORTEST_FOLD:
        return rows
    return [*rows[:first], fold(f"{last - first} unchanged lines", rows[first:last]), *rows[last:]]


def fold(summary: str, rows: list[str]) -> str:
    return f'<details class="fold"><summary>{summary}</summary>{"".join(rows)}</details>'


def file_html(path: pathlib.Path) -> str:
    """A whole file."""
    return box((line(text, k, "", f"L{k}") for k, text in enumerate(file_lines(path), 1)), path.name)


def scene_html(scene: Scene, folder: pathlib.Path, before: pathlib.Path | None, changes: dict[str, Change]) -> str:
    """A scene's lines: `.lit` are those that it speaks of, `.added` those that the step in `folder` changed. Or its
    diff, of which `changes` are the files."""
    if scene.place:
        path, lines = scene.place.path, file_lines(scene.place.path)
        rows = [line(lines[k - 1], k, "lit " * is_lit + "added" * is_added)
                for k, is_lit, is_added, _ in shown_lines(scene.place, before)]
        return f'<p class="file"><b>{path.parent.name}/{path.name}</b></p>{box(rows, path.name)}'
    parts = []
    for name, change in changes.items():
        if scene.diff in ("", name) and change.what in ("new", "changed"):
            parts.append(f'<p class="file"><b>{name}</b> {change.what} {change.counts}</p>')
            if change.what == "changed" or scene.diff == name:
                parts.append(diff_html(before, folder, name, change, anchors=False))
    return "".join(parts)
