"""The tours: what a presenter would show of a step, scene by scene. tour.py plays them, steps.py checks them.

A tour is a Markdown file. Below its title, each heading of level 2 begins a scene: a place, at most 60 words about it
and, where it helps, a command with the text to look for in its output:

    ## The ranks as a grid

    Look at [`process_group_manager.py::ProcessGroupManager.__init__`](process_group_manager.py#L37-L57).

    Words.

    ```bash
    torchrun --nproc_per_node 4 step2_process_group_manager/train.py --dp_size 2 --tp_size 2
    ```

    Look for `rank 3: dp 1`.

A place is named by what stands there, and `steps.py check --fix-counts` writes the numbers of its lines behind it:

    `file.py::Class.method`                     a class, a function, a method or a constant, whole
    `file.py` at `text`                         the one line that holds this text
    `file.py` from `text` to `text`             from the one line that holds the first to the one that holds the second
    `file.py::function` from `text` to `text`   the same inside of a function: the texts may stand elsewhere, too
    the diff / the diff of `file.py`            what the step changes, no link
"""

import ast
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from course.steps_compare import compare, find_steps, git_diff, predecessor

MOST_LIT, MOST_WORDS, MOST_TOUR_WORDS, SCENES, LEAST_SHARE = 30, 60, 800, range(8, 21), 0.8
CONTEXT = 3  # lines around those of a scene
MAIN = {1: ("model.py",), 2: ("process_group_manager.py", "metrics.py"), 3: ("dataloader.py",),
        4: ("tensor_parallel.py",), 5: ("data_parallel.py",), 6: ("data_parallel.py",), 7: ("pipeline_parallel.py",),
        8: ("pipeline_parallel.py",)}  # step -> the modules that its idea is in; train.py besides
PLACE = (r"`(?P<file>[\w./-]+?)(?:::(?P<name>[\w.]+))?`(?: at `(?P<at>[^`]+)`| from `(?P<first>[^`]+)` to `(?P<last>"
         r"[^`]+)`)?")
LINK = re.compile(rf"\[{PLACE}\]\((?P<path>[^)#]+)(?P<lines>#L\d+(?:-L\d+)?)?\)")
LOOK = re.compile(rf"Look at (?:{LINK.pattern}|the diff(?: of `(?P<diff>[\w.]+)`)?)\.")
COMMAND = re.compile(r"```bash\n(.+?)\n```(?:\n+Look for `([^`]+)`\.)?", re.S)


class Place(NamedTuple):
    """Lines `first` to `last` of the file at `path`, counted from 1."""

    path: Path
    first: int
    last: int


class Scene(NamedTuple):
    """`place` is None where the scene shows a diff: that of `diff`, a file's name, or of the whole step where it is "".
    `expected` is the text to look for in the output of `command`."""

    title: str
    place: Place | None
    diff: str
    words: str
    command: str
    expected: str

    @property
    def seconds(self) -> float:
        """How long the scene stays at reading speed: 160 words a minute, and two seconds to look."""
        return 2 + len(self.words.split()) * 60 / 160


class Tour(NamedTuple):
    path: Path
    title: str
    scenes: list[Scene]


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """Name -> (first line, last line) of what a module defines; what is inside of a class or function as `outer.inner`.

    Decorators belong to it. Constants are those of the module.
    """
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min(part.lineno for part in [node, *node.decorator_list])
                found[prefix + node.name] = first, node.end_lineno
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not prefix:
                for target in getattr(node, "targets", None) or [node.target]:
                    found[ast.unparse(target)] = node.lineno, node.end_lineno

    visit(ast.parse(source).body, "")
    return found


def find_place(match: re.Match, folder: Path) -> Place:
    """The lines that a place names; links start in `folder`. Raises ValueError where there are none, or several."""
    path = folder / match["path"]
    if not path.is_file() or path.name != Path(match["file"]).name:
        raise ValueError(f"{match[0]}: there is no file {match['path']}, or it is not the one that is named")
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    first, last = 1, len(lines)
    if match["name"]:
        known = definitions(source)
        if match["name"] not in known:
            raise ValueError(f"{path.name} defines no {match['name']}")
        first, last = known[match["name"]]
    if match["at"] or match["first"]:
        first = only_line(lines, match["at"] or match["first"], range(first, last + 1), path.name)
        last = first if match["at"] else only_line(lines, match["last"], range(first, min(first + 60, last) + 1),
                                                   path.name)
    return Place(path, first, last)


def only_line(lines: list[str], text: str, among: range, name: str) -> int:
    """The number of the one line of these that holds `text`. Raises ValueError where none does, or several do."""
    found = [number for number in among if text in lines[number - 1]]
    if len(found) != 1:
        where = f"{name}, lines {among[0]} to {among[-1]}"
        raise ValueError(f"`{text}` stands {len(found)} times in {where}: choose a text that stands there once")
    return found[0]


def read_tour(path: Path) -> Tour:
    """A tour from its Markdown file. Raises ValueError, with the scene's title, for a place that is lost."""
    head, *sections = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)
    scenes = []
    for section in sections:
        title, _, body = section.partition("\n")
        look, command = LOOK.match(body.lstrip()), COMMAND.search(body)
        if not look:
            raise ValueError(f"{title!r}: its first sentence names no place: Look at [`file.py::name`](file.py).")
        try:
            place = find_place(look, path.parent) if look["path"] else None
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"scene {title!r} has lost its place: {error}") from None
        words = COMMAND.sub("", body.lstrip()[look.end() :]).strip()
        scenes.append(Scene(title, place, look["diff"] or "", words, command[1] if command else "",
                            (command[2] or "") if command else ""))
    return Tour(path, head.strip().partition("\n")[0].removeprefix("# "), scenes)


def find_tours(root: Path) -> dict[str, Path]:
    """What a reader calls a tour -> its file: "4", "9", "9b" (a step's second one), "micro-batch", "cluster"."""
    found = {}
    for number, folder in find_steps(root).items():
        for suffix, path in zip(("", "b"), sorted(folder.glob("TOUR*.md"))):
            found[f"{number}{suffix}"] = path
    found |= {"micro-batch": root / "docs/TOUR.md", "cluster": root / "cluster/TOUR.md"}
    return {name: path for name, path in found.items() if path.is_file()}


def file_stem(name: str) -> str:
    """What the files made from a tour are called: step4, step9b, cluster."""
    return f"step{name}" if name[0].isdigit() else name


def added_lines(before: Path | None, after: Path, name: str) -> set[int]:
    """The numbers of the lines that a step added to one of its files or changed there."""
    old = before / name if before and (before / name).is_file() else os.devnull
    added = set()
    for start, count in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", git_diff(old, after / name, "-U0"), re.M):
        added.update(range(int(start), int(start) + int(count or 1)))
    return added


def shown_lines(place: Place, before: Path | None) -> list[tuple[int, bool, bool, str]]:
    """The lines of a place with CONTEXT around them: number, is it the scene's, is it added to the step in `before`."""
    added = added_lines(before, place.path.parent, place.path.name) if before else set()  # in step 1, all is new
    lines = place.path.read_text(encoding="utf-8").splitlines()
    return [(number, place.first <= number <= place.last, number in added, lines[number - 1])
            for number in range(max(1, place.first - CONTEXT), min(len(lines), place.last + CONTEXT) + 1)]


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that are neither blank nor part of an import or a docstring."""
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines -= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def check_step(number: int, steps: dict[int, Path], tours: list[Tour]):
    """Yield what a step's tours leave in the dark: 80 % of its idea's lines, the head of whatever else is new."""
    step, before = steps[number], predecessor(steps, number)
    lit = {}
    for place in (scene.place for tour in tours for scene in tour.scenes if scene.place):
        lit.setdefault(place.path.resolve(), set()).update(range(place.first, place.last + 1))
    wanted, unlit = 0, []
    for name, change in compare(before, step).items():
        if change.what not in ("new", "changed"):
            continue
        path = step / name
        source, seen = path.read_text(encoding="utf-8"), lit.get(path.resolve(), set())
        added = added_lines(before, step, name)
        if name in (*MAIN.get(number, ()), "train.py") and number in MAIN:
            code = added & code_lines(source)
            wanted += len(code)
            unlit += [(name, line) for line in sorted(code - seen)]
        elif number in MAIN or number == 9:
            for what, (first, last) in definitions(source).items():
                is_public = not (what.rpartition(".")[2].startswith("_") or what.isupper())
                if first in added and is_public and not seen & set(range(first, last + 1)):
                    yield f"{step.name}: no scene shows {name}::{what}, which is new: add it to a scene of its tour"
    if wanted and (share := 1 - len(unlit) / wanted) < LEAST_SHARE:
        yield (f"{step.name}: its tour shows {share:.0%} of the {wanted} lines of its idea, less than {LEAST_SHARE:.0%}"
               f"; not {', '.join(f'{name}:{line}' for name, line in unlit[:12])} ...")


def check_tour(tour: Tour, before: Path | None):
    """Yield what is too much for one sitting, or too little, and diffs that are none: to the step in `before`."""
    changes = compare(before, tour.path.parent) if before else {}
    changed = [name for name, change in changes.items() if change.what != "unchanged"]
    if len(tour.scenes) not in SCENES:
        yield f"{len(tour.scenes)} scenes, not {SCENES[0]} to {SCENES[-1]}"
    if (total := sum(len(scene.words.split()) for scene in tour.scenes)) > MOST_TOUR_WORDS:
        yield f"{total} words, more than {MOST_TOUR_WORDS}"
    for scene in tour.scenes:
        if scene.place is None and (not changed or scene.diff not in ("", *changed)):
            yield f"scene {scene.title!r} shows the diff of {scene.diff or 'the step'}, but there is none"
        if (count := len(scene.words.split())) > MOST_WORDS:
            yield f"scene {scene.title!r} has {count} words, more than {MOST_WORDS}"
        if scene.place and (lit := scene.place.last - scene.place.first + 1) > MOST_LIT:
            yield f"scene {scene.title!r} lights {lit} lines, more than {MOST_LIT}: name a part"


def fix_links(path: Path, fix: bool):
    """Yield the links to lines that are stale; with fix, their numbers are rewritten instead."""
    lost = []

    def renew(match: re.Match) -> str:
        try:
            place = find_place(match, path.parent)
        except ValueError as error:
            lost.append(f"a link has lost its place: {error}")
            return match[0]
        return f"{match[0].partition('](')[0]}]({match['path']}#L{place.first}-L{place.last})"

    text = path.read_text(encoding="utf-8")
    renewed = LINK.sub(renew, text)
    yield from lost
    if renewed != text and fix:
        path.write_text(renewed, encoding="utf-8")
    elif renewed != text:
        yield "links lead to other lines than they name: run steps.py check --fix-counts"


def code_tour(tour: Tour, root: Path) -> str:
    """The tour as JSON for CodeTour, an extension of VS Code (https://github.com/microsoft/codetour)."""
    steps = []
    for scene in tour.scenes:
        text = scene.words + (f"\n\n>> {scene.command}" if scene.command else "")
        text += f"\n\nLook for `{scene.expected}`." * bool(scene.expected)
        step = {"title": scene.title, "description": text}
        if scene.place:
            ends = scene.place.path.read_text(encoding="utf-8").splitlines()[scene.place.last - 1]
            step |= {"file": os.path.relpath(scene.place.path.resolve(), root.resolve()), "line": scene.place.last,
                     "selection": {"start": {"line": scene.place.first, "character": 1},
                                   "end": {"line": scene.place.last, "character": len(ends) + 1}}}
        steps.append(step)
    return json.dumps({"$schema": "https://aka.ms/codetour-schema", "title": tour.title, "steps": steps}, indent=2)


def check_tours(root: Path, steps: dict[int, Path], fix: bool):
    """Yield what is wrong with the tours, with the links of docs/VIDEOS.md and with .tours/, one line each."""
    found, tours = find_tours(root), {}
    for number, step in steps.items():
        if not list(step.glob("TOUR*.md")):
            yield f"{step.name}: no TOUR.md: a step brings a tour, see tools/course/tours.py"
    for path in [*found.values(), *(root / "docs").glob("VIDEOS.md")]:
        yield from (f"{path.relative_to(root)}: {problem}" for problem in fix_links(path, fix))
    for name, path in found.items():
        try:
            tours[name] = read_tour(path)
        except ValueError as error:
            yield f"{path.relative_to(root)}: {error}"
            continue
        before = next((predecessor(steps, n) for n, step in steps.items() if step == path.parent), None)
        yield from (f"{path.relative_to(root)}: {problem}" for problem in check_tour(tours[name], before))
        written = root / ".tours" / f"{file_stem(name)}.tour"
        text = code_tour(tours[name], root) + "\n"
        if fix:
            written.parent.mkdir(exist_ok=True)
            written.write_text(text, encoding="utf-8")
        elif not written.is_file() or written.read_text(encoding="utf-8") != text:
            yield f"{written.relative_to(root)}: older than its tour: run steps.py check --fix-counts"
    for number in steps:
        mine = [tour for tour in tours.values() if tour.path.parent == steps[number]]
        if len(mine) == len([path for path in found.values() if path.parent == steps[number]]) > 0:
            yield from check_step(number, steps, mine)
