"""Two recordings that belong together, and a step of both. What is said of a step is a Finding."""

import dataclasses

import torch

from .frameworks import ordinary
from .noise import ROUNDING, Noise, coarsest, noise
from .recording import Recording


@dataclasses.dataclass(frozen=True)
class Finding:
    step: int
    what: str
    which: str  # parameters
    by: str
    cause: str
    size: float  # of the largest difference, beside the right length
    worst: str  # its parameter
    line: str  # all of it, in words


@dataclasses.dataclass(frozen=True)
class Pair:
    one: Recording  # which is trusted
    many: Recording
    names: list[str]  # of trained parameters
    dtype: str
    sizes: dict[str, int]  # kind -> number of ranks or of micro-batches
    is_alone: bool  # a pipeline's stages, which share nothing

    @classmethod
    def of(cls, one: Recording, many: Recording) -> "Pair":
        names = [name for name, info in one.info.items() if info["trained"]]
        split = [parts for parts in many.parts.values() if len(parts) > 1]
        replicas = min(len(ranks) for parts in split or many.parts.values() for ranks in parts.values())
        shards = max(map(len, split), default=1)
        # the least of all steps, because a pipeline's first one may have a forward more, to learn shapes
        counts = [[many.read(many.folder / f"rank{rank}_step{step}.pt")["microbatches"] for rank in range(many.world)]
                  for step in many.steps]
        sizes = {"replicas": replicas, "shards": shards, "ranks": many.world, **many.sizes,
                 "micro-batches": min(map(max, counts))}
        dtype = coarsest(*(one.info[name]["dtype"] for name in names))
        return cls(one, many, names, dtype, sizes, replicas == shards == 1)

    def ranks(self, names) -> set[int]:
        return {rank for name in names for ranks in self.many.parts[name].values() for rank in ranks}

    def which(self, names: list[str]) -> str:
        """Which parameters these are, in a few words."""
        others = {*self.names} - {*names}
        if not others:
            return f"all {len(names)} parameters"
        if (here := self.ranks(names)).isdisjoint(self.ranks(others)):
            return f"all {len(names)} parameters of ranks {sorted(here)}"
        kinds, right = (dict.fromkeys(map(ordinary, each)) for each in (names, others))
        if len(kinds) <= 4 and not kinds.keys() & right.keys():
            return ", ".join(kinds)
        last = f" to {names[-1]}" * (len(names) > 1)
        return f"{len(names)} of {len(self.names)} parameters, {names[0]}{last}"


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    pair: Pair
    number: int
    a: list[dict]  # the records of the trusted ranks
    b: list[dict]
    noise: Noise

    @classmethod
    def load(cls, pair: Pair, number: int, before: "Step | None", start: "Step | None") -> "Step":
        """Gradients are later as much noise as the weights have come apart, beside the way from the `start`."""
        a, b, drift = pair.one.load(number), pair.many.load(number), 0.0
        step = cls(pair, number, a, b, known := before.noise if before else noise(pair.dtype, pair.dtype))
        if start:
            old, mine, theirs = start.mine("weights"), step.mine("weights"), step.whole("weights")
            names = [name for name in pair.names if name in theirs and name in mine]
            way = sum((mine[name] - old[name]).norm() ** 2 for name in names) ** 0.5
            drift = 100 * float(sum((mine[name] - theirs[name]).norm() ** 2 for name in names) ** 0.5 / (way or 1))
        computed, kept = (coarsest(dtype, *set().union(*(each[key] for each in a + b)))
                          for dtype, key in ((known.computed, "computed"), (known.kept, "states")))
        return dataclasses.replace(step, noise=noise(computed, kept, drift, known.is_rounded))

    def mine(self, kind: str) -> dict[str, torch.Tensor]:
        """name -> the trusted sketch of "weights" or "gradients"."""
        return (one := self.pair.one).whole(one.held(self.a, kind), kind == "gradients" and one.summed)

    def theirs(self, kind: str) -> dict[str, dict]:
        """name -> part -> rank -> sketch."""
        return self.pair.many.held(self.b, kind)

    def whole(self, kind: str) -> dict[str, torch.Tensor]:
        """name -> the other run's sketch: of parts the sum, of replicas the mean."""
        return self.pair.many.whole(self.theirs(kind), kind == "gradients" and self.pair.many.summed)

    def finding(self, what: str, which, by: str, cause: str = "") -> Finding:
        """`which`: name -> size of the difference beside the right value, or none."""
        words, cause = self.pair.which([*which]) if which else "", cause or "look at what it is made of"
        sizes = which.items() if isinstance(which, dict) else ()
        size, worst = max(((size, name) for name, size in sizes if size), default=(0, ""))
        how_large = f" (largest: {size:.2g} of the right length, in {worst})" if worst else ""
        if 0 < size <= ROUNDING.get(self.noise.computed, 0) and "wrong" in by:
            how_large = f"{how_large[:-1]}; as large as rounding in a coarser dtype)"
        line = f"step {self.number}: {what}{', ' * bool(which)}{words}: {by}: {cause}{how_large}"
        return Finding(self.number, what, words, by, cause, size, worst, line)


def given(records: list[dict], key: str) -> list[float]:
    """The losses or norms of the ranks that have one."""
    return [each[key] for each in records if each[key] is not None]


def unlike(values: list[float], wanted: float, digits: int = 5) -> tuple[list[str], str]:
    """Numbers as text, with the digits that it takes to tell the farthest of them from the one that is wanted."""
    far = max(values, key=lambda each: abs(each - wanted))
    digits = next((n for n in range(digits, 17) if f"{far:.{n}g}" != f"{wanted:.{n}g}"), 17)
    return [f"{each:.{digits}g}" for each in values], f"{wanted:.{digits}g}"
