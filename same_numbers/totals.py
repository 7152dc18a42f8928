"""Of gradients that are right: the norm, the loss, and the settings with which the optimizer applies them."""

import itertools

from .causes import fits
from .frameworks import ordinary
from .pair import Finding, Step, given, unlike


def judge_norm(step: Step) -> list[Finding]:
    """A wrong one is explained by the parameters whose squares make it up."""
    one, many = (given(records, "norm") for records in (step.a, step.b))
    if not one or not many or max(abs(each / one[0] - 1) for each in many) <= step.noise.totals:
        return []
    numbers, wanted = unlike(many, one[0])
    cause = of_squares(step, one[0], many)
    if cause and "whole" in cause:
        cause += ": is what several ranks hold whole counted once for each of them?"
    ratios = {round(each / one[0], 4) for each in many}
    if not cause and len(ratios) == 1 and (fit := fits(step, ratios.pop()))[1]:
        cause = f"{fit[0]}: {fit[1]}"
    return [step.finding("gradient norm, of gradients that are right", [],
                         f"{', '.join(numbers)} by rank instead of {wanted}", cause or (
                             "is what several ranks hold whole counted once for each of them?" if min(many) > one[0]
                             else "does each rank take the norm of its own gradients for that of all?"))]


def of_squares(step: Step, one: float, many: list[float]) -> str:
    """Which parameters' squares fit a wrong norm, where they are left out or counted a number of times."""
    pair, limit = step.pair, step.noise.gradients
    squares = pair.one.squares(step.a)
    before = one**2 / sum(squares.values())  # clipping
    squares = {name: each * before for name, each in squares.items()}
    names = [*dict.fromkeys(map(ordinary, squares))]
    pairs = [(name,) for name in names] + [*itertools.combinations(names[:64], 2)] * (limit < 1e-6)
    kinds = {"what is of experts": [name for name in squares if "experts" in name],
             "what several ranks hold whole": [name for name, parts in pair.many.parts.items() if len(parts) == 1],
             "what is cut": [name for name, parts in pair.many.parts.items() if len(parts) > 1],
             **{f"what is of {' and '.join(both)}": [name for name in squares if ordinary(name) in both]
                for both in pairs}}
    causes = {}
    for words, names in kinds.items():
        part = sum(squares[name] for name in names) / one**2
        for n in {0, *pair.sizes.values()} - {1} if 1e-6 < part < 1 - 1e-6 else ():
            for times in {n, 1 / n if n else 0}:
                if max(abs((each / one) ** 2 - 1 - (times - 1) * part) for each in many) < 10 * limit:
                    causes.setdefault("left out" if not n else f"counted {times:.4g} times", words)
    return next((f"it fits where {words} is {how}" for how, words in causes.items()), "")


def judge_settings(step: Step) -> tuple[list[Finding], list[str]]:
    """The optimizer's: what they change in a step may be less than a coarse dtype shows. And the parameters whose
    settings are not known in both runs."""
    wrong, unknown = {}, []
    for name in step.pair.names:
        mine, theirs = settings(step.a, name)[0], settings(step.b, name)
        unknown += [name] * (not any(each.keys() & mine.keys() for each in theirs))
        for each in theirs:
            for key in each.keys() & mine.keys():
                x, y = mine[key], each[key]
                if len(x) == len(y) and any(abs(b - a) > 1e-6 * abs(a) for a, b in zip(x, y)):
                    wrong.setdefault((key, tuple(x), tuple(y)), {})[name] = None
    return [step.finding("the optimizer's settings, though gradients are right", [*names], *of_setting(step, *key))
            for key, names in wrong.items()], unknown


def of_setting(step: Step, key: str, mine: tuple, theirs: tuple) -> tuple[str, str]:
    """By what it differs, and why."""
    what = "the learning rate was" if key == "lr" else f"its {key} was"
    changed = [b / a for a, b in zip(mine, theirs) if a and b and abs(b - a) > 1e-6 * abs(a)]
    c = changed[0] if len(changed) == 1 else 1.0
    counts = [kind for kind, n in step.pair.sizes.items() if n > 1 and min(abs(c / n - 1), abs(c * n - 1)) < 1e-3]
    times = f", {unlike([c], 1.0, 4)[0][0]} times as large" * (c != 1)
    times += f" (the number of {' or of '.join(counts)})" * bool(counts)
    shown = [str([float(unlike([x], y, 6)[0][0]) for x, y in zip(*both)]) for both in ((theirs, mine), (mine, theirs))]
    return (f"{what} {', not '.join(shown)}{times}",
            "does each rank move the scheduler on?" if key == "lr" else "is it made in two places?")


def settings(records: list[dict], name: str) -> list[dict[str, list[float]]]:
    """Of the group of a parameter on each rank whose optimizer has it. Where none has it, because it has others
    instead, those that all of its groups agree on."""
    if found := [each["settings"][each["groups"][name]] for each in records if name in each["groups"]]:
        return found
    first, *others = [group for each in records for group in each["settings"]] or [{}]
    return [{key: value for key, value in first.items() if all(each.get(key) == value for each in others)}]


def judge_loss(step: Step) -> tuple[list[Finding], list[str]]:
    """Of all, or the mean of the ranks' own, or their sum. And what could not be judged."""
    one, many = (given(records, "loss") for records in (step.a, step.b))
    if not one or not many:
        return [], []
    wanted, limit = sum(one) / len(one), step.noise.totals * max(map(abs, one))
    holders = [{rank for ranks in parts.values() for rank in ranks} for parts in step.pair.many.parts.values()]
    last = [each for rank, each in enumerate(step.b) if each["loss"] is not None and (
        each["loss"] or all(rank in ranks for ranks in holders))]  # stages of a pipeline may say 0
    many, counts = given(last, "loss") or many, [len(each["samples"]) for each in last]
    weighted = sum(n * each for n, each in zip(counts, many)) / (sum(counts) or 1)
    are_unlike = max(many) - min(many) > limit and all(many)
    right = [sum(many) / len(many)] + [weighted, sum(many)] * are_unlike
    if any(abs(each - wanted) <= limit for each in right):
        return [], []
    if are_unlike and min(many) < wanted < max(many):
        return [], [f"not judged: the loss of step {step.number}: the ranks' own lie on both sides of it"]
    mean = right[0]
    by, cause = fits(step, mean / wanted) if wanted and mean else ("wrong", "")
    (shown,), instead = unlike([mean], wanted, 6)
    return [step.finding("loss, of gradients that are right", [], f"{shown} instead of {instead}, {by}",
                         cause or "is it what backward is called with, of all micro-batches and ranks?")], []
