"""The content of cluster.json, checked: machines, network and model, with the sums that a simulation asks for. And the
terms of a plan for them.

Units: seconds, bytes, bytes a second, samples. A stage is a range of modules (first, stop):

    modules     embedding | decoder_layers.0 ... decoder_layers.7 | final_norm final_proj      of the model, in order
    layers      [5, 3]: the first stage has the embedding and five layers, the last one three layers, norm and head

A module's `parameters` are trained: each takes a weight, a gradient and AdamW's two moments. `frozen_parameters` take a
weight of `frozen_dtype` and nothing else; packed ones count by their bytes. Fields in no older files are optional.
"""

import copy
import math
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ranks.files import read_json
from utils import ROOT, UserError

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}

CLUSTER_JSON = os.path.join(ROOT, "cluster.json")  # plan.py --measure writes it on the machine that starts it

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # an int8 row travels with one float32
GRADIENT_ROW = 1024  # numbers that share a scale where gradients travel as int8

MODEL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "tie_word_embeddings")  # what makes it another model


class Link(NamedTuple):
    """From one machine to another."""

    latency: float
    bandwidth: float


class Machine(NamedTuple):
    """One rank. `passed["F"][size][k]`: seconds of the first k modules for a micro-batch, forward; "B": backward;
    "R": backward that first computes each decoder layer once more."""

    host: str
    free_memory: float  # when the process had taken process_memory already
    optimizer_seconds: float  # of a parameter
    passed: dict[str, dict[int, list[float]]]
    process_memory: float = 0.0


class Pipeline(NamedTuple):
    """One pipeline of a plan: its machines (ranks) stage by stage, decoder layers of each, micro-batches a step."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    num_microbatches: int


class Candidate(NamedTuple):
    """`replicas`: how many copies of these pipelines there are, on like machines; `replica_link`: between them."""

    pipelines: tuple[Pipeline, ...]
    micro_batch_size: int
    replicas: int = 1
    replica_link: Link | None = None


class Setting(NamedTuple):
    """What the plans of one search have in common. The wire's dtypes: None, float32, bfloat16 or int8."""

    schedule: str = "1f1b"  # one of SCHEDULES
    wire_dtype: str | None = None
    gradient_wire_dtype: str | None = None
    recompute: bool = False  # decoder layers are computed once more in backward

    @property
    def kinds(self) -> str:
        """Forward and backward, as in Machine.passed."""
        return "FR" if self.recompute else "FB"

    def for_pipelines(self, pipelines: Sequence[Sequence[int]]) -> "Setting":
        """Without the dtype of what is never sent between these pipelines of layers, or between their stages."""
        return self._replace(wire_dtype=self.wire_dtype if any(len(layers) > 1 for layers in pipelines) else None,
                             gradient_wire_dtype=self.gradient_wire_dtype if len(pipelines) > 1 else None)


def setting_of(plan: dict) -> Setting:
    """That of plan.json, whose fields have the same names."""
    return Setting(**{name: plan[name] for name in Setting._fields if name in plan})


class Cluster:
    """cluster.json as Python objects. Raises UserError that names the field that is missing or makes no sense.

    `model`: the fields MODEL of its configuration. `flags`: those of --measure that training needs, too.
    """

    def __init__(self, data: dict):
        self.model_name, self.model, self.dtype, self.flags, self.hosts = (
            data[name] for name in ("model_name", "model", "dtype", "flags", "hosts"))
        [self.seq_len], [hidden_size] = numbers(data, "", "seq_len"), numbers(self.model, "model", "hidden_size")
        self.hidden_number_bytes, self.frozen_bytes = (
            NUMBER_BYTES[data.get(name, self.dtype)] for name in ("hidden_dtype", "frozen_dtype"))
        self.hidden_bytes = self.seq_len * hidden_size * self.hidden_number_bytes
        self.master_bytes = max(4, NUMBER_BYTES[self.dtype])  # of a parameter, a gradient, a moment
        self.read_modules(data["modules"])
        n = len(self.hosts)
        if not len(data["machines"]) == len(data["links"]) == n > 0 or any(len(row) != n for row in data["links"]):
            raise broken(f"{n} hosts, {len(data['machines'])} machines and {len(data['links'])} rows of links")
        self.machines = [self.read_machine(entry, rank) for rank, entry in enumerate(data["machines"])]
        self.links = [[None if i == j else read_link(link, i, j) for j, link in enumerate(row)]
                      for i, row in enumerate(data["links"])]  # from i to j
        self.sizes = sorted(set.intersection(*(set(machine.passed["R"]) for machine in self.machines)))
        if not self.sizes:
            raise broken(f"its {n} machines have no micro-batch size in common")

    def read_modules(self, entries: list) -> None:
        self.names = [entry["name"] for entry in entries]
        numbered = [i for i, name in enumerate(self.names) if name.rpartition(".")[2].isdigit()]
        if not numbered or numbered != list(range(numbered[0], numbered[-1] + 1)):
            raise broken(f"modules {self.names} have no row of numbered layers")
        self.layers, self.num_layers = (numbered[0], numbered[-1] + 1), len(numbered)  # as a stage; decoder layers
        parameters, saved, frozen, *working = zip(*(
            numbers(entry, f"module {i}", "parameters", "saved_bytes", frozen_parameters=0, working_bytes=0.0,
                    fixed_bytes=0.0) for i, entry in enumerate(entries)))
        self.parameters, self.tied_parameters = self.without_tied([*parameters])
        frozen, self.tied_frozen = self.without_tied([*frozen])
        self.parameters_before, self.frozen_before = (
            list(accumulate(counts, initial=0)) for counts in (self.parameters, frozen))
        self.working = [*zip(*working)]  # of a sample, and fixed
        inputs = [self.hidden_bytes if i in numbered else saved[i] for i in range(len(saved))]
        self.saved_before = {"B": list(accumulate(saved, initial=0.0)), "R": list(accumulate(inputs, initial=0.0))}
        self.layer_bytes = max(saved[i] for i in numbered)

    def without_tied(self, parameters: list[int]) -> tuple[list[int], int]:
        """The numbers without those of a tied embedding, and how many these are. They count once for the two ends,
        whether or not the head's entry repeats them."""
        tied = parameters[0] if self.model["tie_word_embeddings"] else 0
        if tied:
            parameters[-1] -= min(parameters[-1], tied)
            parameters[0] = 0
        return parameters, tied

    def read_machine(self, entry: dict, rank: int) -> Machine:
        where, passed = f"machine {rank}", {}
        for kind, name in ("F", "forward"), ("B", "backward"):
            passed[kind] = {}
            for size, seconds in entry[name].items():
                if len(seconds) != len(self.names) or not all(map(is_number, seconds)):
                    raise broken(f"{name!r} of micro-batch size {size!r} should have the seconds of each of the "
                                 f"{len(self.names)} modules", where)
                passed[kind][int(size)] = list(accumulate(seconds, initial=0.0))
        first, stop = self.layers
        passed["R"] = {size: [before + forward[min(max(k, first), stop)] - forward[first]
                              for k, before in enumerate(passed["B"][size])]
                       for size, forward in passed["F"].items() if size in passed["B"]}
        free, optimizer, process = numbers(entry, where, "free_memory", "optimizer_seconds", process_memory=0.0)
        return Machine(self.hosts[rank], free, optimizer, passed, process)

    def only(self, ranks: list[int]) -> "Cluster":
        """The cluster of some of these machines, in this order. Raises UserError where there are none."""
        if not ranks:
            raise broken("none of its hosts is here")
        some = copy.copy(self)
        some.hosts, some.machines = [self.hosts[rank] for rank in ranks], [self.machines[rank] for rank in ranks]
        some.links = [[self.links[a][b] for b in ranks] for a in ranks]
        return some

    def stages(self, layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """The modules of each stage, as (first, stop)."""
        ends = [self.layers[0] + count for count in accumulate(layers)]
        return list(zip([0, *ends[:-1]], [*ends[:-1], len(self.names)]))

    def seconds(self, rank: int, size: int, stage: tuple[int, int], kinds: str) -> float:
        """Of a stage for one micro-batch, the sum of these kinds: see Machine."""
        passed = self.machines[rank].passed
        return sum(passed[kind][size][stage[1]] - passed[kind][size][stage[0]] for kind in kinds)

    def optimizer_seconds(self, rank: int, stage: tuple[int, int]) -> float:
        """The optimizer step of a stage, which starts when the loss of the step before is known."""
        return self.parameters_of(stage) * self.machines[rank].optimizer_seconds

    def layer_seconds(self, rank: int, size: int, kinds: str) -> tuple[float, float, float]:
        """Of what is before the decoder layers, of one of these, and of what is behind, as layers_by_speed takes it."""
        (first, stop), end = self.layers, len(self.names)
        before, layers, behind = (self.seconds(rank, size, part, kinds)
                                  for part in ((0, first), self.layers, (stop, end)))
        return before, layers / self.num_layers, behind

    def is_end(self, stage: tuple[int, int]) -> bool:
        """Whether a stage has the embedding or the head, and so the tied parameters."""
        return stage[0] == 0 or stage[1] == len(self.names)

    def parameters_of(self, stage: tuple[int, int]) -> int:
        """Numbers that a stage trains; the tied one counts on the first and on the last stage."""
        return self.parameters_before[stage[1]] - self.parameters_before[stage[0]] \
            + self.tied_parameters * self.is_end(stage)

    def weight_bytes(self, stage: tuple[int, int]) -> float:
        """What a stage's parameters take: of a trained one the weight, its gradient and AdamW's two moments, in the
        activations' dtype another copy of the weight where that is narrower, but of an embedding that is only looked
        up in; of a frozen one the weight."""
        copy, looked_up = NUMBER_BYTES[self.dtype], 0
        if stage[0] == 0 and not (self.tied_parameters and stage[1] == len(self.names)):
            looked_up = self.tied_parameters or self.parameters_before[self.layers[0]]
        frozen = self.frozen_before[stage[1]] - self.frozen_before[stage[0]] + self.tied_frozen * self.is_end(stage)
        copies = (self.parameters_of(stage) - looked_up) * (copy if copy < self.master_bytes else 0)
        return 4 * self.master_bytes * self.parameters_of(stage) + copies + self.frozen_bytes * frozen

    def activation_bytes(self, stage: tuple[int, int], size: int, live: int, backward: str) -> float:
        """Activations at most: what so many live micro-batches keep for a backward (B), and what the one that is
        computed needs besides.

        If it is R, they keep the inputs of decoder layers, and one layer at a time is computed once more, for which
        time the norm and the head keep nothing.
        """
        before, (first, stop) = self.saved_before[backward], self.layers
        working = [size * a_sample + fixed for a_sample, fixed in self.working]
        ends = [working[i] for i in range(*stage) if not first <= i < stop]
        layer = max((working[i] for i in range(*stage) if first <= i < stop), default=0.0)
        if backward == "R":
            behind = before[max(stage[1], stop)] - before[stop]
            layer += max(0.0, size * (self.layer_bytes - self.hidden_bytes - behind))
        return live * size * (before[stage[1]] - before[stage[0]]) + max(layer, *ends, 0.0)

    def message_bytes(self, size: int, wire_dtype: str | None) -> float:
        """Hidden states of a micro-batch on the wire."""
        numbers = size * self.hidden_bytes / self.hidden_number_bytes
        return wire_bytes(numbers, self.hidden_number_bytes, wire_dtype, size * self.seq_len)

    def gradient_bytes(self, parameters: float, wire_dtype: str | None) -> float:
        """Gradients of so many parameters on the wire."""
        return wire_bytes(parameters, self.master_bytes, wire_dtype, parameters / GRADIENT_ROW)


def wire_bytes(numbers: float, own_bytes: int, wire_dtype: str | None, rows: float) -> float:
    return numbers * NUMBER_BYTES.get(wire_dtype, own_bytes) + (rows * SCALE_BYTES if wire_dtype == "int8" else 0)


def read_link(entry: dict, i: int, j: int) -> Link:
    link = Link(*numbers(entry, where := f"the link from machine {i} to machine {j}", *Link._fields))
    if link.bandwidth == 0:
        raise broken("bandwidth 0", where)
    return link


def broken(what: str, where: str = "") -> UserError:
    return UserError(f"cluster.json{', ' + where if where else ''}: {what}: measure again with plan.py --measure")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def numbers(entry: dict, where: str, *names: str, **optional: float) -> list[float]:
    """These fields of a part of the file, of which `optional` may be missing. Raises UserError for the first that is no
    number, zero or more."""
    found = {**optional, **{name: entry[name] for name in (*names, *optional) if name in entry}}
    for name in (*names, *optional):
        if not is_number(found.get(name)):
            raise broken(f"{name!r} should be a number, zero or more, but is {found.get(name)!r:.60}", where)
    return [found[name] for name in (*names, *optional)]


def model_facts(config) -> dict[str, int | bool]:
    """The fields MODEL of a configuration, ours or one of transformers; 0 for one that its family does not have."""
    facts = {name: getattr(config, name, None) or 0 for name in MODEL}
    return {**facts, "tie_word_embeddings": bool(facts["tie_word_embeddings"])}


def load_cluster(path: str) -> Cluster:
    return read_json(path, Cluster, "write it with plan.py --measure")
