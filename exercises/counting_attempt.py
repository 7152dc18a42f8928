"""Exercises that count: the reader's numbers beside what runs measure, and the usual mistakes by their names.

    @counts("5", "bytes", hints=(...), sizes=[dict(num_parameters=9, ranks=2), ...], mistakes=[(old, new, says), ...])
    def gradient_bytes(attempt, num_parameters, ranks):
        '''The task.'''
        return ...  # what a run measures for these sizes

A mistake is our solution (counting.py) with the text `old` replaced by `new`. An answer that gives this version's
numbers for all sizes is told what the mistake `says`; one that is a usual multiple of what is right, what RATIOS says;
one that is wrong by the factor of an argument, which; and one that makes two of the mistakes, both. Where only some
sizes are wrong, such as those of one of several numbers, these are looked at alone if all of them together say nothing.
"""

import functools
import itertools
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

from attempt import Wrong
from catalogue import exercise


class Count(NamedTuple):
    """`mistakes`: (old, new, what to say). `unit`: what is counted, a key of RATIOS. `make_sizes()` may run something.
    """

    unit: str
    make_sizes: Callable[[], list[dict]]
    mistakes: list[tuple[str, str, str]]

    @property
    def sizes(self) -> list[dict]:
        return self.make_sizes()


COUNTS: dict[str, Count] = {}
BYTES = {2: "twice: have you counted the send and the receive, or 8 bytes a number?", 0.5: "half: have you counted one "
         "direction of two, or 2 bytes a number? A float32 has 4.", 0.25: "numbers, not bytes: a float32 has 4 of them",
         4: "four times: have you multiplied by the bytes of a number twice? Or are these all 16 bytes of a parameter, "
         "with its gradient and AdamW's moments?", 8: "bits, not bytes",
         1e-6: "MB: give bytes", 1e-9: "GB: give bytes", 2**-20: "MiB: give bytes", 2**-30: "GiB: give bytes"}
FLOPS = {0.5: "half: a multiplication and an addition are two FLOPs", 2: "twice: each multiplication and each addition "
         "counts once", 1 / 3: "the forward pass only: backward takes twice as many", 2 / 3: "the backward pass only",
         4 / 3: "8 for each weight and not 6: forward is computed twice only with --recompute", 1e-9: "GFLOPs: give "
         "FLOPs", 1e-12: "TFLOPs: give FLOPs"}
UNITS = {2: "twice as many", 0.5: "half as many", 3: "three times as many: is it in another unit of time?",
         1 / 3: "a third: backward takes time, too", 2 / 3: "two thirds: forward takes time, too"}
RATIOS = {
    "bytes": BYTES, "FLOPs": FLOPS, "units of time": UNITS,
    "parameters": {2: "twice as many", 0.5: "half as many", 4: "bytes, not parameters", 1e-6: "millions: give "
                   "parameters", 1e-9: "billions: give parameters"},
    "tokens": {2: "twice: a multiplication and an addition are two FLOPs", 0.5: "half: count the FLOPs of a weight and "
               "a token again, there are two", 1e-3: "thousands: give tokens"},
    "tokens/s": {3: "of the forward pass only: backward takes twice as long", 1.5: "of the backward pass only",
                 2: "twice: a multiplication and an addition are two FLOPs", 0.75: "8 FLOPs for each weight and not 6",
                 0.5: "half", 60: "tokens a minute, not a second", 3600: "tokens an hour, not a second", 86400: "tokens"
                 " a day, not a second", 1e-3: "thousands: give tokens a second"},
    "bytes/s": {8: "bits a second, not bytes", 1e-9: "GB a second: give bytes a second", 1e-6: "MB a second: give bytes"
                " a second", 8e-9: "Gbit a second: give bytes a second", 0.5: "half: how much of the work is saved?",
                2: "twice: have you counted the send and the receive?", 0.25: "a quarter: numbers a second, not bytes"},
    "days": {24: "hours, not days", 1440: "minutes, not days", 86400: "seconds, not days", 1 / 7: "weeks, not days",
             1 / 3: "a third: backward takes twice as long as forward", 0.5: "half: a multiplication and an addition "
             "are two FLOPs", 4 / 3: "8 FLOPs for each weight and not 6"},
    "of the time": {100: "percent: give a share from 0 to 1", 2: "twice as much", 0.5: "half as much", 3: "three times "
                    "as much: the ratio does not depend on how long backward takes"},
    "micro-batches": {2: "twice: a backward frees what its forward has kept", 0.5: "half as many"},
    "samples": {2: "twice as many", 0.5: "half as many: is something counted twice?"},
    "layers": {2: "twice as many", 0.5: "half as many", 4: "four times: weights alone fit so often, but gradients and "
               "AdamW's moments are there, too"},
    "generators": {2: "twice as many", 0.5: "half as many"},
    "all-reduces": {2: "twice as many", 0.5: "half as many"},
}


def counts(chapter: str, unit: str, hints: tuple[str, ...], sizes, mistakes: list[tuple[str, str, str]]):
    """Enters the decorated measurement as an exercise, whose solution has its name in counting.py.

    It is called as measure(attempt, **size) and returns what a run measures. Its docstring is the task.
    """
    def enter(measure: Callable) -> Callable:
        make_sizes = functools.cache(sizes if callable(sizes) else lambda: sizes)
        count = COUNTS[measure.__name__] = Count(unit, make_sizes, mistakes)

        @functools.wraps(measure)
        def check(attempt) -> None:
            judge_counts(attempt, count, measure)

        wrong = [(says, old, new, says) for old, new, says in mistakes]
        return exercise(chapter, f"references:counting.{measure.__name__}", hints, wrong=wrong)(check)

    return enter


def judge_counts(attempt, count: Count, measure: Callable) -> None:
    """Raises Wrong where one of the reader's numbers is not what a run measures."""
    function, sizes, got, measured = attempt.function(), count.sizes, [], []
    for size in sizes:
        value = function(*size.values())
        number = value.item() if getattr(value, "shape", None) == () else value  # of numpy, or a tensor
        is_number = isinstance(number, numbers.Number) and not isinstance(number, (bool, complex))
        attempt.require(is_number and abs(number) < math.inf,
                        f"for {words(size)} it returns {value!r}, but has to return a number")
        got.append(float(number))
        measured.append(measure(attempt, **size))
    wrong = [k for k, (one, other) in enumerate(zip(got, measured)) if not near(one, other, count.unit)]
    if not wrong:
        return
    k = wrong[0]
    far = f"{100 * abs(got[k] / measured[k] - 1):.3g} % " if measured[k] else ""
    far += "too much" if got[k] > measured[k] else "too little"
    raise Wrong(f"for {words(sizes[k])}\n  a run measures  {measured[k]:,.8g} {count.unit}\n"
                f"  you count       {got[k]:,.8g} {count.unit}: {far}"
                f"{of_all(len(wrong), len(got))}\n\n{named(attempt, count, got, measured)}".rstrip())


def near(got: float, measured: float, unit: str = "") -> bool:
    """Equal, or rounded to a whole number of bytes or days."""
    is_rounded = unit in ("bytes", "FLOPs", "days", "tokens/s") and got % 1 == 0 and abs(got - measured) < 1 < measured
    return abs(got - measured) <= 1e-6 * abs(measured) or is_rounded


def of_all(wrong: int, total: int) -> str:
    return f"\n  {total - wrong} of {total} sizes are right" if wrong < total else f"\n  all {total} sizes are wrong"


def named(attempt, count: Count, got: list, measured: list) -> str:
    """What to say about the answers `got`: the mistake, or the two, that give these for all sizes, if we know any."""
    rows = list(zip(count.sizes, got, measured))
    wrong = [row for row in rows if not near(row[1], row[2], count.unit)]
    return said_of(attempt, count, rows) or (said_of(attempt, count, wrong) if 1 < len(wrong) < len(rows) else "")


def said_of(attempt, count: Count, rows: list[tuple[dict, float, float]]) -> str:
    """The same of these rows: a size, the answer, and what is measured."""
    def same(*mistakes: tuple) -> bool:
        version = mistaken(attempt.place.source(), attempt.name, mistakes)
        return version is not None and all(near(one, version(**size)) for size, one, _ in rows)

    def times(factor: Callable[[dict], float]) -> bool:
        return all(abs(one - factor(size) * other) <= 1e-6 * abs(factor(size) * other) for size, one, other in rows)

    for mistake in count.mistakes:
        if same(mistake):
            return mistake[2]
    for ratio, says in RATIOS[count.unit].items():
        if times(lambda size: ratio):
            return says
    for name, value in count.sizes[0].items():
        for power, says in ((1, "large"), (-1, "small")) if isinstance(value, (int, float)) and value else ():
            if times(lambda size: size[name] ** power):
                return f"too {says} by the factor `{name}`"
    for first, second in itertools.combinations(count.mistakes, 2):
        if same(first, second):
            return f"{first[2]}\n{second[2]}"
    return ""


def mistaken(source: str, name: str, mistakes: tuple[tuple[str, str, str], ...]) -> Callable | None:
    """Our solution with each mistake's text replaced, as a function; None where they exclude each other."""
    scope: dict = {}
    for old, new, _ in mistakes:
        if old not in source:
            return None
        source = source.replace(old, new, 1)
    try:
        exec(source, scope)
    except SyntaxError:
        return None
    return scope[name]


def words(size: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in size.items())
