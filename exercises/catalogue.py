"""The exercises, in the order of the chapters. Each is a function in chapters/, which checks an attempt.

    @exercise("4", "tensor_parallel.all_reduce", hints=("...", "...", "..."), wrong=[("what is wrong", old, new, says)])
    def recursive_doubling(attempt):
        '''The task in one line.

        What is given, shapes, a picture, what may be called.
        '''
        attempt.both(4, program, "the sum")

The name and the docstring are the exercise's, and what the reader starts with is the function at that place of step 4
without its body (or without the statements that begin with one of the texts in `blank`). What no step holds stands in
references.py, and "cluster" stands for cluster/planning and cluster/run.

`wrong` has answers that a learner may give: ours with the text `old`, which it contains once, replaced by `new`. The
check has to refuse them with a message that has the words `says`. A fault of tools/museum whose first edit is in this
function needs its name only: ("name", says).
"""

import importlib
import inspect
import math
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from attempt import SECONDS, Attempt, Score, Wrong, describe_error, folders_of
from blanks import find, take_out
from lab import baton
from lab.baton import Violation, place, shown, within
from lab.launch import ROOT
from lab.program import Program

CHAPTERS = sorted((path.stem for path in (ROOT / "exercises" / "chapters").glob("*.py")),
                  key=lambda name: (name.startswith("counting"), name))
EXERCISES: dict[str, "Exercise"] = {}


class Exercise(NamedTuple):
    name: str
    chapter: str  # the step that it belongs to, or "cluster"
    folder: str  # the step that the function stands in, "references" or "cluster"
    place: str  # "module.function" in there
    task: str  # the docstring
    hints: tuple[str, ...]
    blank: tuple[str, ...]
    wrong: Sequence[tuple[str, ...]]
    check: Callable[[Attempt], None]

    @property
    def module(self) -> str:
        return self.place.partition(".")[0]

    @property
    def name_in_module(self) -> str:
        return self.place.partition(".")[2]

    @property
    def title(self) -> str:
        return self.task.splitlines()[0]

    @property
    def path(self) -> pathlib.Path:
        """The reader's file."""
        return baton.READER / f"{self.name}.py"


class Verdict(NamedTuple):
    is_right: bool
    message: str  # what is wrong
    scores: list[Score]
    sizes: set[int]  # numbers of ranks that the check ran on

    @property
    def stars(self) -> int:
        """0: not solved; 1 to 3 where an optimum is known, else 3."""
        return min([score.stars for score in self.scores], default=3) if self.is_right else 0


def exercise(chapter: str, where: str, hints: tuple[str, ...], blank: tuple[str, ...] = (),
             wrong: Sequence[tuple[str, ...]] = ()):
    """Enters the decorated check into EXERCISES. `where` is "module.function", behind "references:" or "cluster:" if
    that is not in the chapter's step."""
    folder, _, inside = where.rpartition(":")

    def enter(check: Callable[[Attempt], None]) -> Callable:
        EXERCISES[check.__name__] = Exercise(check.__name__, chapter, folder or chapter, inside,
                                             inspect.cleandoc(check.__doc__), hints, blank, wrong, check)
        return check

    return enter


def load() -> dict[str, Exercise]:
    """All exercises by name, in the order of the chapters."""
    for name in CHAPTERS:
        importlib.import_module(f"chapters.{name}")
    ordered = sorted(EXERCISES.values(), key=lambda one: int(one.chapter) if one.chapter.isdigit() else math.inf)
    EXERCISES.clear()  # those that count are in modules of their own
    EXERCISES.update({one.name: one for one in ordered})
    return EXERCISES


def source_path(one: Exercise) -> pathlib.Path:
    """The file in which our solution stands."""
    return Program(one.folder, folders=folders_of(one.folder)).path(one.module)


def stub(one: Exercise) -> str:
    """What the reader's file contains at the start."""
    where = find(source_path(one), one.name_in_module)
    place_in = f"Its place: {shown(where.path)}, {one.name_in_module}"
    return f'"""{one.name}: {one.task}\n\n{place_in}\nCheck it:  python exercises/try.py check {one.name}\n"""\n\n' + (
        take_out(where, one.blank))


def judge(one: Exercise, path: pathlib.Path, kind: type[Attempt] = Attempt) -> Verdict:
    """Checks the file `path` as a solution of an exercise. Raises Unwritten where it is none yet."""
    attempt, problems = kind(one, path), []

    def run() -> None:
        try:
            one.check(attempt)
        except (Wrong, Violation) as error:
            problems.append(str(error))
        except BaseException as error:
            problems.append(describe_error(error, path))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not within(SECONDS, lambda moment: thread.join(moment) or not thread.is_alive()):
        where = place(sys._current_frames()[thread.ident])
        problems.append(f"it does not end: after {SECONDS} seconds it is at {where}")
    return Verdict(not problems, "".join(problems[:1]), attempt.scores, attempt.sizes)
