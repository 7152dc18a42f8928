"""The content of cluster.json, checked: machines, network and model, with the sums that a simulation asks for.

Units: seconds, bytes, bytes a second, samples. A stage is a range of modules (first, stop):

    modules     embedding | decoder_layers.0 ... decoder_layers.7 | final_norm final_proj      of the model, in order
    layers      [5, 3]: the first stage has the embedding and five layers, the last one three layers, norm and head
"""

import json
import math
import types
from itertools import accumulate
from typing import NamedTuple

from utils import UserError

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # an int8 row travels with one float32
GRADIENT_ROW = 1024  # numbers that share a scale where gradients travel as int8
MODEL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "tie_word_embeddings")  # what makes a model another one to a plan

# The fields of the file and of its parts. A float stands for any finite number, zero or more.
FILE = {"model_name": str, "model": dict, "dtype": str, "seq_len": float, "hosts": list, "flags": dict,
        "modules": list, "machines": list, "links": list}
MODULE = {"name": str, "parameters": float, "saved_bytes": float}
MACHINE = {"free_memory": float, "optimizer_seconds": float, "forward": dict, "backward": dict}
LINK = {"latency": float, "bandwidth": float}
KINDS = {str: "a text", dict: "a dictionary", list: "a list", float: "a number, zero or more"}


class Link(NamedTuple):
    """From one machine to another."""

    latency: float
    bandwidth: float


class Machine(NamedTuple):
    """One rank. `passed["F"][size][k]`: seconds of the first k modules for a micro-batch, forward; "B": backward;
    "R": backward that first computes each decoder layer once more."""

    host: str
    free_memory: float
    optimizer_seconds: float  # of a parameter
    passed: dict[str, dict[int, list[float]]]


class Cluster:
    """cluster.json as Python objects. Raises UserError that names the field that is missing or makes no sense.

    `model`: the fields MODEL of its configuration. `flags`: those of --measure that training has to be given as well.
    """

    def __init__(self, data: dict):
        file = checked(data, FILE)
        self.model_name, self.dtype, self.seq_len = file.model_name, file.dtype, int(file.seq_len)
        self.model, self.flags, self.hosts = file.model, file.flags, file.hosts
        if self.dtype not in NUMBER_BYTES:
            raise broken(f"dtype {self.dtype!r} is none of {', '.join(NUMBER_BYTES)}")
        if missing := [name for name in MODEL if name not in self.model]:
            raise broken(f"'model' has no {', '.join(missing)}")
        if not all(isinstance(host, str) for host in self.hosts):
            raise broken(f"hosts {self.hosts} are not all names")
        if not all(isinstance(self.model[name], (int, float, str)) for name in MODEL):
            raise broken(f"'model' has odd values: {self.model}")
        self.hidden_bytes = self.seq_len * self.model["hidden_size"] * NUMBER_BYTES[self.dtype]
        self.master_bytes = max(4, NUMBER_BYTES[self.dtype])  # of a parameter, a gradient, a moment
        self.read_modules(file.modules)
        if not len(file.hosts) == len(file.machines) == len(file.links) > 0:
            raise broken(f"{len(file.hosts)} hosts, {len(file.machines)} machines and {len(file.links)} rows of links")
        self.machines = [self.read_machine(entry, rank) for rank, entry in enumerate(file.machines)]
        self.links = [[None if i == j else read_link(row, i, j) for j in range(len(file.links))]
                      for i, row in enumerate(file.links)]  # links[i][j], from i to j
        self.sizes = sorted(set.intersection(*(set(machine.passed["R"]) for machine in self.machines)))
        if not self.sizes:
            raise broken(f"its {len(self.machines)} machines have no micro-batch size in common")

    def read_modules(self, entries: list) -> None:
        modules = [checked(entry, MODULE, f"module {i}") for i, entry in enumerate(entries)]
        self.names = [module.name for module in modules]
        numbered = [i for i, name in enumerate(self.names) if name.rpartition(".")[2].isdigit()]
        if not numbered or numbered != list(range(numbered[0], numbered[-1] + 1)):
            raise broken(f"modules {self.names} have no row of numbered layers")
        self.first_layer, self.num_layers = numbered[0], len(numbered)
        self.parameters = [int(module.parameters) for module in modules]
        self.tied_parameters = self.parameters[0] if self.model["tie_word_embeddings"] else 0
        if self.tied_parameters:  # counted once for the two ends, whether or not the head's entry repeats it
            self.parameters[-1] -= min(self.parameters[-1], self.tied_parameters)
            self.parameters[0] = 0
        self.parameters_before = list(accumulate(self.parameters, initial=0))
        saved = [module.saved_bytes for module in modules]
        inputs = [self.hidden_bytes if i in numbered else saved[i] for i in range(len(saved))]
        self.saved_before = {"B": list(accumulate(saved, initial=0.0)), "R": list(accumulate(inputs, initial=0.0))}
        self.layer_bytes = max(saved[i] for i in numbered)

    def read_machine(self, entry: dict, rank: int) -> Machine:
        where, passed = f"machine {rank}", {}
        machine = checked(entry, MACHINE, where)
        for kind, name in ("F", "forward"), ("B", "backward"):
            passed[kind] = {}
            for size, seconds in getattr(machine, name).items():
                if not str(size).isdigit() or int(size) < 1 or not isinstance(seconds, list) \
                        or len(seconds) != len(self.names) or not all(map(is_number, seconds)):
                    raise broken(f"{name!r} of micro-batch size {size!r} should have a number of samples, and the "
                                 f"seconds of each of the {len(self.names)} modules", where)
                passed[kind][int(size)] = list(accumulate(seconds, initial=0.0))
        first, stop = self.first_layer, self.first_layer + self.num_layers
        passed["R"] = {size: [before + forward[min(max(k, first), stop)] - forward[first]
                              for k, before in enumerate(passed["B"][size])]
                       for size, forward in passed["F"].items() if size in passed["B"]}
        return Machine(str(self.hosts[rank]), machine.free_memory, machine.optimizer_seconds, passed)

    def stages(self, layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """The modules of each stage, as (first, stop)."""
        ends = [self.first_layer + count for count in accumulate(layers)]
        return list(zip([0, *ends[:-1]], [*ends[:-1], len(self.names)]))

    def seconds(self, rank: int, size: int, stage: tuple[int, int], kinds: str) -> float:
        """Of a stage for one micro-batch, the sum of these kinds: see Machine."""
        passed = self.machines[rank].passed
        return sum(passed[kind][size][stage[1]] - passed[kind][size][stage[0]] for kind in kinds)

    def layer_seconds(self, machines: tuple[int, ...], size: int, kinds: str) -> tuple[list[float], list[float]]:
        """Of the stages on these machines: seconds of one layer, and of the model's end that a stage has besides."""
        first, stop = self.first_layer, self.first_layer + self.num_layers
        besides = [0.0] * len(machines)
        besides[0] += self.seconds(machines[0], size, (0, first), kinds)
        besides[-1] += self.seconds(machines[-1], size, (stop, len(self.names)), kinds)
        return [self.seconds(rank, size, (first, stop), kinds) / self.num_layers for rank in machines], besides

    def parameters_of(self, stage: tuple[int, int]) -> int:
        """Numbers that a stage holds; the tied one counts on the first and on the last stage."""
        tied = self.tied_parameters if stage[0] == 0 or stage[1] == len(self.names) else 0
        return self.parameters_before[stage[1]] - self.parameters_before[stage[0]] + tied

    def saved_bytes(self, stage: tuple[int, int], size: int, live: int, backward: str) -> float:
        """Activations at most that so many live micro-batches keep for a backward (B).

        If it is R, they keep the inputs of decoder layers, and one layer at a time is computed once more, for which
        time the norm and the head keep nothing.
        """
        before, stop = self.saved_before[backward], self.first_layer + self.num_layers
        saved = live * (before[stage[1]] - before[stage[0]])
        if backward == "R":
            behind = before[max(stage[1], stop)] - before[stop]
            saved += max(0.0, self.layer_bytes - self.hidden_bytes - behind)
        return size * saved

    def message_bytes(self, size: int, wire_dtype: str | None) -> float:
        """Hidden states of a micro-batch on the wire."""
        numbers = size * self.hidden_bytes / NUMBER_BYTES[self.dtype]
        rows = size * self.seq_len if wire_dtype == "int8" else 0
        return numbers * NUMBER_BYTES[wire_dtype or self.dtype] + rows * SCALE_BYTES

    def gradient_bytes(self, parameters: float, wire_dtype: str | None) -> float:
        """Gradients of so many parameters on the wire."""
        scales = parameters / GRADIENT_ROW * SCALE_BYTES if wire_dtype == "int8" else 0
        return parameters * (NUMBER_BYTES[wire_dtype] if wire_dtype else self.master_bytes) + scales


def read_link(row: list, i: int, j: int) -> Link:
    where = f"the link from machine {i} to machine {j}"
    link = checked(row[j] if isinstance(row, list) and j < len(row) else None, LINK, where)
    if link.bandwidth == 0:
        raise broken("bandwidth 0", where)
    return Link(link.latency, link.bandwidth)


def broken(what: str, where: str = "") -> UserError:
    return UserError(f"cluster.json{', ' + where if where else ''}: {what}: measure again with plan.py --measure")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def checked(entry: dict, kinds: dict[str, type], where: str = "") -> types.SimpleNamespace:
    """The fields of a part of the file. Raises UserError for the first that is missing or of another kind."""
    for name, kind in kinds.items():
        if not isinstance(entry, dict) or name not in entry:
            raise broken(f"{name!r} is missing", where)
        if not (is_number(entry[name]) if kind is float else isinstance(entry[name], kind)):
            raise broken(f"{name!r} should be {KINDS[kind]}, but is {entry[name]!r:.60}", where)
    return types.SimpleNamespace(**{name: entry[name] for name in kinds})


def load_cluster(path: str) -> Cluster:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON ({error}): write it with "
                        "plan.py --measure") from None
    return Cluster(data)
