"""The content of cluster.json, checked: machines, network and model, with the sums that a simulation asks for.

Units: seconds, bytes, bytes a second, samples. A stage is a range of modules (first, stop):

    modules     embedding | decoder_layers.0 ... decoder_layers.7 | final_norm final_proj      of the model, in order
    layers      [5, 3]: the first stage has the embedding and five layers, the last one three layers, norm and head
"""

import json
import math
from itertools import accumulate
from typing import NamedTuple

from utils import UserError

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # an int8 row travels with one float32
GRADIENT_ROW = 1024  # numbers that share a scale where gradients travel as int8


class Link(NamedTuple):
    """From one machine to another."""

    latency: float
    bandwidth: float


class Machine:
    """One rank. `passed["F"][size][k]`: seconds of the first k modules for a micro-batch, forward; "B": backward."""

    def __init__(self, entry: dict, rank: int, num_modules: int):
        where = f"machine {rank}"
        self.host = str(entry.get("host", f"machine{rank}"))
        self.free_memory = number(entry, "free_memory", where)
        self.optimizer_seconds = number(entry, "optimizer_seconds", where)  # of a parameter
        self.passed: dict[str, dict[int, list[float]]] = {"F": {}, "B": {}}
        for kind, name in ("F", "forward"), ("B", "backward"):
            for size, seconds in field(entry, name, dict, where).items():
                if not str(size).isdigit() or int(size) < 1:
                    raise broken(f"{name!r} has the micro-batch size {size!r}, no positive number of samples", where)
                if not isinstance(seconds, list) or len(seconds) != num_modules:
                    raise broken(f"{name!r} of micro-batch size {size} should have the seconds of each of the "
                                 f"{num_modules} modules", where)
                times = [number({name: value}, name, where) for value in seconds]
                self.passed[kind][int(size)] = list(accumulate(times, initial=0.0))


class Cluster:
    """cluster.json as Python objects. Raises UserError that names the field that is missing or makes no sense."""

    def __init__(self, data: dict):
        if not isinstance(data, dict):
            raise broken(f"it holds a {type(data).__name__}, not a dictionary")
        self.model_name, self.dtype = field(data, "model_name", str), field(data, "dtype", str)
        if self.dtype not in NUMBER_BYTES:
            raise broken(f"dtype {self.dtype!r} is none of {', '.join(NUMBER_BYTES)}")
        self.seq_len, self.hidden_bytes = int(number(data, "seq_len")), number(data, "hidden_bytes")
        self.master_bytes = max(4, NUMBER_BYTES[self.dtype])  # of a parameter, a gradient, a moment
        modules = field(data, "modules", list)
        self.names = [field(module, "name", str, f"module {i}") for i, module in enumerate(modules)]
        numbered = [i for i, name in enumerate(self.names) if name.rpartition(".")[2].isdigit()]
        if not numbered or numbered != list(range(numbered[0], numbered[-1] + 1)):
            raise broken(f"modules {self.names} have no row of numbered layers")
        self.first_layer, self.num_layers = numbered[0], len(numbered)
        self.parameters = [int(number(module, "parameters", name)) for module, name in zip(modules, self.names)]
        saved = [number(module, "saved_bytes", name) for module, name in zip(modules, self.names)]
        self.tied_parameters = self.parameters[0] if data.get("tied", False) else 0
        if self.tied_parameters:  # counted once for the two ends, whether or not the head's entry repeats it
            self.parameters[-1] -= min(self.parameters[-1], self.tied_parameters)
            self.parameters[0] = 0
        self.parameters_before = list(accumulate(self.parameters, initial=0))
        self.saved_before = list(accumulate(saved, initial=0.0))
        self.machines = [Machine(entry, rank, len(modules))
                         for rank, entry in enumerate(field(data, "machines", list))]
        self.links = read_links(field(data, "links", list), len(self.machines))
        measured = [set(times) for machine in self.machines for times in machine.passed.values()]
        self.sizes = sorted(set.intersection(*measured)) if measured else []
        if not self.sizes:
            raise broken(f"its {len(self.machines)} machines have no micro-batch size in common")

    def stages(self, layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """The modules of each stage, as (first, stop)."""
        ends = [self.first_layer + count for count in accumulate(layers)]
        return list(zip([0, *ends[:-1]], [*ends[:-1], len(self.names)]))

    def seconds(self, rank: int, kind: str, size: int, stage: tuple[int, int]) -> float:
        """Of one forward or backward action of a stage."""
        passed = self.machines[rank].passed[kind][size]
        return passed[stage[1]] - passed[stage[0]]

    def parameters_of(self, stage: tuple[int, int]) -> int:
        """Numbers that a stage holds; the tied one counts on the first and on the last stage."""
        tied = self.tied_parameters if stage[0] == 0 or stage[1] == len(self.names) else 0
        return self.parameters_before[stage[1]] - self.parameters_before[stage[0]] + tied

    def saved_bytes(self, stage: tuple[int, int], size: int) -> float:
        """Activations of a micro-batch that backward needs."""
        return size * (self.saved_before[stage[1]] - self.saved_before[stage[0]])

    def message_bytes(self, size: int, wire_dtype: str | None) -> float:
        """Hidden states of a micro-batch on the wire."""
        numbers = size * self.hidden_bytes / NUMBER_BYTES[self.dtype]
        rows = size * self.seq_len if wire_dtype == "int8" else 0
        return numbers * NUMBER_BYTES[wire_dtype or self.dtype] + rows * SCALE_BYTES

    def gradient_bytes(self, parameters: float, wire_dtype: str | None) -> float:
        """Gradients of so many parameters on the wire."""
        scales = parameters / GRADIENT_ROW * SCALE_BYTES if wire_dtype == "int8" else 0
        return parameters * (NUMBER_BYTES[wire_dtype] if wire_dtype else self.master_bytes) + scales


def read_links(rows: list, num_machines: int) -> list[list[Link | None]]:
    """links[i][j], from i to j; None on the diagonal."""
    if len(rows) != num_machines or any(not isinstance(row, list) or len(row) != num_machines for row in rows):
        raise broken(f"'links' should be {num_machines} rows of {num_machines} links")
    links: list[list[Link | None]] = [[None] * num_machines for _ in rows]
    for i, row in enumerate(rows):
        for j, link in enumerate(row):
            if i == j:
                continue
            where = f"the link from machine {i} to machine {j}"
            if not isinstance(link, dict):
                raise broken("it is missing", where)
            links[i][j] = Link(number(link, "latency", where), number(link, "bandwidth", where))
            if links[i][j].bandwidth <= 0:
                raise broken(f"bandwidth {links[i][j].bandwidth}", where)
    return links


def broken(what: str, where: str = "") -> UserError:
    return UserError(f"cluster.json{', ' + where if where else ''}: {what}: measure again with plan.py --measure")


def field(entry: dict, name: str, kind: type, where: str = "") -> object:
    if not isinstance(entry, dict) or name not in entry:
        raise broken(f"{name!r} is missing", where)
    if not isinstance(entry[name], kind):
        raise broken(f"{name!r} should be a {kind.__name__}, but is {entry[name]!r:.60}", where)
    return entry[name]


def number(entry: dict, name: str, where: str = "") -> float:
    """A finite number, zero or more."""
    value = field(entry, name, object, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise broken(f"{name!r} should be a number, zero or more, but is {value!r:.60}", where)
    return value


def load_cluster(path: str) -> Cluster:
    try:
        with open(path, encoding="utf-8") as file:
            return Cluster(json.load(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON file ({error}): measure again with plan.py --measure {path}") from None
