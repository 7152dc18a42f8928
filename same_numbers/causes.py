"""What a difference usually comes from: by its factor, its ranks, its parameters, and what else was recorded."""

import collections
import math

import torch

from .frameworks import ordinary
from .places import where
from .sketches import factor, section

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


def given(records: list[dict], key: str) -> list[float]:
    """The losses or norms of the ranks that have one."""
    return [each[key] for each in records if each[key] is not None]


class Causes:
    """Reads what a Comparison holds: recordings `one` and `many`, records `a` and `b` of a `step`, `sizes`."""

    def which(self, names: list[str]) -> str:
        """Which parameters these are, in a few words."""
        others = {*self.names} - {*names}
        if not others:
            return f"all {len(names)} parameters"
        here, there = ({rank for name in each for ranks in self.many.parts[name].values() for rank in ranks}
                       for each in (names, others))
        if here.isdisjoint(there):
            return f"all {len(names)} parameters of ranks {sorted(here)}"
        kinds, right = (dict.fromkeys(map(ordinary, each)) for each in (names, others))
        if len(kinds) <= 4 and not kinds.keys() & right.keys():
            return ", ".join(kinds)
        return f"{len(names)} of {len(self.names)} parameters, {names[0]} to {names[-1]}"

    def is_alone(self) -> bool:
        """Whether a pipeline's stages share nothing."""
        return max(self.sizes["replicas"], self.sizes["shards"]) == 1

    def fits(self, c: float) -> tuple[str, str]:
        """A factor in words, and what it usually is where it is a number of micro-batches or ranks, the likelier first:
        a loss that is as much too large was not divided, one that is right was."""
        if abs(c + 1) < 2e-3:
            return "of the wrong sign", "is something subtracted, or a loss negated?"
        how, ratio = ("large", abs(c)) if abs(c) > 1 else ("small", 1 / abs(c))
        fits = [kind for kind, n in self.sizes.items() if n > 1 and abs(ratio / n - 1) < 2e-3]
        one, many = (given(records, "loss") for records in (self.a, self.b))
        is_right = one and many and abs(sum(many) / len(many) - one[0]) < 1e-3 * abs(one[0])
        is_right = is_right and not self.is_alone()  # else nothing is added up
        order = sorted(fits, key=lambda kind: (kind == "micro-batches") is bool(is_right))
        causes = dict.fromkeys(CAUSES["ranks" if kind != "micro-batches" else kind, how] for kind in order)
        words = f"{ratio:.5g} times too {how}" + f" = the number of {' or of '.join(order)}" * bool(fits)
        return words + ", and of the wrong sign" * (c < 0), " Or: ".join(causes)

    def broken(self, kind: str) -> None:
        """NaN and infinity. Raises ValueError where both recordings have them in the same places."""
        found = [collections.defaultdict(list), collections.defaultdict(list)]
        for bad, records in zip(found, (self.a, self.b)):
            for rank, record in enumerate(records):
                for name, vector in record[kind].items():
                    if vector is not None and not vector.isfinite().all():
                        bad[name].append(rank)
                for key in ("loss", "norm") if kind == "gradients" else ():
                    if record[key] is not None and not -float("inf") < record[key] < float("inf"):
                        bad[f"the {key}"].append(rank)
        for mine, other, run in ((found[1], found[0], self.many), (found[0], found[1], self.one)):
            if names := [name for name in mine if name not in other]:
                ranks = sorted({rank for name in names for rank in mine[name]})
                of_params = [name for name in names if not name.startswith("the ")]
                self.add(f"NaN or infinity in {run.folder}, {kind}", dict.fromkeys(of_params, float("inf")),
                         f"{', '.join(names[:4])}{' ...' * (len(names) > 4)} on ranks {ranks}",
                         "a division by zero, an overflow (float16?), or memory that nobody has written?")
        if both := [name for name in found[0] if name in found[1]]:
            if not self.found:
                raise ValueError(
                    f"step {self.step}: {len(both)} {kind}, such as {both[0]}, have NaN or infinity in both "
                    f"recordings, on ranks {found[0][both[0]]} and {found[1][both[0]]}: nothing to compare")

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

    def of_start(self, how: str) -> str:
        return CAUSES["start", how if how == "unlike" else "other"]

    def of_update(self, how: str, c: float | None, names: dict, before: tuple) -> tuple:
        """The arguments of add() for what a step has changed."""
        lost = [name for name in names if self.one.owners[name] and not self.many.owners[name] and not self.many.summed]
        partly = [name for name in names if how == "unlike" and 0 < len(self.many.owners[name]) < len(
            {rank for ranks in self.many.parts[name].values() for rank in ranks})]
        rates = [sorted({rate for each in records for rate in each["rates"]}) for records in before]
        by = f"{c:.4g} times as far as they should" if how == "factor" else (
            "unlike on ranks that should hold the same" if how == "unlike" else "not as they should")
        cause = CAUSES.get(("update", how), "")
        if lost:
            cause = f"the optimizer does not hold {len(lost)} of them: was it made before they were replaced?"
        elif partly:
            cause = "some ranks update them, the others do not: are they never sent (broadcast) to these?"
        elif how == "factor" and c < 0:
            cause = "of the wrong sign: is something subtracted that should be added (an outer step)?"
        elif rates[0] != rates[1]:
            cause = f"the learning rate was {rates[1]}, not {rates[0]}: does each rank move the scheduler on?"
        elif self.step == 2 and how == "other" and all(len(self.one.info[name]["shape"]) > 1 for name in names) and (
                any(len(self.one.info[name]["shape"]) < 2 for name in self.names)):
            cause = "these are matrices only: does an optimizer that needs whole matrices (Muon) get shards of them?"
        return (f"what step {self.step - 1} changed in the weights, though its gradients were right", names, by, cause)

    def words(self, kind: str, how: str, c: float | None, names: list[str], a: dict) -> tuple[str, str]:
        """By what, and what it usually is."""
        if how == "factor":
            return self.fits(c)
        if how == "absent":
            return "ranks have none" if names[0] in a else "they are not in the other run", CAUSES.get((kind, how), "")
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
                c = factor(mine, sections[bounds], self.noise())
                found[rank].add(c)
                taken |= {f"rank {rank} holds the part of rank {parts[other][0]}" for other, theirs in sections.items()
                          if c is None and len(theirs) == len(mine) and factor(mine, theirs, self.noise()) == 1}
        return found, taken

    def random_numbers(self) -> None:
        """Raises ValueError where layers have drawn others than in the trusted run."""
        known, drawn = (set().union(*(each["random"] for each in records)) for records in (self.a, self.b))
        if drawn - known or not drawn and any(each["dropout"] for each in self.b):
            raise ValueError("gradients differ, and dropout or other random numbers in forward are drawn unlike on "
                             "other ranks: record both with p = 0, or from the same seed for each sample")

    def explain(self, groups: dict, a: dict, b: dict, before: tuple | None) -> None:
        """Adds a finding for each way in which gradients are wrong, what has a cause of its own first."""
        if any(c is None for _, c in groups):
            self.random_numbers()
        absent = self.many.summed or any(how == "absent" for how, c in groups)
        ranks = {} if absent else self.by_rank([*a], "gradients", a)[0]
        own = [[*factors][0] for factors in ranks.values() if len(factors) == 1]
        by_own = len(own) == self.many.world and len({*own}) > 1
        if by_own and not any(c is None or self.fits(c)[1] for c in own):
            by = ", ".join(f"{c:.4g}" for c in own) + " times as large, by rank"
            self.add("gradients", {name: max(abs(c - 1) for c in own) for name in self.names}, by,
                     "does each rank clip by its own norm?")
            return
        left, by_rest = {}, ""
        for (how, c), names in groups.items():
            by, cause = self.words("gradients", how, c, [*names], a)
            if cause:
                self.add("gradients", names, by, cause)
            else:
                left, by_rest = left | names, by_rest or by
        if left:
            self.add("gradients", left, by_rest, self.of_tie([*left]) or (
                     "it may follow, further from the loss" if self.found else
                     self.mixed_up([*left], a, b) or self.of_parts([*left]) or self.mixture(a, b, before)
                     or self.of_model() or self.backward()))

    def of_tie(self, names: list[str]) -> str:
        lost = [name for name in names if name in self.many.untied]
        return f"{lost[0]} is tied in one run, and two parameters in the other: tie them after wrapping" if lost else ""

    def of_model(self) -> str:
        """What the recording knows of ranks and layers."""
        if self.many.world > 1 and any(each["batchnorm"] for each in self.b):
            return ("BatchNorm: each rank normalises by its own samples: use SyncBatchNorm, or micro-batches as the "
                    "trusted run has them")
        counts = [len(each["samples"]) for each in self.b]
        if len({*counts} - {0}) > 1:
            return (f"ranks read {', '.join(map(str, counts))} samples: is the mean over ranks taken where the mean "
                    "over samples is meant?")
        return ""

    def mixed_up(self, names: list[str], a: dict, b: dict) -> str:
        """Whether the sum over parameters of one shape is right, where that of each is wrong."""
        shapes, whole = collections.defaultdict(list), self.many.whole(b, self.many.summed)
        for name in names:
            shapes[self.one.info[name]["shape"]].append(name)
        sums = [[sum(each[name] for name in group) for each in (whole, a)] for group in shapes.values()]
        is_right = all(len(group) > 1 and factor(*pair, self.noise()) == 1
                       for pair, group in zip(sums, shapes.values()))
        return "they are mixed up with each other: do ranks send them in another order?" if is_right else ""

    def of_parts(self, names: list[str]) -> str:
        """Whether ranks have one gradient for parts that are not the same."""
        for name in names:
            sections = [section(self.b[ranks[0]]["gradients"][name], self.one.info[name]["shape"], bounds)
                        for bounds, ranks in self.many.parts[name].items()
                        if self.b[ranks[0]]["gradients"][name] is not None]
            if len(sections) < 2 or len({*map(len, sections)}) > 1 or not sections[0].any() or any(
                    factor(each, sections[0], self.limit) != 1 for each in sections):
                return ""
        return ("ranks that hold other parts have the same gradients: are these averaged over the wrong group, with "
                "those of other experts?")

    def backward(self) -> str:
        """Where to look, of gradients that are wrong by no factor that means anything."""
        one, many = (given(records, "loss") for records in (self.a, self.b))
        wanted, mean = (sum(each) / len(each) if each else None for each in (one, many))
        is_right = None if not one or not many else (
            min(abs(each - wanted) for each in (*many, mean)) <= self.noise() * abs(wanted))
        loss = ("no loss was recorded: " if is_right is None else "the loss is right: " if is_right else
                f"the loss is wrong already, {mean:.6g} instead of {wanted:.6g}: ")
        for kind, n in self.sizes.items() if is_right is False else ():
            if n > 1 and abs(mean - wanted - math.log(n)) <= self.noise() * abs(wanted):
                return (f"{loss}by log {n}, of the number of {kind}: does a loss that is divided over the vocabulary "
                        "get whole logits?")
        hint = "" if any(each["outputs"] for each in self.a) else ' (Recorder(modules="blocks") says where)'
        return loss + (where(self.a, self.b, self.limit, is_right, self.is_alone()) or (
            "look at backward, at its collectives" if is_right else
            "look at forward, at positions, masks and targets") + hint)

    def mixture(self, a: dict, b: dict, before: tuple | None) -> str:
        """What multiples of one process's micro-batches, and of its last step, the gradients are a sum of."""
        partial, theirs = self.a[0]["partial"], self.many.whole(b, self.many.summed)
        count = max(map(len, partial.values()), default=0)
        names = [name for name in partial if len(partial[name]) == count and name in a and name in theirs]
        if not names or any(each is None for name in names for each in partial[name]):
            return ""
        sums = torch.stack([torch.cat([partial[name][i] for name in names]) for i in range(count)])
        mine, other = (torch.cat([each[name] for name in names]) for each in (a, theirs))
        clipping = mine @ sums[-1] / (sums[-1] @ sums[-1])
        columns = torch.diff(sums, dim=0, prepend=torch.zeros_like(sums[:1])) * clipping
        if before:
            old = self.one.whole(self.one.held(before[0], "gradients"))
            columns = torch.cat([columns, torch.cat([old[name] for name in names])[None]])
        if not columns.isfinite().all() or len(other) < 2 * len(columns):
            return ""
        found = torch.linalg.lstsq(columns.T, other, driver="gelsd").solution
        if (columns.T @ found - other).norm() > self.noise() * 10 * other.norm():
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
        return (f"the micro-batches of one process count {counts} times: " + (self.of_model() or "is the mean over "
                "micro-batches or ranks taken where the mean over tokens is meant (padding)?"))
