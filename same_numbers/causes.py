"""What a difference usually comes from: functions over differences of a step, each of which names a cause, or "".

Whatever rounding is forgiven in gradients is forgiven in what these functions try: noise.totals, of the step.
"""

import collections
import math

import torch

from .differences import Absent, Difference, Other, Scaled, Unlike
from .pair import Finding, Step, given, unlike
from .places import where
from .sketches import factor, section

CAUSES = {  # what is counted, and which way it is wrong -> what it usually is
    ("micro-batches", "large"): "is the loss divided by their number before backward?",
    ("micro-batches", "small"): "is the loss divided by their number twice, or only the last one kept?",
    ("ranks", "large"): "a sum over ranks where the mean is meant, or one sum too many?",
    ("ranks", "small"): "divided by ranks twice, or a mean where ranks hold summands?",
}
OF_TOKENS = "is the mean over micro-batches or ranks taken where the mean over tokens is meant (padding)?"
OF_MOMENTS = "the optimizer's moments (lost in a resume?), weight decay, or unlike steps?"
UNLIKE = "unlike on ranks that should hold the same"


def fits(step: Step, c: float) -> tuple[str, str]:
    """A factor in words, and what it usually is where it is a number of micro-batches or ranks, the likelier first:
    a loss that is as much too large was not divided, one that is right was."""
    if abs(c + 1) < 2e-3:
        return "of the wrong sign", "is something subtracted, or a loss negated?"
    how, ratio = ("large", abs(c)) if abs(c) > 1 else ("small", 1 / abs(c))
    kinds = [kind for kind, n in step.pair.sizes.items() if n > 1 and abs(ratio / n - 1) < 2e-3]
    one, many = (given(records, "loss") for records in (step.a, step.b))
    is_right = one and many and abs(sum(many) / len(many) - one[0]) < 1e-3 * abs(one[0])
    is_right = is_right and not step.pair.is_alone  # else nothing is added up
    order = sorted(kinds, key=lambda kind: (kind == "micro-batches") is bool(is_right))
    causes = dict.fromkeys(CAUSES["ranks" if kind != "micro-batches" else kind, how] for kind in order)
    words = f"{unlike([ratio], 1.0)[0][0]} times too {how}" + f" = the number of {' or of '.join(order)}" * bool(kinds)
    return words + ", and of the wrong sign" * (c < 0), " Or: ".join(causes)


def of_difference(step: Step, kind: str, found: Difference, a: dict) -> tuple[str, str]:
    """By what the "gradients" or "weights" are wrong, and what it usually is."""
    pair, names = step.pair, [*found.sizes]
    if isinstance(found, Scaled):
        return fits(step, found.factor)
    if isinstance(found, Absent):
        why = "does the graph reach them on every rank, is something frozen or detached?" * (kind == "gradients")
        return "ranks have none" if names[0] in a else "they are not in the other run", why
    if isinstance(found, Unlike):
        counts = {max(len(ranks) for name in names for ranks in pair.many.parts[name].values()), pair.sizes["shards"]}
        if found.factor == 1:
            return (f"{UNLIKE}, whose mean is right",
                    "are some summands never averaged over ranks (no_sync, a hook that is left out)?")
        if found.factor and any(abs(found.factor * n - 1) < 2e-3 for n in counts - {1}):
            return (f"{UNLIKE}, whose sum is right", "a tied weight: are its two gradients summed between first and "
                    "last stage?" if {*names} <= {*pair.one.aliases.values()} else
                    "each rank sees a part (of the sequence, of the heads): is the sum over tp ranks left out?")
        return UNLIKE, ""
    by_rank, taken = factors_by_rank(step, names, kind, a)
    wrong = [rank for rank, factors in by_rank.items() if factors != {1.0}]
    only = f", on ranks {wrong} only" if 0 < len(wrong) < len(by_rank) else ""
    return f"wrong{only}, by no common factor", "; ".join(sorted(taken))


def factors_by_rank(step: Step, names: list[str], kind: str, a: dict) -> tuple[dict[int, set], set[str]]:
    """rank -> the factors by which what it holds is wrong; and which ranks hold the part of another one."""
    pair, noise = step.pair, step.noise.totals
    found, taken = collections.defaultdict(set), set()
    for name, bounds, ranks in [(name, *part) for name in names for part in pair.many.parts[name].items()]:
        shape, parts = pair.one.info[name]["shape"], pair.many.parts[name]
        sections = {each: section(a[name], shape, each) for each in parts}
        for rank in [each for each in ranks if step.b[each][kind][name] is not None]:
            mine = section(step.b[rank][kind][name], shape, bounds)
            if not len(mine) or not sections[bounds].any():
                continue
            c = factor(mine, sections[bounds], noise)
            found[rank].add(c)
            taken |= {f"rank {rank} holds the part of rank {parts[other][0]}" for other, theirs in sections.items()
                      if c is None and len(theirs) == len(mine) and factor(mine, theirs, noise) == 1}
    return found, taken


def random_numbers(step: Step) -> None:
    """Raises ValueError where layers have drawn others than in the trusted run."""
    known, drawn = (set().union(*(each["random"] for each in records)) for records in (step.a, step.b))
    if drawn - known or not drawn and any(each["dropout"] for each in step.b):
        raise ValueError("gradients differ, and dropout or other random numbers in forward are drawn unlike on "
                         "other ranks: record both with p = 0, or from the same seed for each sample")


def explain(step: Step, before: Step | None, found: list[Difference], a: dict) -> list[Finding]:
    """A finding for each way in which gradients are wrong, what has a cause of its own first."""
    if any(isinstance(each, Other) or isinstance(each, Unlike) and not each.factor for each in found):
        random_numbers(step)
    absent = step.pair.many.summed or any(isinstance(each, Absent) for each in found)
    by_rank = {} if absent else factors_by_rank(step, [*a], "gradients", a)[0]
    own = [[*each][0] for each in by_rank.values() if len(each) == 1]
    if len(own) == step.pair.many.world and len({*own}) > 1 and not any(c is None or fits(step, c)[1] for c in own):
        by = f"{', '.join(unlike(own, 1.0, 4)[0])} times as large, by rank"
        return [step.finding("gradients", dict.fromkeys(step.pair.names, max(abs(c - 1) for c in own)), by,
                             "does each rank clip by its own norm?")]
    findings, left, by_left = [], {}, ""
    for each in found:
        by, cause = of_difference(step, "gradients", each, a)
        if cause:
            findings.append(step.finding("gradients", each.sizes, by, cause))
        else:
            left, by_left = left | each.sizes, by_left or by
    if left:
        names, lost = [*left], [name for name in left if name in step.pair.many.untied]
        findings.append(step.finding("gradients", left, by_left, (
            f"{lost[0]} is tied in one run, and two parameters in the other: tie them after wrapping" if lost else
            "it may follow, further from the loss" if findings else
            mixed_up(step, names, a) or of_parts(step, names) or of_samples(step) or of_mixture(step, before, names, a)
            or of_model(step) or of_backward(step))))
    return findings


def unread(step: Step) -> str:
    """The folders that have no samples."""
    runs = ((step.pair.one, step.a), (step.pair.many, step.b))
    return " and ".join(f"{run.folder}" for run, records in runs if not any(each["samples"] for each in records))


def of_model(step: Step) -> str:
    """What the recording knows of ranks and layers."""
    if step.pair.many.world > 1 and any(each["batchnorm"] for each in step.b):
        return ("BatchNorm: each rank normalises by its own samples: use SyncBatchNorm, or micro-batches as the "
                "trusted run has them")
    counts = [len(each["samples"]) for each in step.b]
    if len({*counts} - {0}) > 1:
        return (f"ranks read {', '.join(map(str, counts))} samples: is the mean over ranks taken where the mean "
                "over samples is meant?")
    return ""


def of_samples(step: Step) -> str:
    """Whether some samples are read more often than others."""
    mine, theirs = (collections.Counter(sample for each in records for sample in each["samples"])
                    for records in (step.a, step.b))
    ratios = [theirs[sample] / count for sample, count in mine.items()]
    if mine.keys() != theirs.keys() or not ratios or min(ratios) == max(ratios) or step.pair.is_alone:
        return ""
    often = sum(each > min(ratios) for each in ratios)
    return (f"{often} of {len(ratios)} samples are read more often than the others: is the last batch padded by some "
            "of its own (accelerate's even_batches, DistributedSampler)?")


def mixed_up(step: Step, names: list[str], a: dict) -> str:
    """Whether the sum over parameters of one shape is right, where that of each is wrong."""
    shapes, whole = collections.defaultdict(list), step.whole("gradients")
    for name in names:
        shapes[step.pair.one.info[name]["shape"]].append(name)
    sums = [[sum(each[name] for name in group) for each in (whole, a)] for group in shapes.values()]
    is_right = all(len(group) > 1 and factor(*both, step.noise.totals) == 1
                   for both, group in zip(sums, shapes.values()))
    return "they are mixed up with each other: do ranks send them in another order?" if is_right else ""


def of_parts(step: Step, names: list[str]) -> str:
    """Whether ranks have one gradient for parts that are not the same."""
    for name in names:
        held = {bounds: step.b[ranks[0]]["gradients"][name] for bounds, ranks in step.pair.many.parts[name].items()}
        sections = [section(each, step.pair.one.info[name]["shape"], bounds) for bounds, each in held.items()
                    if each is not None]
        if len(sections) < 2 or len({*map(len, sections)}) > 1 or not sections[0].any() or any(
                factor(each, sections[0], step.noise.totals) != 1 for each in sections):
            return ""
    return ("ranks that hold other parts have the same gradients: are these averaged over the wrong group, with "
            "those of other experts?")


def of_backward(step: Step) -> str:
    """Where to look, of gradients that are wrong by no factor that means anything."""
    one, many = (given(records, "loss") for records in (step.a, step.b))
    wanted, mean = (sum(each) / len(each) if each else None for each in (one, many))
    is_right, loss, limit = None, "no loss was recorded: ", step.noise.of_loss(wanted or 0)
    if one and many:
        is_right = min(abs(each - wanted) for each in (*many, mean)) <= limit
        (shown,), right = unlike([mean], wanted, 6)
        loss = "the loss is right: " if is_right else f"the loss is wrong already, {shown} instead of {right}: "
    for kind, n in step.pair.sizes.items() if is_right is False else ():
        if n > 1 and abs(mean - wanted - math.log(n)) <= limit:
            return (f"{loss}by log {n}, of the number of {kind}: does a loss that is divided over the vocabulary "
                    "get whole logits?")
    if (unknown := unread(step)) and not is_right:
        loss += f"samples were not recorded in {unknown} (step(batch=...) does it): are they the same? "
    look = "look at backward, at its collectives" if is_right else "look at forward, at positions, masks and targets"
    hint = "" if any(each["outputs"] for each in step.a) else ' (Recorder(modules="blocks") says where)'
    return loss + (where(step.a, step.b, step.noise.totals, is_right, step.pair.is_alone)
                   or look * (is_right or not unknown) + hint)


def of_mixture(step: Step, before: Step | None, names: list[str], a: dict) -> str:
    """What multiples of one process's micro-batches, and of its last step, the gradients of these are a sum of."""
    partial, theirs, noise = step.a[0]["partial"], step.whole("gradients"), step.noise.totals
    count = max(map(len, partial.values()), default=0)
    names = [name for name in names if len(partial.get(name, ())) == count and name in a and name in theirs]
    if not names or not count or any(each is None for name in names for each in partial[name]):
        return ""
    sums = torch.stack([torch.cat([partial[name][i] for name in names]) for i in range(count)])
    mine, other = (torch.cat([each[name] for name in names]) for each in (a, theirs))
    clipping = mine @ sums[-1] / (sums[-1] @ sums[-1])
    columns = torch.diff(sums, dim=0, prepend=torch.zeros_like(sums[:1])) * clipping
    if before:
        old = before.mine("gradients")
        columns = torch.cat([columns, torch.cat([old[name] for name in names])[None]])
    if not columns.isfinite().all() or len(other) < 2 * len(columns):
        return ""
    found = torch.linalg.lstsq(columns.T, other, driver="gelsd").solution
    if (columns.T @ found - other).norm() > min(10 * noise, 0.1) * other.norm():
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
    counts = f"the micro-batches of one process count {', '.join(unlike(shares, 1.0, 3)[0])} times: "
    for n in {*step.pair.sizes.values()} - {0, 1} if min(shares) > 0 else ():
        powers = [math.log(share / min(shares), n) for share in shares]
        if max(abs(each - round(each)) for each in powers) < 1e-3:
            return (f"{counts}what was summed over {n} ranks already is summed again with the next micro-batch: are "
                    "sums taken once, of all micro-batches, or of each one's own gradient?")
    return counts + (of_model(step) or OF_TOKENS)


def of_update(before: Step, found: Difference, is_first: bool) -> tuple[str, str]:
    """By what the weights have changed otherwise in the step `before`, of right gradients, and what it usually is."""
    pair, names = before.pair, [*found.sizes]
    lost = [name for name in names if pair.one.owners[name] and not pair.many.owners[name] and not pair.many.summed]
    partly = isinstance(found, Unlike) and any(
        0 < len(pair.many.owners[name]) < len(pair.ranks([name])) for name in names)
    by = UNLIKE if isinstance(found, Unlike) else "not as they should"
    cause = "replicas drift, by unlike optimizers or steps: their gradients were the same" if by == UNLIKE else ""
    if isinstance(found, Scaled):
        times = unlike([found.factor], 1.0, 4)[0][0]
        by = f"{times} times as far as they should"
        cause = f"is the learning rate {times} times as large when the optimizer steps?"
        if found.factor < 0:
            cause = "of the wrong sign: is something subtracted that should be added (an outer step)?"
    if isinstance(found, Other):
        cause = OF_MOMENTS
        if all(len(pair.one.info[name]["shape"]) > 1 for name in names) and is_first and (
                len(names) < len(pair.names) or all(len(pair.many.parts[name]) > 1 for name in names)):
            cause = "these are matrices only: does an optimizer that needs whole matrices (Muon) get shards of them?"
    if lost:
        cause = f"the optimizer does not hold {len(lost)} of them: was it made before they were replaced?"
    elif partly:
        cause = "some ranks update them, the others do not: are they never sent (broadcast) to these?"
    return by, cause


def of_decay(found: list[Difference], a: dict, whole: dict, weights: dict) -> tuple[str, str] | None:
    """Whether updates differ by one multiple of the weights themselves: by what, and why."""
    names = [name for each in found for name in each.sizes if isinstance(each, Other)]
    factors = {(c := factor(whole[name] - a[name], weights[name], 1e-3)) and float(f"{c:.3g}") for name in names}
    if len(found) != 1 or len(factors) != 1 or factors & {None, 1.0}:
        return None
    return f"not as they should, by {factors.pop():.3g} times the weights themselves", "is it another weight decay?"
