"""python -m same_numbers ONE MANY [--json]: is what MANY records what ONE, a trusted run, best of one process, records?

Prints a line a finding, the first wrong thing first. Exits with 0 (the same), 1 (not) or 2 (they can't be compared).
"""

import argparse
import collections
import json
import pathlib
import re
import sys

import torch

from same_numbers import Recording, factor, given, section

# By dtype, relative: what rounding changes in gradients of the first step, in later ones, and in weights at the start
NOISE = {"float64": (1e-9, 1e-6, 1e-12), "float32": (3e-4, 3e-2, 2e-6), "bfloat16": (5e-2, 2e-1, 1e-2)}
CAUSES = {  # (what is compared, how it is wrong) -> what it usually is
    ("start", "unlike"): "does each rank draw from a seed of its own, without a broadcast?",
    ("start", "other"): "another seed, or random numbers that depend on the ranks?",
    ("update", "unlike"): "replicas drift, by unlike optimizers or steps: their gradients were the same",
    ("update", "other"): "the optimizer's moments (lost in a resume?), weight decay, or unlike steps?",
    ("gradients", "absent"): "does the graph reach them on every rank, is something frozen or detached?",
    ("micro-batches", "large"): "is the loss divided by their number before backward?",
    ("micro-batches", "small"): "is the loss divided by their number twice, or only the last one kept?",
    ("ranks", "large"): "a sum over ranks where the mean is meant, or one sum too many?",
    ("ranks", "small"): "divided by ranks twice, or a mean where ranks hold summands?",
}


class Comparison:
    """`found` has the findings of the first step that has any."""

    def __init__(self, one: Recording, many: Recording):
        self.one, self.many, self.found = one, many, []
        self.steps = [step for step in one.steps if step in many.steps]
        one.check(many)
        self.noise, later, self.equal = NOISE.get(min(info["dtype"] for info in one.info.values()), NOISE["bfloat16"])
        self.names = [name for name, info in one.info.items() if info["trained"]]
        split = [parts for parts in many.parts.values() if len(parts) > 1]
        self.sizes = {"replicas": min(len(ranks) for parts in split or many.parts.values() for ranks in parts.values()),
                      "shards": max(map(len, split), default=1), "ranks": many.world}
        self.sizes["micro-batches"] = min(max(each["microbatches"] for each in many.load(step)) for step in many.steps)
        before = None  # the least of all steps, because a pipeline's first one may have a forward more, to learn shapes
        for self.step in self.steps:
            self.a, self.b = one.load(self.step), many.load(self.step)
            self.samples()
            self.weights(before)
            if not self.found:
                self.gradients(before)
            if self.found:
                return
            before, self.noise = (self.a, self.b), later

    def add(self, what: str, which: list[str], by: str, cause: str = "") -> None:
        cause, words = cause or "look at what it is made of", self.which(which) if which else ""
        line = f"step {self.step}: {what}{', ' * bool(which)}{words}: {by}: {cause}"
        self.found.append({"step": self.step, "what": what, "which": words, "by": by, "cause": cause, "line": line})

    def which(self, names: list[str]) -> str:
        """Which parameters these are, in a few words."""
        others = {*self.names} - {*names}
        if not others:
            return f"all {len(names)} parameters"
        here, there = ({rank for name in each for ranks in self.many.parts[name].values() for rank in ranks}
                       for each in (names, others))
        if here.isdisjoint(there):
            return f"all {len(names)} parameters of ranks {sorted(here)}"
        kinds, right = ({re.sub(r"\d+", "*", name): None for name in each} for each in (names, others))
        if len(kinds) <= 4 and not kinds.keys() & right.keys():
            return ", ".join(kinds)
        return f"{len(names)} of {len(self.names)} parameters, {names[0]} to {names[-1]}"

    def fits(self, c: float) -> tuple[str, str]:
        """A factor in words, and what it usually is where it is a number of micro-batches or ranks."""
        if abs(c + 1) < 2e-3:
            return "of the wrong sign", "is something subtracted, or a loss negated?"
        how, ratio = ("large", abs(c)) if abs(c) > 1 else ("small", 1 / abs(c))
        fits = [kind for kind, n in self.sizes.items() if n > 1 and abs(ratio / n - 1) < 2e-3]
        causes = dict.fromkeys(CAUSES["ranks" if kind != "micro-batches" else kind, how] for kind in reversed(fits))
        words = f"{ratio:.5g} times too {how}" + f" = the number of {' or of '.join(fits)}" * bool(fits)
        return words + ", and of the wrong sign" * (c < 0), " Or: ".join(causes)

    def groups(self, a: dict, b: dict, noise: float, floor, summed: bool = False) -> dict:
        """How sketches are wrong -> names. `a`: name -> sketch; `b`: name -> part -> rank -> sketch."""
        found, whole = collections.defaultdict(list), self.many.whole(b, summed)
        for name in [name for name in self.names if name in a or name in whole]:
            mine, theirs = (each.get(name, torch.zeros(())) for each in (a, whole))
            lacks = not summed and any(len(b[name][part]) < len(ranks) for part, ranks in self.many.parts[name].items())
            if not mine.ndim or not theirs.ndim or lacks:
                if max(mine.norm(), theirs.norm()) > floor(name):
                    found["absent", None].append(name)
                continue
            unlike = not summed and any(
                (each - next(iter(ranks.values()))).norm() > max(noise * each.norm(), floor(name))
                for ranks in b[name].values() for each in ranks.values())
            c = factor(theirs, mine, noise, floor(name))
            if unlike or c != 1:
                found["unlike" if unlike else "factor" if c else "other", c].append(name)
        return found

    def samples(self) -> None:
        ranks = [{*each["samples"]} for each in self.b]
        wanted, read = {sample for each in self.a for sample in each["samples"]}, set().union(*ranks)
        sizes = [{sample.partition(":")[0] for sample in each} for each in (wanted, read)]
        missing, strange = wanted - read, read - wanted
        if sizes[0] == sizes[1] and (missing or strange):  # else none were noted, or ranks see parts of each sample
            twins = [f"rank {j} reads rank {i}'s" for j, each in enumerate(ranks) for i in range(j)
                     if each and each == ranks[i]]
            steps = [step for step in self.one.steps
                     if strange and strange <= {*sum((each["samples"] for each in self.one.load(step)), [])}]
            by = f"{len(missing)} of {len(wanted)} are read by nobody, and {len(strange)} others are"
            self.add("samples", [], by,
                     f"{'; '.join(twins)}: does the loader ask for its rank?" if twins and not strange else
                     f"they are those of step {steps[0]}: does a resumed run begin its data anew?" if steps else
                     "another order, another seed of the shuffle, or other data?")

    def weights(self, before: tuple | None) -> None:
        """At the start; later, what the step has changed."""
        b = self.many.held(self.b, "weights")  # FSDP may have freed some
        a = {name: vector for name, vector in self.one.whole(self.one.held(self.a, "weights")).items()
             if any(b[name].values())}
        if before is None:
            for (how, c), names in self.groups(a, b, self.equal, lambda name: 0.0).items():
                by, cause = self.words("weights", how, c, names, a)
                found = "" if how == "factor" else cause  # what a factor of gradients means, it does not here
                self.add("weights at the start", names, by, found or CAUSES["start", how if how == "unlike" else "other"])
            return
        floors = {name: 10 * self.equal * vector.norm() for name, vector in a.items()}
        old, older = self.one.whole(self.one.held(before[0], "weights")), self.many.held(before[1], "weights")
        gradients = self.one.whole(self.one.held(before[0], "gradients"))
        rounding = self.noise * 1e-4 * sum(vector.norm() ** 2 for vector in gradients.values()) ** 0.5
        a = {name: a[name] - old[name] for name in a if name in gradients and gradients[name].norm() > rounding}
        b = {name: {part: {rank: vector - older[name][part][rank] for rank, vector in ranks.items()}
                    for part, ranks in parts.items()} for name, parts in b.items() if name in a}
        for (how, c), names in self.groups(a, b, self.noise, floors.get).items():
            lost = [name for name in names
                    if self.one.info[name]["held"] > (self.many.info[name]["held"] or self.many.summed)]
            rates = [sorted({rate for each in records for rate in each["rates"]}) for records in before]
            by = f"{c:.4g} times as far as they should" if how == "factor" else (
                "unlike on ranks that should hold the same" if how == "unlike" else "not as they should")
            self.add(f"what step {self.step - 1} changed in the weights, though its gradients were right", names,
                     by, f"the optimizer does not hold {len(lost)} of them: was it made before they were replaced?"
                     if lost else f"the learning rate was {rates[1]}, not {rates[0]}: does each rank "
                     "move the scheduler on?" if rates[0] != rates[1] else CAUSES.get(("update", how), ""))

    def words(self, kind: str, how: str, c: float | None, names: list[str], a: dict) -> tuple[str, str]:
        """By what, and what it usually is."""
        if how == "factor":
            return self.fits(c)
        if how == "absent":
            return "ranks have none" if names[0] in a else "they are not in the other run", CAUSES[kind, how]
        if how == "unlike":
            count = max(len(ranks) for name in names for ranks in self.many.parts[name].values())
            if c == 1:
                return ("unlike on ranks that should hold the same, whose mean is right",
                        "are some summands never averaged over ranks (no_sync, a hook that is left out)?")
            if c and any(abs(c * n - 1) < 2e-3 for n in {count, self.sizes["shards"]} - {1}):
                return ("unlike on ranks that should hold the same, whose sum is right",
                        "a tied weight: are its two gradients summed between first and last stage?"
                        if {*names} <= {*self.one.aliases.values()} else
                        "each rank sees a part (of the sequence, of the heads): is the sum over tp ranks left out?")
            return "unlike on ranks that should hold the same", ""
        found, taken = self.by_rank(names, kind, a)
        wrong = [rank for rank, factors in found.items() if factors != {1.0}]
        only = f", on ranks {wrong} only" if 0 < len(wrong) < len(found) else ""
        return f"wrong{only}, by no common factor", "; ".join(sorted(taken))

    def by_rank(self, names: list[str], kind: str, a: dict) -> tuple[dict[int, set], set[str]]:
        """rank -> the factors by which what it holds is wrong; and which ranks hold the part of another one."""
        found, taken = collections.defaultdict(set), set()
        for name, bounds, ranks in [(name, *part) for name in names for part in self.many.parts[name].items()]:
            shape, parts = self.one.info[name]["shape"], self.many.parts[name]
            sections = {each: section(a[name], shape, each) for each in parts}
            for rank in [each for each in ranks if self.b[each][kind][name] is not None]:
                mine = section(self.b[rank][kind][name], shape, bounds)
                if not len(mine) or not sections[bounds].any():
                    continue
                c = factor(mine, sections[bounds], self.noise)
                found[rank].add(c)
                taken |= {f"rank {rank} holds the part of rank {parts[other][0]}" for other, theirs in sections.items()
                          if c is None and len(theirs) == len(mine) and factor(mine, theirs, self.noise) == 1}
        return found, taken

    def unclipped(self) -> tuple[dict, dict]:
        """The gradients of both recordings before clipping, by the norms that their ranks have clipped by."""
        runs, largest = ((self.one, self.a), (self.many, self.b)), None
        for run, records in runs if all(given(records, "norm") for run, records in runs) else ():
            norms, total = [each["norm"] for each in records], run.norm(records)
            known = next(norm for norm in norms if norm is not None)
            if largest is None and total < known * (1 - 2e-6):
                largest = total * (1 + 1e-6 / known)  # torch divides by the norm + 1e-6
            for each, norm in zip(records, norms):
                scale = max(1.0, ((known if norm is None else norm) + 1e-6) / largest) if largest else 1.0
                each["gradients"] = {name: None if vector is None else vector * scale
                                     for name, vector in each["gradients"].items()}
        return self.one.whole(self.one.held(self.a, "gradients"), self.one.summed), self.many.held(self.b, "gradients")

    def gradients(self, before: tuple | None) -> None:
        a, b = self.unclipped()
        total = sum(vector.norm() ** 2 for vector in a.values()) ** 0.5
        groups = self.groups(a, b, self.noise, lambda name: self.noise * 1e-2 * total, self.many.summed)
        if groups and any(each["dropout"] for each in self.a + self.b):
            raise ValueError("gradients differ, and dropout draws other numbers on other ranks: record both with p = 0")
        absent = self.many.summed or any(how == "absent" for how, c in groups)
        ranks = {} if absent or not groups else self.by_rank([*a], "gradients", a)[0]
        own = [[*factors][0] for factors in ranks.values() if len(factors) == 1]
        if len(own) == self.many.world and len({*own} - {None}) > 1 and not any(c is None or self.fits(c)[1] for c in own):
            self.add("gradients", self.names, ", ".join(f"{c:.4g}" for c in own) + " times as large, by rank",
                     "does each rank clip by its own norm?")
            return
        rest, by_rest = [], ""
        for (how, c), names in groups.items():
            by, cause = self.words("gradients", how, c, names, a)
            if cause:
                self.add("gradients", names, by, cause)
            else:
                rest, by_rest = rest + names, by_rest or by
        if rest:
            self.add("gradients", rest, by_rest, "it may follow, further from the loss" if self.found else
                     self.mixed_up(rest, a, b) or self.mixture(a, b, before) or self.backward())
        one, many = (given(records, "norm") for records in (self.a, self.b))
        if not groups and one and many and max(abs(each / one[0] - 1) for each in many) > self.noise:
            by = f"{', '.join(f'{each:.5g}' for each in many)} by rank instead of {one[0]:.5g}"
            self.add("gradient norm, of gradients that are right", [], by,
                     "is what several ranks hold whole counted once for each of them?" if min(many) > one[0] else
                     "does each rank take the norm of its own gradients for that of all?")

    def mixed_up(self, names: list[str], a: dict, b: dict) -> str:
        """Whether the sum over parameters of one shape is right, where that of each is wrong."""
        shapes, whole = collections.defaultdict(list), self.many.whole(b, self.many.summed)
        for name in names:
            shapes[self.one.info[name]["shape"]].append(name)
        sums = [[sum(each[name] for name in group) for each in (whole, a)] for group in shapes.values()]
        is_right = all(factor(*pair, self.noise) == 1 and len(group) > 1 for pair, group in zip(sums, shapes.values()))
        return "they are mixed up with each other: do ranks send them in another order?" if is_right else ""

    def backward(self) -> str:
        """Where to look, of gradients that are wrong by no factor that means anything."""
        one, many = (given(records, "loss") for records in (self.a, self.b))
        if not one or not many:
            return "look at forward, then at backward: no loss was recorded"
        wanted, mean = (sum(each) / len(each) for each in (one, many))
        if min(abs(each - wanted) for each in (*many, mean)) <= self.noise * abs(wanted):
            return "the loss is right: look at backward, at its collectives"
        return (f"the loss is wrong already, {mean:.6g} instead of {wanted:.6g}: look at forward, at positions, masks "
                "and targets")

    def mixture(self, a: dict, b: dict, before: tuple | None) -> str:
        """What multiples of one process's micro-batches, and of its last step, the gradients are a sum of."""
        partial, theirs = self.a[0]["partial"], self.many.whole(b, self.many.summed)
        count = max(map(len, partial.values()), default=0)
        names = [name for name in partial if len(partial[name]) == count and name in a and name in theirs]
        if not names:
            return ""
        sums = torch.stack([torch.cat([partial[name][i] for name in names]) for i in range(count)])
        mine, other = (torch.cat([each[name] for name in names]) for each in (a, theirs))
        clipping = mine @ sums[-1] / (sums[-1] @ sums[-1])
        columns = torch.diff(sums, dim=0, prepend=torch.zeros_like(sums[:1])) * clipping
        if before:
            old = self.one.whole(self.one.held(before[0], "gradients"))
            columns = torch.cat([columns, torch.cat([old[name] for name in names])[None]])
        found = torch.linalg.lstsq(columns.T, other, driver="gelsd").solution
        if len(other) < 2 * len(found) or (columns.T @ found - other).norm() > self.noise * 10 * other.norm():
            return ""
        shares = found[:count].tolist()
        if before and abs(found[-1]) > 0.01:
            return f"{found[-1]:.3g} times the last step's gradient is in them: is zero_grad() left out?"
        if max(abs(share - 1) for share in shares) < 1e-3:
            return ""  # these parameters are right
        if idle := [i for i, share in enumerate(shares) if abs(share) < 1e-3]:
            return (f"the micro-batches {idle} of one process leave nothing: is a rank's summand lost, or zero_grad() "
                    "called in between?")
        if max(shares) - min(shares) < 1e-3:
            return "are they clipped by another norm, or divided by another count (of tokens, of samples)?"
        counts = ", ".join(f"{share:.3g}" for share in shares)
        return (f"the micro-batches of one process count {counts} times: is the mean over micro-batches or ranks taken "
                "where the mean over tokens is meant (padding)?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=pathlib.Path, help="the folder of the trusted recording")
    parser.add_argument("many", type=pathlib.Path, help="the folder of the other one")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args()
    try:
        one = Recording(args.one)
        compared = Comparison(one, Recording(args.many, one.aliases))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [each["line"] for each in compared.found] or [f"the same numbers in steps {compared.steps}"]
    print(json.dumps(compared.found, indent=1) if args.json else "\n".join(lines))
    return int(bool(compared.found))


if __name__ == "__main__":
    sys.exit(main())
