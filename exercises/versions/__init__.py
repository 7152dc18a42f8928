"""Answers to an exercise: wrong ones, as a learner would write them, and of some a right one, not the course's."""

from typing import NamedTuple


class Wrong(NamedTuple):
    """The course's solution with the text `old`, which it contains once, replaced by `new`."""

    sentence: str  # what is wrong with it
    old: str
    new: str
    symptom: str  # words of the check's message


class Versions(NamedTuple):
    wrong: list[Wrong]
    right: str = ""
