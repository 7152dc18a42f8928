"""Of what a step reads: samples that are others, and numbers that are no numbers."""

import collections

from .pair import Finding, Step


def broken(step: Step, kind: str) -> list[Finding]:
    """NaN and infinity. Raises ValueError where both recordings have them in the same places only."""
    found, findings = [collections.defaultdict(list), collections.defaultdict(list)], []
    for bad, records in zip(found, (step.a, step.b)):
        for rank, record in enumerate(records):
            for name, vector in record[kind].items():
                if vector is not None and not vector.isfinite().all():
                    bad[name].append(rank)
            for key in ("loss", "norm") if kind == "gradients" else ():
                if record[key] is not None and not -float("inf") < record[key] < float("inf"):
                    bad[f"the {key}"].append(rank)
    for mine, other, run in ((found[1], found[0], step.pair.many), (found[0], found[1], step.pair.one)):
        if names := [name for name in mine if name not in other]:
            ranks = sorted({rank for name in names for rank in mine[name]})
            of_params = [name for name in names if not name.startswith("the ")]
            findings.append(step.finding(
                f"NaN or infinity in {run.folder}, {kind}", dict.fromkeys(of_params, float("inf")),
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
    twins = [f"rank {j} reads rank {i}'s" for j, each in enumerate(ranks) for i in range(j) if each and each == ranks[i]]
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
    sizes = [{sample.partition(":")[0] for each in records for sample in each["samples"]} for records in (step.a, step.b)]
    lacking = [f"{run.folder}" for run, each in zip((step.pair.one, step.pair.many), sizes) if not each]
    if lacking:
        return f"samples were not recorded in {' and '.join(lacking)}: step(batch=...) records them"
    return "not judged: samples, which have other lengths in the other run (ranks have parts of them, or other padding)" \
        if sizes[0] != sizes[1] else ""
