"""Of gradients that are right: the norm, the loss, and the settings with which the optimizer applies them."""

import itertools

from .causes import Causes, given
from .frameworks import ordinary


class Totals(Causes):
    """What is one number a rank, or a few a group. Reads what a Comparison holds."""

    def judge_norm(self, a: dict) -> None:
        """Of gradients that are right. A wrong one is explained by the parameters whose squares make it up."""
        one, many = (given(records, "norm") for records in (self.a, self.b))
        if not one or not many or max(abs(each / one[0] - 1) for each in many) <= self.limit:
            return
        squares = self.one.squares(self.a)
        before = one[0] ** 2 / sum(squares.values())  # clipping
        squares = {name: each * before for name, each in squares.items()}
        names = [*dict.fromkeys(map(ordinary, squares))]
        pairs = [(name,) for name in names] + [*itertools.combinations(names[:64], 2)] * (self.limit < 1e-6)
        kinds = {"what is of experts": [name for name in squares if "experts" in name],
                 "what several ranks hold whole": [name for name, parts in self.many.parts.items() if len(parts) == 1],
                 "what is cut": [name for name, parts in self.many.parts.items() if len(parts) > 1],
                 **{f"what is of {' and '.join(pair)}": [name for name in squares if ordinary(name) in pair]
                    for pair in pairs}}
        causes = {}
        for words, names in kinds.items():
            part = sum(squares[name] for name in names) / one[0] ** 2
            for n in {0, *self.sizes.values()} - {1} if 1e-6 < part < 1 - 1e-6 else ():
                for times in {n, 1 / n if n else 0}:
                    if max(abs((each / one[0]) ** 2 - 1 - (times - 1) * part) for each in many) < 10 * self.limit:
                        causes.setdefault("left out" if not n else f"counted {times:.4g} times", words)
        by = f"{', '.join(f'{each:.5g}' for each in many)} by rank instead of {one[0]:.5g}"
        cause = next((f"it fits where {words} is {how}" for how, words in causes.items()), "")
        if cause and "whole" in cause:
            cause += ": is what several ranks hold whole counted once for each of them?"
        ratios = {round(each / one[0], 4) for each in many}
        if not cause and len(ratios) == 1 and (fit := self.fits(ratios.pop()))[1]:
            cause = f"{fit[0]}: {fit[1]}"
        self.add("gradient norm, of gradients that are right", [], by, cause or (
                 "is what several ranks hold whole counted once for each of them?" if min(many) > one[0] else
                 "does each rank take the norm of its own gradients for that of all?"))

    def judge_settings(self) -> None:
        """The optimizer's: what they change in a step may be less than a coarse dtype shows."""
        wrong = {}
        for record in self.b:
            for name in self.names:
                mine, theirs = (self.settings(each, name) for each in (self.a[0], record))
                for key in mine.keys() & theirs.keys():
                    if any(abs(x - y) > 1e-6 * abs(x) for x, y in zip(mine[key], theirs[key])):
                        wrong.setdefault((key, str(mine[key]), str(theirs[key])), {})[name] = None
        for (key, mine, theirs), names in wrong.items():
            what = "the learning rate was" if key == "lr" else f"its {key} was"
            self.add("the optimizer's settings, though gradients are right", [*names], f"{what} {theirs}, not {mine}",
                     "does each rank move the scheduler on?" if key == "lr" else "is it made in two places?")

    @staticmethod
    def settings(record: dict, name: str) -> dict:
        """Of the group of a parameter or, where the optimizer has others, those that all groups agree on."""
        groups = record["settings"]
        if name in record["groups"]:
            return groups[record["groups"][name]]
        return {key: value for key, value in groups[0].items() if all(each.get(key) == value for each in groups)} \
            if groups else {}

    def numbers(self) -> None:
        """The loss, of gradients that are right: of all, or the mean of the ranks' own, or their sum."""
        one, many = (given(records, "loss") for records in (self.a, self.b))
        if not one or not many:
            return
        wanted, limit = sum(one) / len(one), max(self.limit, 1e-6) * max(map(abs, one))
        holders = [{rank for ranks in parts.values() for rank in ranks} for parts in self.many.parts.values()]
        last = [each for rank, each in enumerate(self.b) if each["loss"] is not None and (
            each["loss"] or all(rank in ranks for ranks in holders))]  # stages of a pipeline may say 0
        many, counts = given(last, "loss") or many, [len(each["samples"]) for each in last]
        weighted = sum(n * each for n, each in zip(counts, many)) / (sum(counts) or 1)
        unlike = max(many) - min(many) > limit and all(many)
        right = [sum(many) / len(many)] + [weighted, sum(many)] * unlike
        if any(abs(each - wanted) <= limit for each in right):
            return
        if unlike and min(many) < wanted < max(many):
            self.notes.append(f"not judged: the loss of step {self.step}: the ranks' own lie on both sides of it")
            return
        mean = right[0]
        by, cause = self.fits(float(f"{mean / wanted:.4g}")) if wanted and mean else ("wrong", "")
        self.add("loss, of gradients that are right", [], f"{mean:.6g} instead of {wanted:.6g}, {by}",
                 cause or "is it what backward is called with, of all micro-batches and ranks?")
