"""The verdict: what of two recordings is the same, what isn't, and what was not judged. causes.py explains."""

import dataclasses
import pathlib
from typing import NamedTuple

from .causes import explain, of_decay, of_difference, of_update
from .differences import Other, Scaled, Unlike, common, differences
from .frameworks import ordinary
from .noise import NOISE, RESOLUTION, coarsest, noise
from .pair import Finding, Pair, Step, given
from .recording import Recording
from .totals import broken, judge_loss, judge_norm, judge_samples, judge_settings, not_judged, settings

IN_BFLOAT16 = NOISE["bfloat16"][1]  # what computing in it changes at most in right updates of matrices (Muon)
CHANGED = "what step {} changed in the weights, though its gradients were right"


class Note(NamedTuple):
    """Of no fault: a sentence, differences as "rounded" as float32's, updates that a coarse dtype has "hidden", ranks
    "freed" or are as "vague" as bfloat16's, "unknown" settings, or all "gradients" or "updates" together."""
    kind: str
    sizes: dict[str, float] = {}  # name -> how large, relative


@dataclasses.dataclass(frozen=True)
class Verdict:
    found: list[Finding]  # of the first step that has any
    notes: list[str]  # what a yes is about, and what it is not about
    steps: list[int]  # that both recordings have


def compare(one: Recording | pathlib.Path | str, many: Recording | pathlib.Path | str) -> Verdict:
    """Whether `many` records what `one`, a trusted run, records. Raises ValueError where nothing can be compared."""
    one = one if isinstance(one, Recording) else Recording(one)
    many = many if isinstance(many, Recording) else Recording(many, one.aliases)
    told, steps = one.check(many), sorted({*one.steps} & {*many.steps})
    only = sorted(step for step in {*one.steps} ^ {*many.steps} if step > steps[0])
    told += [f"not judged: steps {only}, which only one recording has"] * bool(only)
    pair, start, before, seen = Pair.of(one, many), None, None, []
    for number in steps:
        step = Step.load(pair, number, before, start)
        start = start or step
        if one.absent:
            which = f"no rank has {', '.join(dict.fromkeys(map(ordinary, one.absent)))}"[:300]
            why = "has no stage their layer, or was Recorder not given all models?"
            why = f"{len(one.absent)} of them, such as {one.absent[0]}: {why}"
            return Verdict([step.finding("parameters", [], which, why)], told, steps)
        seen += broken(step, "weights") + judge_samples(step)
        seen += judge_weights(step, start, before, is_wrong=bool(found_in(seen)))
        step = with_rounding(step, seen)
        seen += broken(step, "gradients") if not found_in(seen) else []
        seen += judge_gradients(step, before) if not found_in(seen) else []
        if found_in(seen):
            break
        before = with_rounding(step, seen)
    else:
        seen += last_update(before, start)
        told += limits(before, seen) if not found_in(seen) else []
    return Verdict(found_in(seen), told + [each.kind for each in seen if isinstance(each, Note) and " " in each.kind],
                   steps)


def found_in(seen: list[Finding | Note]) -> list[Finding]:
    return [each for each in seen if isinstance(each, Finding)]


def noted(seen: list[Finding | Note], kind: str) -> dict[str, float]:
    """name -> the largest size."""
    pairs = [pair for each in seen if isinstance(each, Note) and each.kind == kind for pair in each.sizes.items()]
    return dict(sorted(pairs, key=lambda pair: pair[1]))


def with_rounding(step: Step, seen: list[Finding | Note]) -> Step:
    known, is_rounded = step.noise, bool(noted(seen, "rounded"))
    return dataclasses.replace(step, noise=noise(known.computed, known.kept, known.drift - known.first, is_rounded))


def judge_weights(step: Step, start: Step, before: Step | None, is_wrong: bool) -> list[Finding | Note]:
    """At the start; later those that no gradient changes, and what the step `before` has changed in the others."""
    b, pair = step.theirs("weights"), step.pair
    a = {name: vector for name, vector in step.mine("weights").items() if any(b[name].values())}  # FSDP has freed some
    frozen = [name for name in b if name not in pair.names]
    limits_of = {name: NOISE[coarsest(pair.one.info[name]["dtype"])][2] for name in b}
    found, rounded = differences(pair, a, {name: b[name] for name in frozen} if before else b, limits_of.get,
                                 lambda name: 0.0, rounding=step.noise.rounding)
    seen = [Note("rounded", rounded)]
    for each in found:
        by, cause = of_difference(step, "weights", each, a)
        where = ("weights" if before else "weights at the start") + ", frozen" * ({*each.sizes} <= {*frozen})
        seen.append(step.finding(where, each.sizes, by, cause * (not isinstance(each, Scaled)) or (
            "does each rank draw from a seed of its own, without a broadcast?" if isinstance(each, Unlike)
            else "another seed, or random numbers that depend on the ranks?")))
    return seen + (judge_updates(step, before, start) if before and not found and not is_wrong else [])


def judge_updates(step: Step, before: Step, start: Step) -> list[Finding | Note]:
    """What the step `before` has changed in the weights of `step`."""
    pair, gradients, known = step.pair, before.mine("gradients"), before.noise
    new, newer, old, older = (each for at in (step, before) for each in (at.mine("weights"), at.theirs("weights")))
    rounding = known.first * 1e-2 * sum(vector.norm() ** 2 for vector in gradients.values()) ** 0.5
    a = {name: new[name] - old[name] for name in pair.names if name in new and name in old and name in gradients
         and gradients[name].norm() > rounding and any(newer[name].values()) and any(older[name].values())}
    b = {name: {part: {rank: vector - older[name][part][rank] for rank, vector in ranks.items()
                       if rank in older[name][part]} for part, ranks in newer[name].items()} for name in a}
    fine = max(RESOLUTION[known.kept], RESOLUTION["float32"] * known.is_rounded)
    floors = {name: old[name].norm() * max(fine, RESOLUTION[coarsest(pair.one.info[name]["dtype"])]) for name in a}
    hidden = {name: float(vector.norm() / (old[name].norm() or 1)) for name, vector in a.items()
              if vector.norm() <= 2 * floors[name]}
    is_fine = coarsest(known.computed, known.kept) == "float64" and not known.is_rounded
    found, rounded = differences(pair, a, b, lambda name: known.updates, floors.get, few_signs=not is_fine,
                                 rounding=known.rounding)
    whole = pair.many.whole(b)
    of_weights = of_decay(found, a, whole, old)
    coarse = [each for each in found if type(each) is Other and not of_weights and is_vague(before, each.sizes, len(a))]
    vague, found = coarse[0].sizes if coarse else {}, [each for each in found if each not in coarse]
    alike = {name: vector for name, vector in a.items() if name not in hidden and name not in vague}
    c, apart = common(alike, whole)
    if not found and abs(c - 1) > 0.2 * known.updates:
        found = [Scaled(dict.fromkeys(alike, abs(c - 1)), c)]
    causes = [of_weights or of_update(before, each, before.number == start.number) for each in found]
    return [Note("rounded", rounded), Note("hidden", hidden), Note("vague", vague), Note("updates", {"": apart}),
            Note("freed", {name: 0.0 for name in pair.names if not any(newer[name].values())}),
            *(step.finding(CHANGED.format(before.number), each.sizes, *cause) for each, cause in zip(found, causes))]


def is_vague(before: Step, sizes: dict[str, float], count: int) -> bool:
    """Whether updates are as much apart as those of an optimizer that computes in bfloat16, as Muon does: of matrices,
    while others are right or its settings are known to be Muon's: a momentum, and nothing of SGD's or RMSprop's."""
    shapes = [before.pair.one.info[name]["shape"] for name in sizes]
    known = [each for records in (before.a, before.b) for name in sizes for each in settings(records, name)]
    return max(sizes.values()) <= IN_BFLOAT16 and all(len(shape) > 1 for shape in shapes) and (
        len(sizes) < count or all(known)) and all("momentum" in each and not each.keys() & {
            "betas", "dampening", "alpha"} for each in known if each)  # as Muon has it, but for SGD and RMSprop


def last_update(before: Step, start: Step) -> list[Finding | Note]:
    """Of the last step, where both recordings have the weights behind it."""
    pair = before.pair
    try:
        if not pair.one.steps[-1] == pair.many.steps[-1] == before.number:
            return []
        a, b = ([{**each, **end} for each, end in zip(records, run.load("end"))]
                for records, run in ((before.a, pair.one), (before.b, pair.many)))
    except ValueError:
        return [Note(f"not judged: what step {before.number} changed in the weights: the training ended before they "
                     "were recorded (recorder.close() does it)")]
    step = dataclasses.replace(before, number=before.number + 1, a=a, b=b)
    return broken(step, "weights") or judge_updates(step, before, start)


def unclipped(step: Step) -> Step:
    """With the gradients of both recordings before clipping, by the norms that their ranks have clipped by."""
    one, many = given(step.a, "norm"), given(step.b, "norm")
    if not one or not many:
        return step
    totals = [sum(run.squares(records).values()) ** 0.5
              for run, records in ((step.pair.one, step.a), (step.pair.many, step.b))]
    is_clipped = totals[0] < one[0] * (1 - 2e-6)
    clip_alike = is_clipped and max(many) - min(many) <= 1e-6 * max(many)
    if abs(totals[1] / (totals[0] or 1) - 1) < step.noise.gradients and not clip_alike:
        return step  # nothing was clipped, or one rank's norm is not what it has clipped by
    known = one[0] if is_clipped else many[0]
    if not is_clipped and totals[1] >= many[0] * (1 - 2e-6):
        return step
    largest = (totals[0] if is_clipped else totals[1]) * (1 + 1e-6 / known)  # torch divides by the norm + 1e-6

    def scaled(each: dict, norm: float) -> dict:
        scale = max(1.0, (norm + 1e-6) / largest)
        return each | {"gradients": {name: None if vector is None else vector * scale
                                     for name, vector in each["gradients"].items()}}

    a, b = ([scaled(each, norms[0] if each["norm"] is None else each["norm"]) for each in records]
            for records, norms in ((step.a, one), (step.b, many)))
    return dataclasses.replace(step, a=a, b=b)


def judge_gradients(step: Step, before: Step | None) -> list[Finding | Note]:
    """And what follows from right ones: norm, settings, loss."""
    pair, known, step = step.pair, step.noise, unclipped(step)
    a, theirs = step.mine("gradients"), step.theirs("gradients")
    if not (total := sum(vector.norm() ** 2 for vector in a.values()) ** 0.5):
        raise ValueError(f"step {step.number}: {pair.one.folder} has no gradients but zeros: call recorder.step() "
                         "after backward and before zero_grad(), and see that the loss is not detached")
    floor = (0.1 * known.gradients if before else 1e-2 * known.first) * total  # weights' rounding changes all of them
    b = {name: theirs[name] for name in pair.names}
    found, rounded = differences(pair, a, b, lambda name: known.gradients, lambda name: floor, unlike=known.first,
                                 summed=pair.many.summed, rounding=known.rounding)
    c, apart = common(a, pair.many.whole(b, pair.many.summed))
    seen = [Note("rounded", rounded), Note("gradients", {"": apart})]
    if not found and abs(c - 1) > max(0.2 * known.drift, known.rounding * (known.is_rounded or bool(rounded))):
        found = [Scaled(dict.fromkeys(a, abs(c - 1)), c)]
    if found:
        return seen + explain(step, before, found, a)
    of_settings, unknown = judge_settings(step)
    wrong = judge_norm(step) + of_settings
    of_loss, why = judge_loss(step) if not wrong else ([], "")
    return seen + wrong + of_loss + [Note("unknown", dict.fromkeys(unknown, 0.0))] + [Note(why)] * bool(why)


def limits(step: Step, seen: list[Finding | Note]) -> list[str]:
    """What the yes is about, in numbers, and what it is not about."""
    pair, known, last = step.pair, step.noise, step.mine("gradients")
    rounded, hidden, vague, freed, unknown = (
        noted(seen, kind) for kind in ("rounded", "hidden", "vague", "freed", "unknown"))
    together = [max(noted(seen, kind).values(), default=0.0) for kind in ("gradients", "updates")]
    idle = [name for name in pair.names if name not in last or not last[name].any()]
    fine = max((RESOLUTION[coarsest(pair.one.info[name]["dtype"])] for name in hidden), default=0.0)
    worst = next(reversed(rounded), "")
    without = [what for what in ("loss", "norm") if any(
        all(each[what] is None for each in records) for records in (step.a, step.b))]
    return [line for is_said, line in (
        (1, f"judged: gradients to {known.first:.0e} of their length in the first step ({known.gradients:.0e} in the "
         f"last), updates to {known.updates:.0e}; the largest differences of all together are {together[0]:.1g} and "
         f"{together[1]:.1g}"),
        (known.computed != pair.dtype,
         f"mixed precision was seen: weights in {pair.dtype}, judged by {known.computed}'s noise"),
        (rounded, f"{len(rounded)} parameters differ by up to {rounded.get(worst, 0):.1g} of their length, as rounding "
         f"in float32 does, such as {worst}: something computes in float32"),
        (hidden, f"not judged: updates of {len(hidden)} of {len(pair.names)} parameters: {pair.dtype} hides less than "
         f"{2 * fine:.1g} of a weight, they changed by {max(hidden.values(), default=0):.1g} at most"),
        (vague, f"not judged: updates of {len(vague)} matrices below {IN_BFLOAT16:.1g} of their length: of right "
         f"gradients they differ by up to {max(vague.values(), default=0):.2g}, as where an optimizer computes in "
         "bfloat16 (Muon)"),
        (freed, f"not judged: updates of {len(freed)} parameters, which ranks had freed"),
        (idle, f"not judged: {len(idle)} parameters without a gradient in both, such as {' '.join(idle[:1])}"),
        (unknown, f"not judged: the optimizer's settings of {len(unknown)} of {len(pair.names)} parameters, which were "
         "not recorded in both: give Recorder the optimizers that have param_groups, in a list"),
        *((1, f"not judged: the {what}, which was not recorded in both") for what in without),
        (not_judged(step), not_judged(step))) if is_said]
