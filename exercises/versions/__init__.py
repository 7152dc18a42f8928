"""Answers to an exercise: wrong ones, as a learner would write them, and of some a right one, not the course's."""

from typing import NamedTuple

from museum.faults import FAULTS


class Wrong(NamedTuple):
    """The course's solution with the text `old`, which it contains once, replaced by `new`."""

    sentence: str  # what is wrong with it
    old: str
    new: str
    symptom: str  # words of the check's message
    besides: tuple[tuple[str, str], ...] = ()  # further texts, and what replaces them


class Versions(NamedTuple):
    wrong: list[Wrong]
    right: str = ""


def museum(name: str, symptom: str) -> Wrong:
    """A fault of tools/museum that is one of this function, too. Its first edit is in there."""
    (_, old, new), *besides = FAULTS[name].edits
    return Wrong(FAULTS[name].sentence, old, new, symptom, tuple(each[1:] for each in besides))
