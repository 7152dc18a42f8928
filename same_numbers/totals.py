"""What is no tensor of a parameter: NaN, samples and, of gradients that are right, norm, settings and loss."""

import collections
import itertools

import torch

from .causes import fits, unread
from .frameworks import ordinary
from .pair import Finding, Step, given, unlike


def broken(step: Step, kind: str) -> list[Finding]:
    """NaN and infinity. Raises ValueError where both recordings have them in the same places only."""
    found, findings = [collections.defaultdict(list), collections.defaultdict(list)], []
    keys = ("loss", "norm") if kind == "gradients" else ()
    for bad, records in zip(found, (step.a, step.b)):
        for rank, record in enumerate(records):
            numbers = {f"the {key}": torch.tensor(record[key] or 0.0, dtype=torch.float64) for key in keys}
            for name, vector in {**record[kind], **numbers}.items():
                if vector is not None and not vector.isfinite().all():
                    bad[name].append(rank)
    for mine, other, run in ((found[1], found[0], step.pair.many), (found[0], found[1], step.pair.one)):
        if names := [name for name in mine if name not in other]:
            ranks = sorted({rank for name in names for rank in mine[name]})
            findings.append(step.finding(f"NaN or infinity in {run.folder}, {kind}",
                {name: float("inf") for name in names if not name.startswith("the ")},
                f"{', '.join(names[:4])}{' ...' * (len(names) > 4)} on ranks {ranks}",
                "a division by zero, an overflow (float16?), or memory that nobody has written?"))
    if (both := [name for name in found[0] if name in found[1]]) and not findings:
        raise ValueError(
            f"step {step.number}: {len(both)} {kind}, such as {both[0]}, have NaN or infinity in both recordings, on "
            f"ranks {found[0][both[0]]} and {found[1][both[0]]}: nothing to compare")
    return findings


def judge_samples(step: Step) -> list[Finding]:
    one, ranks = step.pair.one, [{*each["samples"]} for each in step.b]
    wanted, read = {sample for each in step.a for sample in each["samples"]}, set().union(*ranks)
    missing, strange = wanted - read, read - wanted
    if not_judged(step) or not missing and not strange:
        return []
    twins = [f"rank {j} reads rank {i}'s" for j, own in enumerate(ranks) for i in range(j) if own and own == ranks[i]]
    seen = {number: {*sum((each["samples"] for each in one.load(number)), [])} for number in one.steps}
    steps = [number for number in one.steps if strange and strange <= seen[number]]
    earlier = [number for number in one.steps if number < step.number and strange & seen[number]]
    again = strange and strange <= set().union(*(seen[number] for number in earlier))
    return [step.finding(
        "samples", [], f"{len(missing)} of {len(wanted)} are read by nobody, and {len(strange)} others are",
        f"{'; '.join(twins)}: does the loader ask for its rank?" if twins and not strange else
        f"they are those of step{'s' * (len(earlier) > 1)} {', '.join(map(str, earlier))}, read again: is an epoch's "
        "last batch padded by its first samples (accelerate's even_batches, DistributedSampler)?"
        if again and read & wanted else
        f"they are those of step {steps[0]}: does a resumed run begin its data anew?" if steps else
        "another order, another seed of the shuffle, or other data?")]


def not_judged(step: Step) -> str:
    """Why samples can't be compared, "" where they can."""
    if lacking := unread(step):
        return f"samples were not recorded in {lacking}: step(batch=...) records them"
    one, many = ({each.partition(":")[0] for record in records for each in record["samples"]}
                 for records in (step.a, step.b))
    return "not judged: samples, which have other lengths in the other run: parts, or other padding" * (one != many)


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
    cause = cause or ("is what several ranks hold whole counted once for each of them?" if min(many) > one[0] else
                      "does each rank take the norm of its own gradients for that of all?")
    by = f"{', '.join(numbers)} by rank instead of {wanted}"
    return [step.finding("gradient norm, of gradients that are right", [], by, cause)]


def of_squares(step: Step, one: float, many: list[float]) -> str:
    """Which parameters' squares fit a wrong norm, where they are left out or counted a number of times."""
    pair = step.pair
    squares = pair.one.squares(step.a)
    before = one**2 / sum(squares.values())  # clipping
    squares = {name: each * before for name, each in squares.items()}
    names = [*dict.fromkeys(map(ordinary, squares))]
    pairs = [(name,) for name in names] + [*itertools.combinations(names[:64], 2)] * (step.noise.gradients < 1e-6)
    kinds = {"what is of experts": [name for name in squares if "experts" in name],
             "what several ranks hold whole": [name for name, parts in pair.many.parts.items() if len(parts) == 1],
             "what is cut": [name for name, parts in pair.many.parts.items() if len(parts) > 1],
             **{f"what is of {' and '.join(both)}": [name for name in squares if ordinary(name) in both]
                for both in pairs}}
    causes = {}
    for words, names in kinds.items():
        part = sum(squares[name] for name in names) / one**2
        limit = 10 * (step.noise.gradients if " and " in words else step.noise.totals)  # there are many pairs
        for n in {0, *pair.sizes.values()} - {1} if 1e-6 < part < 1 - 1e-6 else ():
            for times in {n, 1 / n if n else 0}:
                if max(abs((each / one) ** 2 - 1 - (times - 1) * part) for each in many) < limit:
                    causes.setdefault("left out" if not n else f"counted {times:.4g} times", words)
    return next((f"it fits where {words} is {how}" for how, words in causes.items()), "")


def judge_settings(step: Step) -> tuple[list[Finding], list[str]]:
    """What they change may be less than a coarse dtype shows. And the parameters of which none is known."""
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
    what = "the learning rate was" if key == "lr" else f"its {key} was"
    changed = [b / a for a, b in zip(mine, theirs) if a and b and abs(b - a) > 1e-6 * abs(a)]
    c = changed[0] if len(changed) == 1 else 1.0
    times = f", {unlike([c], 1.0, 4)[0][0]} times as large" * (c != 1)
    counts = [kind for kind, n in step.pair.sizes.items() if n > 1 and abs(c / n - 1) < 1e-3 and key == "lr"]
    times += f" (the number of {' or of '.join(counts)})" * bool(counts)
    shown = [str([float(unlike([x], y, 6)[0][0]) for x, y in zip(*both)]) for both in ((theirs, mine), (mine, theirs))]
    return (f"{what} {', not '.join(shown)}{times}",
            "does each rank move the scheduler on?" if key == "lr" else "is it made in two places?")


def settings(records: list[dict], name: str) -> list[dict[str, list[float]]]:
    """Of a parameter's group, on each rank whose optimizer has it. Where none has, those that all groups agree on."""
    if found := [each["settings"][each["groups"][name]] for each in records if name in each["groups"]]:
        return found
    first, *others = [group for each in records for group in each["settings"]] or [{}]
    return [{key: value for key, value in first.items() if all(each.get(key) == value for each in others)}]


def judge_loss(step: Step) -> tuple[list[Finding], str]:
    """Of all, or the mean of the ranks' own, or their sum. And why it was not judged."""
    one, many = (given(records, "loss") for records in (step.a, step.b))
    if not one or not many:
        return [], ""
    wanted, limit = sum(one) / len(one), step.noise.of_loss(max(map(abs, one)))
    holders = [{rank for ranks in parts.values() for rank in ranks} for parts in step.pair.many.parts.values()]
    last = [each for rank, each in enumerate(step.b) if each["loss"] is not None and (
        each["loss"] or all(rank in ranks for ranks in holders))]  # stages of a pipeline may say 0
    many, counts = given(last, "loss") or many, [len(each["samples"]) for each in last]
    weighted = sum(n * each for n, each in zip(counts, many)) / (sum(counts) or 1)
    are_unlike = max(many) - min(many) > limit and all(many)
    right = [sum(many) / len(many)] + [weighted, sum(many)] * are_unlike
    if any(abs(each - wanted) <= limit for each in right):
        return [], ""
    if are_unlike and min(many) < wanted < max(many):
        return [], f"not judged: the loss of step {step.number}: the ranks' own lie on both sides of it"
    mean = right[0]
    by, cause = fits(step, mean / wanted) if wanted and mean else ("wrong", "")
    (shown,), instead = unlike([mean], wanted, 6)
    return [step.finding("loss, of gradients that are right", [], f"{shown} instead of {instead}, {by}",
                         cause or "is it what backward is called with, of all micro-batches and ranks?")], ""
