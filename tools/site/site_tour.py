"""The tours as pages: a scene is a section with its lines of code beside its words. tour.js plays them one at a time.

Without JavaScript, and in print, all scenes stand below each other. tools/tours.py says what a scene is.
"""

import html
import pathlib
import re

from site_code import line_html, tokens_by_line
from site_diff import Drawing, FileDiff
from site_markdown import Document
from tours import Scene, Tour, added_lines

CONTEXT = 3  # lines of the file around those of the scene
NUMBER = re.compile(r'<a class="no"[^>]*>(\d+)</a>')  # of a line, with an address of its own


def scene_code(scene: Scene, before: pathlib.Path | None, diffs: list[FileDiff]) -> str:
    """The scene's lines as HTML: `.lit` are those that it speaks of, `.added` those that the step changed."""
    if scene.place is None:
        shown = [diff for diff in diffs if scene.diff in ("", diff.name) and diff.change.what != "removed"]
        rows = [f'<p class="file"><b>{diff.name}</b> {diff.change.what} {diff.change.counts}</p>'
                + f'<div class="code {"one" if diff.change.what == "new" else "two"}">{Drawing(diff, {}).html()}</div>'
                * (diff.change.what == "changed" or scene.diff == diff.name) for diff in shown]
        return NUMBER.sub(r'<span class="no">\1</span>', "".join(rows))  # a line may stand in several scenes
    path, first, last = scene.place
    lines = tokens_by_line(path.read_text(encoding="utf-8"), path.name)
    added = added_lines(before, path.parent, path.name) if before else set()  # of step 1 and of no step: all is new
    rows = []
    for number in range(max(1, first - CONTEXT), min(len(lines), last + CONTEXT) + 1):
        kind = "lit " * (first <= number <= last) + "added" * (number in added)
        rows.append(f'<code class="{kind}"><span class="no">{number}</span>{line_html(lines[number - 1])}</code>')
    return (f'<p class="file"><b>{path.parent.name}/{path.name}</b></p>'
            f'<div class="code one">{"".join(rows)}</div>')


def tour_content(tour: Tour, before: pathlib.Path | None, diffs: list[FileDiff], repository) -> list[dict]:
    """What the template tour.html and the films show, a dictionary a scene."""
    return [{"title": scene.title, "seconds": round(scene.seconds, 1), "command": scene.command,
             "file": scene.place.path.name if scene.place else scene.diff or "the diff", "plain": scene.words,
             "expected": html.escape(scene.expected), "words": Document(scene.words, repository, tour.path.parent).html,
             "code": scene_code(scene, before, diffs)} for scene in tour.scenes]
