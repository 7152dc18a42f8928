"""Differences of tensors, as objects: in which way some parameters' numbers are not those of the trusted run."""

import dataclasses
from collections.abc import Callable

import torch

from .pair import Pair
from .sketches import factor, has_few_signs


@dataclasses.dataclass(frozen=True)
class Difference:
    sizes: dict[str, float]  # name -> how large it is, beside the right length


class Absent(Difference):
    """Ranks have none, or zeros only."""


class Other(Difference):
    """Wrong by no common factor."""


@dataclasses.dataclass(frozen=True)
class Scaled(Difference):
    factor: float  # all are so many times what is right


@dataclasses.dataclass(frozen=True)
class Unlike(Difference):
    """Ranks that should hold the same do not."""
    factor: float | None  # their mean is so many times what is right, None: no multiple of it


def differences(pair: Pair, a: dict, b: dict, noise: Callable, floor: Callable, *, summed: bool = False,
                unlike: float | None = None, few_signs: bool = False,
                rounding: float = 0.0) -> tuple[list[Difference], dict[str, float]]:
    """All that there are of one kind of tensor, and name -> size of what differs by no more than `rounding`. `a`: name
    -> sketch; `b`: name -> part -> rank -> sketch; `noise` and `floor` of a name; `unlike`: noise between ranks.
    `few_signs`: where a gradient is almost zero, its sign is noise."""
    found, rounded, whole = {}, {}, pair.many.whole(b, summed)
    for name in [name for name in b if name in a or name in whole]:
        mine, theirs = (each.get(name, torch.zeros(())) for each in (a, whole))
        lacks = not summed and any(len(b[name][part]) < len(ranks) for part, ranks in pair.many.parts[name].items())
        if not mine.ndim or not theirs.ndim or lacks or (mine.any() and not theirs.any()):
            if max(mine.norm(), theirs.norm()) > floor(name):
                found.setdefault((Absent,), {})[name] = 1.0
            continue
        size, limit = mine.norm(), noise(name)
        replicas = [] if summed else [(each, next(iter(ranks.values()))) for ranks in b[name].values()
                                      for each in ranks.values()]
        apart = max(float((x - y).norm() / size) for x, y in [(theirs, mine), *replicas]) if size else float(
            theirs.norm() > floor(name))
        if limit < apart <= rounding:
            rounded[name] = apart
            continue
        if any((x - y).norm() > max((unlike or limit) * x.norm(), floor(name)) for x, y in replicas):
            kind = Unlike, factor(theirs, mine, limit, floor(name))
        elif (c := factor(theirs, mine, limit, floor(name))) is None:
            is_right = few_signs and has_few_signs(theirs, mine, pair.one.info[name]["shape"], limit)
            kind = () if is_right else (Other,)
        else:
            kind = (Scaled, c) if c != 1 else ()
        if kind:
            found.setdefault(kind, {})[name] = apart
    return [kind(sizes, *c) for (kind, *c), sizes in found.items()], rounded


def common(a: dict, whole: dict) -> tuple[float, float]:
    """Of all sketches in one, where a factor shows that is too small to be seen in each: it, and the difference."""
    names = [name for name in a if name in whole]
    mine, theirs = (torch.cat([each[name] for name in names] or [torch.zeros(1)]) for each in (a, whole))
    return (float(theirs @ mine / (mine @ mine)), float((theirs - mine).norm() / mine.norm())) if mine.any() else (1, 0)
