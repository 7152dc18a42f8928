"""The verdict: what of two recordings is the same, what isn't, and what was not judged. causes.py explains."""

import collections

import torch

from .frameworks import ordinary
from .recording import Recording
from .sketches import factor, has_few_signs
from .totals import Totals

# By dtype, relative: what rounding changes in gradients of the first step, in later ones, and in weights at the start
NOISE = {"float64": (1e-9, 1e-6, 1e-12), "float32": (3e-4, 3e-2, 2e-6), "bfloat16": (5e-2, 2e-1, 1e-2)}
RESOLUTION = {"float64": 1e-13, "float32": 2.4e-7, "float16": 1e-3, "bfloat16": 4e-3}  # of a weight, to see an update
ROUNDING = {"float64": 2e-6, "float32": 2e-2}  # what looks like rounding in the next coarser dtype
IN_BFLOAT16 = {"Muon"}  # optimizers that compute in it, whatever the weights are


def coarsest(*dtypes: str) -> str:
    """The name in NOISE of the one with the fewest digits. Integers have no noise of their own."""
    infos = [torch.finfo(dtype) for name in dtypes if (dtype := getattr(torch, name)).is_floating_point
             or dtype.is_complex]
    eps = max((info.eps for info in infos), default=1e-7)
    return "float64" if eps < 1e-12 else "float32" if eps < 1e-6 else "bfloat16"


class Comparison(Totals):
    """`found` has the findings of the first step that has any; `notes`, what a yes is about, and what it is not about.

    Raises ValueError where nothing can be compared.
    """

    def __init__(self, one: Recording, many: Recording):
        self.one, self.many, self.found = one, many, []
        self.notes, self.rounded = one.check(many), {}
        self.steps = [step for step in one.steps if step in many.steps]
        only = [step for step in {*one.steps} ^ {*many.steps} if step > self.steps[0]]
        self.notes += [f"not judged: steps {sorted(only)}, which only one recording has"] * bool(only)
        self.names = [name for name, info in one.info.items() if info["trained"]]
        self.dtype = coarsest(*(one.info[name]["dtype"] for name in self.names))
        self.computed, self.kept = self.dtype, self.dtype
        self.largest, self.hidden, self.freed, self.last_seen = collections.defaultdict(float), {}, set(), None
        self.count_ranks()
        before, self.step = None, self.steps[0]
        if one.absent:
            self.add("parameters", [], f"no rank has {', '.join(dict.fromkeys(map(ordinary, one.absent)))}"[:300],
                     f"{len(one.absent)} of them, such as {one.absent[0]}: has no stage their layer, or was Recorder "
                     "not given all models?")
            return
        for self.step in self.steps:
            self.a, self.b = one.load(self.step), many.load(self.step)
            self.dtypes()
            self.broken("weights")
            self.samples()
            self.weights(before)
            if not self.found:
                self.broken("gradients")
            if not self.found:
                self.gradients(before)
            if self.found:
                return
            self.numbers()
            before = (self.a, self.b)
        self.last_update(before)
        self.say_limits()

    def count_ranks(self) -> None:
        split = [parts for parts in self.many.parts.values() if len(parts) > 1]
        replicas = min(len(ranks) for parts in split or self.many.parts.values() for ranks in parts.values())
        self.sizes = {"replicas": replicas, "shards": max(map(len, split), default=1), "ranks": self.many.world,
                      **self.many.sizes}
        # the least of all steps, because a pipeline's first one may have a forward more, to learn shapes
        raw = [[self.many.read(self.many.folder / f"rank{rank}_step{step}.pt")["microbatches"]
                for rank in range(self.many.world)] for step in self.many.steps]
        self.sizes["micro-batches"] = min(map(max, raw))

    def dtypes(self) -> None:
        """How much noise there is: by the dtypes of weights, of what layers returned, and of the optimizer's states."""
        records = self.a + self.b
        self.computed = coarsest(self.computed, *(name for each in records for name in each["computed"]))
        muon = ["bfloat16"] * bool({self.one.optimizer, self.many.optimizer} & IN_BFLOAT16)
        self.kept = coarsest(self.kept, self.dtype, *(name for each in records for name in each["states"]))
        self.updating = coarsest(self.computed, self.kept, *muon)

    def noise(self, before: tuple | None = None) -> float:
        """Of gradients. Later they are as much noise as the weights have come apart, beside the way that they went."""
        first = NOISE[self.computed][0]
        self.drift = first
        if not before:
            return first
        weights = [self.one.whole(self.one.held(each, "weights")) for each in (self.start, self.a)]
        theirs = self.many.whole(self.many.held(self.b, "weights"))
        names = [name for name in self.names if name in theirs and name in weights[1]]
        way = sum((weights[1][name] - weights[0][name]).norm() ** 2 for name in names) ** 0.5
        apart = sum((weights[1][name] - theirs[name]).norm() ** 2 for name in names) ** 0.5
        self.drift += 100 * float(apart / way) if way else 0.0
        return min(0.5, self.drift)

    def add(self, what: str, which, by: str, cause: str = "") -> None:
        """A finding. `which`: name -> size of the difference beside the right value, or a name or none."""
        words = self.which([*which]) if which else ""
        cause = cause or "look at what it is made of"
        line = f"step {self.step}: {what}{', ' * bool(which)}{words}: {by}"
        sizes = which.items() if isinstance(which, dict) else ()
        size, worst = max(((size, name) for name, size in sizes), default=(0, ""))
        how_large = f" (largest: {size:.2g} of the right length, in {worst})" if worst else ""
        if 0 < size <= ROUNDING.get(self.computed, 0) and "wrong" in by:
            how_large = f"{how_large[:-1]}; as large as rounding in a coarser dtype)"
        self.found.append({"step": self.step, "what": what, "which": words, "by": by, "cause": cause, "size": size,
                           "worst": worst, "line": f"{line}: {cause}{how_large}"})

    def groups(self, a: dict, b: dict, noise, floor, summed: bool = False, unlike_noise: float | None = None,
               few_signs: bool = False) -> dict:
        """How sketches are wrong -> name -> by how much, relative. `a`: name -> sketch; `b`: name -> part -> rank ->
        sketch; `noise` and `floor` of a name. `few_signs`: where a gradient is almost zero, its sign is noise."""
        found, whole = collections.defaultdict(dict), self.many.whole(b, summed)
        for name in [name for name in b if name in a or name in whole]:
            mine, theirs = (each.get(name, torch.zeros(())) for each in (a, whole))
            lacks = not summed and any(len(b[name][part]) < len(ranks) for part, ranks in self.many.parts[name].items())
            if not mine.ndim or not theirs.ndim or lacks or (mine.any() and not theirs.any()):
                if max(mine.norm(), theirs.norm()) > floor(name):
                    found["absent", None][name] = 1.0
                continue
            size, limit = mine.norm(), noise(name)
            apart = max([float((theirs - mine).norm() / size)] + [
                float((each - next(iter(ranks.values()))).norm() / size) for ranks in b[name].values()
                for each in ranks.values() if not summed]) if size else float(theirs.norm() > floor(name))
            if 0 < apart <= ROUNDING["float64"] and self.computed == "float64" and apart > limit:
                self.rounded[name] = max(apart, self.rounded.get(name, 0.0))
                continue
            unlike = not summed and any(
                (each - next(iter(ranks.values()))).norm() > max((unlike_noise or limit) * each.norm(), floor(name))
                for ranks in b[name].values() for each in ranks.values())
            c = factor(theirs, mine, limit, floor(name))
            if not c and few_signs and has_few_signs(theirs, mine, self.one.info[name]["shape"], limit):
                c = 1.0
            if unlike or c != 1:
                found["unlike" if unlike else "factor" if c else "other", c][name] = apart
        return found

    def weights(self, before: tuple | None) -> None:
        """At the start; later those that no gradient changes, and what the step has changed in the others."""
        b = self.many.held(self.b, "weights")  # FSDP may have freed some
        a = {name: vector for name, vector in self.one.whole(self.one.held(self.a, "weights")).items()
             if any(b[name].values())}
        frozen = [name for name in b if name not in self.names]
        if before is None:
            self.start = self.a
        b = b if before is None else {name: b[name] for name in frozen}
        for (how, c), names in self.groups(a, b, lambda name: NOISE[coarsest(self.one.info[name]["dtype"])][2],
                                           lambda name: 0.0).items():
            by, cause = self.words("weights", how, c, [*names], a)
            found = "" if how == "factor" else cause  # what a factor of gradients means, it does not here
            words = ("weights at the start" if before is None else "weights") + ", frozen" * ({*names} <= {*frozen})
            self.add(words, names, by, found or self.of_start(how))
        if before and not self.found:
            self.updates(before, self.a, self.b)

    def updates(self, before: tuple, after_one: list, after_many: list) -> None:
        """What the step of the records `before` has changed in the weights."""
        new, newer = self.one.whole(self.one.held(after_one, "weights")), self.many.held(after_many, "weights")
        old, older = self.one.whole(self.one.held(before[0], "weights")), self.many.held(before[1], "weights")
        gradients = self.one.whole(self.one.held(before[0], "gradients"), self.one.summed)
        rounding = NOISE[self.computed][0] * 1e-2 * sum(vector.norm() ** 2 for vector in gradients.values()) ** 0.5
        fine = {name: max(RESOLUTION[coarsest(self.one.info[name]["dtype"])], RESOLUTION[self.kept],
                          RESOLUTION["float32"] * bool(self.rounded)) for name in self.names}
        a = {name: new[name] - old[name] for name in self.names if name in new and name in old and name in gradients
             and gradients[name].norm() > rounding and any(newer[name].values()) and any(older[name].values())}
        self.freed |= {name for name in self.names if not any(newer[name].values())}
        b = {name: {part: {rank: vector - older[name][part][rank] for rank, vector in ranks.items()
                           if rank in older[name][part]} for part, ranks in newer[name].items()} for name in a}
        floors = {name: fine[name] * old[name].norm() for name in a}
        dtype = self.updating if not self.rounded else coarsest(self.updating, "float32")
        noise = max(NOISE[dtype][1], self.limit)
        hidden = [name for name, vector in a.items() if vector.norm() <= 2 * floors[name]]
        for name in hidden:
            self.hidden[name] = max(self.hidden.get(name, 0.0), float(a[name].norm() / (old[name].norm() or 1)))
        found = self.groups(a, b, lambda name: noise, floors.get, few_signs=dtype != "float64")
        found = found or self.together("updates", {name: a[name] for name in a if name not in hidden},
                                       self.many.whole(b), 0.2 * noise)
        for (how, c), names in found.items():
            self.add(*self.of_update(how, c, names, before))

    def together(self, what: str, a: dict, whole: dict, limit: float) -> dict:
        """As groups(), of all sketches in one: a common factor shows where it is too small to be seen in each."""
        names = [name for name in a if name in whole]
        mine, theirs = (torch.cat([each[name] for name in names] or [torch.zeros(1)]) for each in (a, whole))
        if not mine.any():
            return {}
        self.largest[what] = max(self.largest[what], float((theirs - mine).norm() / mine.norm()))
        c = float(theirs @ mine / (mine @ mine))
        return {("factor", c): dict.fromkeys(names, abs(c - 1))} if abs(c - 1) > limit else {}

    def last_update(self, before: tuple) -> None:
        """Of the last step, where both recordings have the weights behind it."""
        try:
            if not self.one.steps[-1] == self.many.steps[-1] == self.step:
                return
            after = self.one.load("end"), self.many.load("end")
        except ValueError:
            self.notes.append(f"not judged: what step {self.step} changed in the weights: the training ended before "
                              "they were recorded (recorder.close() does it)")
            return
        self.step += 1
        self.a, self.b = ([{**each, **end} for each, end in zip(records, ends)] for records, ends in zip(before, after))
        self.broken("weights")
        if not self.found:
            self.updates(before, *after)

    def unclipped(self) -> tuple[dict, dict]:
        """The gradients of both recordings before clipping, by the norms that their ranks have clipped by."""
        a, b = self.as_recorded()
        one, many = ([each["norm"] for each in records if each["norm"] is not None] for records in (self.a, self.b))
        if not one or not many:
            return a, b
        totals = [sum(run.squares(records).values()) ** 0.5
                  for run, records in ((self.one, self.a), (self.many, self.b))]
        is_clipped = totals[0] < one[0] * (1 - 2e-6)
        clip_alike = is_clipped and max(many) - min(many) <= 1e-6 * max(many)
        if abs(totals[1] / (totals[0] or 1) - 1) < self.limit and not clip_alike:
            return a, b  # nothing was clipped, or one rank's norm is not what it has clipped by
        known = one[0] if is_clipped else many[0]
        if not is_clipped and totals[1] >= many[0] * (1 - 2e-6):
            return a, b
        largest = (totals[0] if is_clipped else totals[1]) * (1 + 1e-6 / known)  # torch divides by the norm + 1e-6
        for records, norms in ((self.a, one), (self.b, many)):
            for each in records:
                norm = each["norm"] if each["norm"] is not None else norms[0]
                scale = max(1.0, (norm + 1e-6) / largest)
                each["gradients"] = {name: None if vector is None else vector * scale
                                     for name, vector in each["gradients"].items()}
        return self.as_recorded()

    def as_recorded(self) -> tuple[dict, dict]:
        return (self.one.whole(self.one.held(self.a, "gradients"), self.one.summed),
                self.many.held(self.b, "gradients"))

    def gradients(self, before: tuple | None) -> None:
        self.limit = noise = self.noise(before)
        a, b = self.unclipped()
        b = {name: b[name] for name in self.names}
        total = sum(vector.norm() ** 2 for vector in a.values()) ** 0.5
        if not total:
            raise ValueError(f"step {self.step}: {self.one.folder} has no gradients but zeros: call recorder.step() "
                             "after backward and before zero_grad(), and see that the loss is not detached")
        first = NOISE[self.computed][0]
        floor = (0.1 * noise if before else 1e-2 * first) * total  # what weights' rounding changes is in all of them
        groups = self.groups(a, b, lambda name: noise, lambda name: floor, self.many.summed, first)
        groups = groups or self.together("gradients", a, self.many.whole(b, self.many.summed),
                                         max(0.2 * self.drift, ROUNDING["float64"] * bool(self.rounded)))
        if groups:
            self.explain(groups, a, b, before)
            return
        self.judge_norm(a)
        self.judge_settings()
        self.last_seen = a

    def say_limits(self) -> None:
        """What the yes is about, in numbers."""
        if self.found:
            return
        noise = NOISE[self.computed]
        self.notes.append(
            f"judged: gradients to {noise[0]:.0e} of their length in the first step ({self.limit:.0e} in the last), "
            f"updates to {max(self.limit, NOISE[self.updating][1]):.0e}; the largest differences of all together are "
            f"{self.largest['gradients']:.1g} and {self.largest['updates']:.1g}")
        if self.computed != self.dtype:
            self.notes.append(f"mixed precision was seen: weights in {self.dtype}, judged by {self.computed}'s noise")
        if self.rounded:
            worst = max(self.rounded, key=self.rounded.get)
            self.notes.append(f"{len(self.rounded)} parameters differ by up to {self.rounded[worst]:.1g} of their "
                              f"length, as rounding in float32 does, such as {worst}: something computes in float32")
        if self.hidden:
            fine = max(RESOLUTION[coarsest(self.one.info[name]["dtype"])] for name in self.hidden)
            self.notes.append(
                f"not judged: updates of {len(self.hidden)} of {len(self.names)} parameters: {self.dtype} hides less "
                f"than {2 * fine:.1g} of a weight, they changed by {max(self.hidden.values()):.1g} at most")
        if self.freed:
            self.notes.append(f"not judged: updates of {len(self.freed)} parameters, which ranks had freed")
        idle = [name for name in self.names if name not in self.last_seen or not self.last_seen[name].any()]
        if idle:
            self.notes.append(f"not judged: {len(idle)} parameters without a gradient in both, such as {idle[0]}")
        for what in ("loss", "norm"):
            if any(all(each[what] is None for each in records) for records in (self.a, self.b)):
                self.notes.append(f"not judged: the {what}, which was not recorded in both")
