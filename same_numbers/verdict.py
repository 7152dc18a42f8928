"""The verdict: what of two recordings is the same, what isn't, and what was not judged. causes.py explains."""

import dataclasses
import pathlib

from .causes import OF_MOMENTS, explain, of_difference, of_update
from .differences import Other, Scaled, Unlike, common, differences
from .frameworks import ordinary
from .noise import NOISE, RESOLUTION, coarsest
from .pair import Finding, Pair, Step, given
from .reading import broken, judge_samples, not_judged
from .recording import Recording
from .sketches import factor
from .totals import judge_loss, judge_norm, judge_settings, settings

IN_BFLOAT16 = NOISE["bfloat16"][1]  # what computing in it changes at most in right updates of matrices (Muon)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`found` has the findings of the first step that has any; `notes`, what a yes is about, and what it is not about;
    `steps`, which both recordings have."""

    found: list[Finding]
    notes: list[str]
    steps: list[int]


@dataclasses.dataclass(frozen=True)
class Judged:
    """Of a step, or of what it changed: findings, what was not judged, and name -> size of what is noted: differences
    as `rounded` as float32's, updates that a coarse dtype has `hidden`, that ranks had `freed`, or that are as `vague`
    as bfloat16's; `unknown` settings; `apart`: the difference of all gradients or updates together."""

    found: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    rounded: dict[str, float] = dataclasses.field(default_factory=dict)
    hidden: dict[str, float] = dataclasses.field(default_factory=dict)
    freed: dict[str, float] = dataclasses.field(default_factory=dict)
    vague: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown: dict[str, float] = dataclasses.field(default_factory=dict)
    apart: dict[str, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Judged") -> "Judged":
        def both(a, b):
            return a + b if isinstance(a, list) else {key: max(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}

        return Judged(*(both(getattr(self, each.name), getattr(other, each.name)) for each in dataclasses.fields(self)))


def compare(one: Recording | pathlib.Path | str, many: Recording | pathlib.Path | str) -> Verdict:
    """Whether `many` records what `one`, a trusted run, records. Raises ValueError where nothing can be compared."""
    one = one if isinstance(one, Recording) else Recording(one)
    many = many if isinstance(many, Recording) else Recording(many, one.aliases)
    told, steps = one.check(many), [step for step in one.steps if step in many.steps]
    pair = Pair.of(one, many)
    only = [step for step in {*one.steps} ^ {*many.steps} if step > steps[0]]
    told += [f"not judged: steps {sorted(only)}, which only one recording has"] * bool(only)
    start = before = None
    judged = Judged()
    for number in steps:
        step = Step.load(pair, number, before, start)
        start = start or step
        if one.absent:
            return Verdict([of_absent(step)], told, steps)
        judged += Judged(broken(step, "weights") + judge_samples(step))
        judged += judge_weights(step, start, before, bool(judged.found))
        step = with_rounding(step, judged)
        if not judged.found:
            judged += Judged(broken(step, "gradients"))
        if not judged.found:
            step, found = judge_gradients(step, before)
            judged += found
        if judged.found:
            return Verdict(judged.found, told + judged.notes, steps)
        before = step
    judged += last_update(before, start)
    if not judged.found:
        told += [*limits(before, judged)]
    return Verdict(judged.found, told + judged.notes, steps)


def with_rounding(step: Step, judged: Judged) -> Step:
    noise = dataclasses.replace(step.noise, is_rounded=step.noise.is_rounded or bool(judged.rounded))
    return dataclasses.replace(step, noise=noise)


def of_absent(step: Step) -> Finding:
    absent = step.pair.one.absent
    return step.finding("parameters", [], f"no rank has {', '.join(dict.fromkeys(map(ordinary, absent)))}"[:300],
                        f"{len(absent)} of them, such as {absent[0]}: has no stage their layer, or was Recorder not "
                        "given all models?")


def judge_weights(step: Step, start: Step, before: Step | None, is_wrong: bool) -> Judged:
    """At the start; later those that no gradient changes, and what the step `before` has changed in the others."""
    b, pair = step.theirs("weights"), step.pair
    a = {name: vector for name, vector in step.mine("weights").items() if any(b[name].values())}  # FSDP has freed some
    frozen = [name for name in b if name not in pair.names]
    found, rounded = differences(
        pair, a, {name: b[name] for name in frozen} if before else b,
        lambda name: NOISE[coarsest(pair.one.info[name]["dtype"])][2], lambda name: 0.0, rounding=step.noise.rounding)
    findings = []
    for each in found:
        by, cause = of_difference(step, "weights", each, a)
        where = ("weights" if before else "weights at the start") + ", frozen" * ({*each.sizes} <= {*frozen})
        findings.append(step.finding(where, each.sizes, by, cause * (not isinstance(each, Scaled)) or (
            "does each rank draw from a seed of its own, without a broadcast?" if isinstance(each, Unlike)
            else "another seed, or random numbers that depend on the ranks?")))
    judged = Judged(findings, rounded=rounded)
    return judged + judge_updates(step, before, start) if before and not findings and not is_wrong else judged


def judge_updates(step: Step, before: Step, start: Step) -> Judged:
    """What the step `before` has changed in the weights of `step`."""
    pair, gradients, noise = step.pair, before.mine("gradients"), before.noise
    new, newer, old, older = (each for at in (step, before) for each in (at.mine("weights"), at.theirs("weights")))
    rounding = noise.first * 1e-2 * sum(vector.norm() ** 2 for vector in gradients.values()) ** 0.5
    freed = [name for name in pair.names if not any(newer[name].values())]
    a = {name: new[name] - old[name] for name in pair.names if name in new and name in old and name in gradients
         and gradients[name].norm() > rounding and any(newer[name].values()) and any(older[name].values())}
    b = {name: {part: {rank: vector - older[name][part][rank] for rank, vector in ranks.items()
                       if rank in older[name][part]} for part, ranks in newer[name].items()} for name in a}
    floors = {name: noise.resolution(pair.one.info[name]["dtype"]) * old[name].norm() for name in a}
    hidden = {name: float(vector.norm() / (old[name].norm() or 1)) for name, vector in a.items()
              if vector.norm() <= 2 * floors[name]}
    found, rounded = differences(pair, a, b, lambda name: noise.updates, floors.get, few_signs=noise.has_few_signs,
                                 rounding=noise.rounding)
    whole, vague = pair.many.whole(b), {}
    if decayed := of_decay(found, a, whole, old, noise.totals):
        by, cause = decayed
        return Judged([updated(step, before, found[0].sizes, by, cause)], freed=dict.fromkeys(freed, 0.0))
    if [*map(type, found)] == [Other] and is_vague(before, found[0].sizes, len(a)):
        vague, found = found[0].sizes, []
    alike = {name: a[name] for name in a if name not in hidden and name not in vague}
    c, apart = common(alike, whole)
    if not found and abs(c - 1) > 0.2 * noise.updates:
        found = [Scaled(dict.fromkeys(alike, abs(c - 1)), c)]
    findings = [updated(step, before, each.sizes, *of_update(before, each, before.number == start.number))
                for each in found]
    return Judged(findings, [], rounded, hidden, dict.fromkeys(freed, 0.0), vague, apart={"updates": apart})


def updated(step: Step, before: Step, sizes: dict, by: str, cause: str) -> Finding:
    return step.finding(f"what step {before.number} changed in the weights, though its gradients were right", sizes, by,
                        cause)


def of_decay(found: list, a: dict, whole: dict, weights: dict, noise: float) -> tuple[str, str] | None:
    """Whether updates differ by one multiple of the weights themselves."""
    factors = set()
    if len(found) != 1 or not isinstance(found[0], Other):
        return None
    for name in found[0].sizes:
        c = factor(whole[name] - a[name], weights[name], 1e-3)
        factors.add(c and float(f"{c:.3g}"))
    if len(factors) > 1 or None in factors or 1.0 in factors:
        return None
    c = factors.pop()
    return f"not as they should, by {c:.3g} times the weights themselves", "is it another weight decay?"


def is_vague(before: Step, sizes: dict[str, float], count: int) -> bool:
    """Whether updates of some matrices are as much apart as an optimizer's that computes in bfloat16, as Muon does,
    while others are right. Those of an optimizer that looks at each number alone (it has betas) are not."""
    shapes = [before.pair.one.info[name]["shape"] for name in sizes]
    return max(sizes.values()) <= IN_BFLOAT16 and all(len(shape) > 1 for shape in shapes) and len(sizes) < count and (
        not any("betas" in each for records in (before.a, before.b) for name in sizes
                for each in settings(records, name)))


def last_update(before: Step, start: Step) -> Judged:
    """Of the last step, where both recordings have the weights behind it."""
    pair = before.pair
    try:
        if not pair.one.steps[-1] == pair.many.steps[-1] == before.number:
            return Judged()
        a, b = ([{**each, **end} for each, end in zip(records, run.load("end"))]
                for records, run in ((before.a, pair.one), (before.b, pair.many)))
    except ValueError:
        return Judged(notes=[f"not judged: what step {before.number} changed in the weights: the training ended before "
                             "they were recorded (recorder.close() does it)"])
    step = dataclasses.replace(before, number=before.number + 1, a=a, b=b)
    found = broken(step, "weights")
    return Judged(found) if found else judge_updates(step, before, start)


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


def judge_gradients(step: Step, before: Step | None) -> tuple[Step, Judged]:
    """And what follows from right ones: norm, settings, loss. Returns the step as recorded, with its noise."""
    pair, recorded, step = step.pair, step, unclipped(step)
    a, theirs, noise = step.mine("gradients"), step.theirs("gradients"), step.noise
    b = {name: theirs[name] for name in pair.names}
    if not (total := sum(vector.norm() ** 2 for vector in a.values()) ** 0.5):
        raise ValueError(f"step {step.number}: {pair.one.folder} has no gradients but zeros: call recorder.step() "
                         "after backward and before zero_grad(), and see that the loss is not detached")
    floor = (0.1 * noise.gradients if before else 1e-2 * noise.first) * total  # weights' rounding changes all of them
    found, rounded = differences(pair, a, b, lambda name: noise.gradients, lambda name: floor, unlike=noise.first,
                                 summed=pair.many.summed, rounding=noise.rounding)
    c, apart = common(a, pair.many.whole(b, pair.many.summed))
    judged = Judged(rounded=rounded, apart={"gradients": apart})
    step, recorded = (with_rounding(each, judged) for each in (step, recorded))
    if not found and abs(c - 1) > step.noise.together:
        found = [Scaled(dict.fromkeys(a, abs(c - 1)), c)]
    if found:
        return recorded, judged + Judged(explain(step, before, found, a))
    of_settings, unknown = judge_settings(step)
    of_loss, notes = judge_loss(step) if not (wrong := judge_norm(step) + of_settings) else ([], [])
    return recorded, judged + Judged(wrong + of_loss, notes, unknown=dict.fromkeys(unknown, 0.0))


def limits(step: Step, judged: Judged):
    """What the yes is about, in numbers, and what it is not about."""
    pair, noise = step.pair, step.noise
    yield (f"judged: gradients to {noise.first:.0e} of their length in the first step ({noise.gradients:.0e} in the "
           f"last), updates to {noise.updates:.0e}; the largest differences of all together are "
           f"{judged.apart.get('gradients', 0):.1g} and {judged.apart.get('updates', 0):.1g}")
    if noise.computed != pair.dtype:
        yield f"mixed precision was seen: weights in {pair.dtype}, judged by {noise.computed}'s noise"
    if judged.rounded:
        worst = max(judged.rounded, key=judged.rounded.get)
        yield (f"{len(judged.rounded)} parameters differ by up to {judged.rounded[worst]:.1g} of their length, as "
               f"rounding in float32 does, such as {worst}: something computes in float32")
    if judged.hidden:
        fine = max(RESOLUTION[coarsest(pair.one.info[name]["dtype"])] for name in judged.hidden)
        yield (f"not judged: updates of {len(judged.hidden)} of {len(pair.names)} parameters: {pair.dtype} hides less "
               f"than {2 * fine:.1g} of a weight, they changed by {max(judged.hidden.values()):.1g} at most")
    if judged.vague:
        yield (f"not judged: updates of {len(judged.vague)} matrices below {IN_BFLOAT16} of their length: their gradients "
               f"are right, and they differ by up to {max(judged.vague.values()):.2g}, as those of an optimizer that "
               "computes in bfloat16 (Muon) do")
    if judged.freed:
        yield f"not judged: updates of {len(judged.freed)} parameters, which ranks had freed"
    last = step.mine("gradients")
    if idle := [name for name in pair.names if name not in last or not last[name].any()]:
        yield f"not judged: {len(idle)} parameters without a gradient in both, such as {idle[0]}"
    if judged.unknown:
        yield (f"not judged: the optimizer's settings of {len(judged.unknown)} of {len(pair.names)} parameters, which "
               "were not recorded in both: give Recorder the optimizers that have param_groups, in a list")
    for what in ("loss", "norm"):
        if any(all(each[what] is None for each in records) for records in (step.a, step.b)):
            yield f"not judged: the {what}, which was not recorded in both"
    if why := not_judged(step):
        yield why
