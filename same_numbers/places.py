"""Where: the first module in forward whose output, or in backward whose output's gradient, is not the trusted run's.

Rows of sketches are matched by samples. A rank may hold some of them, or some tokens of each, or a summand."""

from typing import NamedTuple

import torch

from .pair import unlike
from .recording import match
from .sketches import factor


class Row(NamedTuple):
    rank: int
    shape: tuple
    bounds: tuple
    output: torch.Tensor
    gradient: torch.Tensor


class Found(NamedTuple):
    module: str
    c: float | None = 1.0  # what the rows are a multiple of the right ones by, None where by nothing
    size: float = 0.0  # of the difference, relative
    ranks: tuple = ()  # that are wrong, where others are right
    extent: str = ""  # in words: of which samples, by how much


def inputs(record: dict) -> list[str]:
    """What the model was given: a batch may be several tensors, each with digests of its own."""
    return record.get("inputs") or record["samples"]


def rows_of(records: list[dict], known: list[str], names: dict[str, str] | None = None) -> dict[str, dict]:
    """module -> sample -> its rows. A sample is known by its digest or, where ranks see parts, by its number."""
    found = {}
    for rank, record in enumerate(records):
        samples = inputs(record)
        for name, kept in record["outputs"].items():
            rows = [Row(rank, kept["shape"], kept["bounds"], *pair) for pair in zip(kept["output"], kept["gradient"])]
            keys = samples if samples and {*samples} <= {*known} and len(samples) == len(rows) else known
            # a pipeline's first step may begin with a forward more, to learn shapes
            for key, row in zip(keys, rows[-len(keys) :]) if len(keys) <= len(rows) else ():
                found.setdefault(names[name] if names else name, {}).setdefault(key, []).append(row)
    return found


def whole(rows: list[Row], kind: str) -> dict[int, torch.Tensor]:
    """rank -> vector; where ranks hold parts, their sum as that of the first."""
    if all(bounds == (0, size) for row in rows for bounds, size in zip(row.bounds, row.shape)):
        return {row.rank: getattr(row, kind) for row in rows}
    parts = {row.bounds: getattr(row, kind) for row in rows}
    return {rows[0].rank: sum(parts.values())}


def judge(module: str, mine: dict, theirs: dict, kind: str, noise: float) -> Found | None:
    """None where nothing can be compared: no sample, other shapes, no gradients."""
    pairs: dict[int, list] = {}
    for sample in mine.keys() & theirs.keys():
        if mine[sample][0].shape != theirs[sample][0].shape:
            return None
        wanted = next(iter(whole(mine[sample], kind).values()))
        for rank, vector in whole(theirs[sample], kind).items():
            if wanted.isfinite().all():
                pairs.setdefault(rank, {})[sample] = wanted, vector
    if not pairs:
        return None
    stacked = {rank: [torch.stack(each) for each in zip(*found.values())] for rank, found in pairs.items()}
    if kind == "output" and len({len(each) for each in pairs.values()}) == 1 < len(pairs):
        total = sum(each for _, each in stacked.values())
        if factor(total.flatten(), next(iter(stacked.values()))[0].flatten(), noise) == 1:
            return Found(module)  # each rank has a summand
    factors = {rank: factor(b.flatten(), a.flatten(), noise) if b.isfinite().all() else None
               for rank, (a, b) in stacked.items()}
    ranks = [rank for rank, c in factors.items() if c != 1] or [*factors]
    a, b = (torch.cat([stacked[rank][i] for rank in ranks]) for i in range(2))
    apart = (b - a).norm(dim=1)
    size = float(apart.norm() / a.norm()) if a.any() else float(apart.any())
    samples = [sample for rank in ranks for sample in pairs[rank]]  # several ranks may have the same
    wrong = {sample for sample, is_wrong in zip(samples, apart > noise * a.norm(dim=1)) if is_wrong}
    number = f"all {len(wrong)}" if len(wrong) == len({*samples}) else f"{len(wrong)} of {len({*samples})}"
    return Found(module, next(iter(factors.values())) if len({*factors.values()}) == 1 else None, size,
                 tuple(ranks) if len(ranks) < len(factors) else (), f"of {number} samples, by {size:.2g} of its length")


def where(a: list[dict], b: list[dict], noise: float, is_loss_right: bool | None, is_alone: bool) -> str:
    """In words, of the records of a step; "" where no modules were recorded. `is_alone`: each part has one rank."""
    own = {name: () for record in b for name in record["outputs"]}
    names = match(own, {name: () for record in a for name in record["outputs"]})
    known = [sample for record in a for sample in inputs(record)]
    known = known or [str(i) for i in range(max((len(each["output"]) for each in a[0]["outputs"].values()), default=0))]
    one = rows_of(a, known)
    many = rows_of(b, known, {name: names.get(name, name) for name in own})
    found = {kind: [each for name in one if name in many and (each := judge(name, one[name], many[name], kind, noise))]
             for kind in ("output", "gradient")}
    if not found["output"]:
        return ""
    order, right = [*one], -1  # of modules in forward
    for each in found["output"]:
        if each.c != 1:
            ranks = f" on ranks {[*each.ranks]}, right on others{' (is it there twice?)' * is_alone}" * bool(each.ranks)
            left = order[right + 1 : order.index(each.module)]
            some = [f", of those that could be compared (not {name}: ranks have parts of it, tokens= may say which)"
                    for name in left[:1]]
            return f"first wrong in forward{''.join(some)}: the output of {each.module}{ranks}, {each.extent}"
        right = order.index(each.module)
    backward = found["gradient"][::-1]
    for each in backward:
        if each.c is None or each.c != backward[0].c:
            by = "" if each.c is None else f", {unlike([each.c / backward[0].c], 1.0, 4)[0][0]} times what it should be"
            place = f"the gradient is first wrong at the output of {each.module}{by}, {each.extent}"
            if each is backward[0]:
                place += (": look at backward behind it, at its collectives" if is_loss_right else
                          ": look at the loss, its targets and masks, and whether it sees a rank's own samples only "
                          "(negatives, means)")
            return f"forward is right everywhere, {place}"
    return "forward is right everywhere, and so are the gradients at outputs" * bool(backward)
