"""What the ranks of a run have written, and which of its parameters is which one of another run."""

import collections
import pathlib
import re

import torch

FILE = re.compile(r"rank(\d+)_step(\d+)\.pt")


class Recording:
    """What the ranks of a run have written into `folder`. `aliases`: other names of tied parameters; `info`: name ->
    shape, dtype and so on; `parts`: name -> part -> the ranks that hold it; `untied`: names of which a rank has two
    parameters, where the other run has a tied one; `owners`: the ranks whose optimizer has it. Raises ValueError where
    a file is missing or cut off."""

    def __init__(self, folder: pathlib.Path, aliases: dict | None = None):
        self.folder = folder = pathlib.Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: name the one that Recorder was given")
        start = self.read(folder / "rank0_start.pt")
        self.world, self.summed, self.aliases = start["world"], start["summed"], aliases or start["aliases"]
        self.id, self.sizes = start["id"], start["sizes"]
        numbers = [set() for _ in range(self.world)]
        for found in map(FILE.fullmatch, (path.name for path in folder.iterdir())):
            if found and int(found[1]) < self.world:  # else a stray one
                numbers[int(found[1])].add(int(found[2]))
        self.steps, self.names = sorted(set.intersection(*numbers)), {}
        if not self.steps or {*self.steps} != set.union(*numbers):
            raise ValueError(f"{folder}: by rank, the recorded steps are {[sorted(each) for each in numbers]}: call "
                             "recorder.step() on every rank in every step")
        self.starts = [self.read(folder / f"rank{rank}_start.pt")["params"] for rank in range(self.world)]
        if self.steps[-1] - self.steps[0] >= len(self.steps):
            raise ValueError(f"{folder}: of the steps between {self.steps[0]} and {self.steps[-1]} only {self.steps} "
                             "are there: record them again")
        self.place()
        if not any(info["trained"] for info in self.info.values()):
            why = "all are frozen" if self.info else "Recorder was given none"
            raise ValueError(f"{folder} has no trained parameters ({why}): there is nothing to compare")

    def place(self) -> None:
        self.info, self.untied, self.owners = {}, {}, collections.defaultdict(list)
        self.parts = collections.defaultdict(lambda: collections.defaultdict(list))
        for rank, params in enumerate(self.starts):
            for raw, info in params.items():
                name = self.renamed_one(raw)
                if rank in self.parts[name][info["bounds"]]:
                    self.untied[name] = rank
                    continue
                self.parts[name][info["bounds"]].append(rank)
                self.info[name] = info
                self.owners[name] += [rank] * info["held"]

    @staticmethod
    def read(path: pathlib.Path) -> dict:
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except FileNotFoundError:
            raise ValueError(f"{path.parent} is no whole recording, {path.name} is missing: did every rank make a "
                             "Recorder, and call its step()?") from None
        except Exception as error:  # what torch raises depends on where a file is cut
            raise ValueError(f"{path} can't be read ({type(error).__name__}): is it cut off, or of another program? "
                             "Record again") from None
        if not isinstance(found, dict) or not found.keys() & {"id", "weights", "error"}:
            raise ValueError(f"{path} is of another program or version: record again")
        if "error" in found:
            raise ValueError(f"{path.stem.replace('_', ' could not record ')}: {found['error']}")
        return found

    def check(self, other: "Recording") -> list[str]:
        """Names the parameters of `other` as this one's. Raises ValueError where the recordings are of unlike models,
        dtypes or steps, or one and the same. Returns what is to be told."""
        wrong = "these recordings do not belong together:"
        if self.id == other.id:
            raise ValueError(f"{self.folder} and {other.folder} are the same recording: compare two runs")
        if not {*self.steps} & {*other.steps}:
            raise ValueError(f"{wrong} steps {self.steps} and {other.steps}")
        told = other.match(self)
        self.absent = [name for name in self.info if name not in other.info]
        if not other.info.keys() < self.info.keys():
            self.absent = []
        for name in [name for name in {**self.info, **other.info} if name not in self.absent]:
            for words in ("shape", "dtype", "trained"):
                a, b = (each.info[name][words] if name in each.info else "absent" for each in (self, other))
                if a != b:
                    raise ValueError(
                        f"{wrong} the {words} of {name} is {a} in {self.folder}, and {b} in {other.folder}")
        return told

    def match(self, other: "Recording") -> list[str]:
        """Takes the names of `other`, where wrappers have put words before or into this one's."""
        known = {**{name: info["shape"] for name, info in other.info.items()}, **{
            name: other.info[first]["shape"] for name, first in other.aliases.items() if first in other.info}}
        own = {raw: info["shape"] for params in self.starts for raw, info in params.items()}
        self.names = match(own, known)
        self.place()
        changed = [(raw, name) for raw, name in self.names.items() if raw != name]
        return [f"{len(changed)} names were matched by their longest common rest: {changed[0][0]} is "
                f"{changed[0][1]}"] if changed else []

    def renamed_one(self, raw: str) -> str:
        name = self.names.get(raw, raw)
        return self.aliases.get(name, name)

    def renamed(self, found: dict) -> dict:
        return {self.renamed_one(raw): found[raw] for raw in reversed(found)}  # of untied ones the first

    def load(self, step: int | str) -> list[dict]:
        """By rank. `step` is "end" for the weights behind the last step."""
        what = step if step == "end" else f"step{step}"
        records = [self.read(self.folder / f"rank{rank}_{what}.pt") for rank in range(self.world)]
        for each in records:
            for kind in {"gradients", "weights"} & each.keys():
                sizes = each[kind]["sizes"]
                vectors = iter(each[kind]["numbers"].split([size for size in sizes.values() if size is not None]))
                each[kind] = {name: None if size is None else next(vectors) for name, size in sizes.items()}
            for kind in {"gradients", "weights", "squares", "groups"} & each.keys():
                each[kind] = self.renamed(each[kind])
        return records

    def held(self, records: list[dict], kind: str) -> dict[str, dict]:
        """name -> part -> rank -> sketch."""
        return {name: {part: {rank: vector for rank in ranks if (vector := records[rank][kind][name]) is not None}
                       for part, ranks in parts.items()} for name, parts in self.parts.items()}

    def squares(self, records: list[dict]) -> dict[str, float]:
        """name -> the square of its gradient's length, as it was recorded."""
        return {name: sum(sum(records[rank]["squares"][name] for rank in ranks) / (1 if self.summed else len(ranks))
                          for ranks in parts.values()) for name, parts in self.parts.items()}

    def whole(self, held: dict, summed: bool = False) -> dict:
        """name -> the sketch of all parts, which add up; of replicas the mean counts. Without what no rank has."""
        found = {}
        for name, parts in held.items():
            vectors = [ranks for ranks in parts.values() if ranks]
            if len(vectors) == 1 == len(vectors[0]):
                found[name] = next(iter(vectors[0].values()))
            elif vectors:
                found[name] = sum(sum(ranks.values()) / (1 if summed else len(ranks)) for ranks in vectors)
        return found


def match(own: dict[str, tuple], known: dict[str, tuple]) -> dict[str, str]:
    """name -> the known name that it has most words in common with, from the right, then from the left, and the shape.
    Whatever a wrapper is called: where all fit without the words that only one side has, or without the first, they are
    these."""
    own_words, known_words = ({word for name in names for word in name.split(".")} for names in (own, known))

    def familiar(name: str) -> str:
        return ".".join(word for word in name.split(".") if word in own_words & known_words)

    for drop_own, drop_known in ((str, str), (familiar, familiar), (rest, str), (str, rest)):
        short = {drop_known(name): name for name in known}
        found = {name: short[drop_own(name)] for name in own if drop_own(name) in short}
        if len(found) == len({*found.values()}) == len(own) and len(short) == len(known):
            return found
    found = {name: name for name in own if name in known and own[name] == known[name]}
    missing, free = ([name for name in names if name not in found] for names in (own, known))
    pairs = sorted(((likeness(a, b), a, b) for a in missing for b in free if own[a] == known[b]), reverse=True)
    for (alike, *_), a, b in pairs if len(missing) * len(free) < 4_000_000 else ():
        if alike and a not in found and b in free:
            found[a] = b
            free.remove(b)
    return found


def rest(name: str) -> str:
    return name.partition(".")[2]


def likeness(a: str, b: str) -> tuple:
    a, b = a.split("."), b.split(".")
    least = min(len(a), len(b))
    right = next((i for i in range(least) if a[-1 - i] != b[-1 - i]), least)
    left = next((i for i in range(least) if a[i] != b[i]), least)
    return (right and min(least, right + left), right == least, -abs(len(a) - len(b)))
