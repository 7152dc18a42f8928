"""How fast each machine computes each module, and how fast the links between machines are: cluster.json, for plan.py.

    torchrun ... plan.py --measure cluster.json

Every rank builds one module at a time, times it as a stage would run it, and frees it: the embedding, one decoder layer
(all are alike), the final norm, the projection with the loss. So no machine has to hold the model. All ranks compute at
once, as they will in training. This is for our Llama; family_clock.py measures the models of transformers, and LoRA.

The time that measuring takes is given, and shared out to modules, micro-batch sizes and links. What takes long is
repeated less often, and sizes for which no time is left are left out.
"""

import functools
import math
import socket
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import model
from model import (
    DecoderLayer, Embedding, Linear, RMSNorm, cast_weights_once, check_config, cross_entropy, rotary_tables,
)
from planning.links import measure_links, wait_for
from planning.machines import model_facts
from planning.module_memory import load_code, peak_bytes, process_bytes, saved_bytes
from machine_facts import free_memory, host_names, this_host
from utils import UserError

BLOCKS = 5
LINKS = 1 / 3  # of the time
OPTIMIZER = 0.1  # of the rest
MICRO_BATCH_SIZES = (1, 2, 4, 8)
TRAINING_BYTES = 40e6  # that a process on a CPU takes after measuring, besides its model: data, threads, communication


def measure_cluster(config, seq_len: int, dtype: torch.dtype, device: torch.device, model_name: str,
                    sizes: tuple[int, ...] = MICRO_BATCH_SIZES, seconds: float = 30.0) -> dict:
    """measure_with for our Llama of this configuration."""
    check_config(config)
    return measure_with(ModuleClock(config, seq_len, dtype, device), model_name, sizes, seconds)


def measure_with(clock: "ModuleClock", model_name: str, sizes: tuple[int, ...] = MICRO_BATCH_SIZES,
                 seconds: float = 30.0) -> dict:
    """The content of cluster.json on every rank, but for the flags. Collective. Takes about so many `seconds`.

    `sizes`: micro-batch sizes to time, in samples of clock.seq_len tokens.
    """
    n = dist.get_world_size()
    for_links = seconds * LINKS if n > 1 else 0.0
    if dist.get_rank() == 0:
        links = f", then {n * (n - 1)} links, about {for_links:.0f} s" if n > 1 else ""
        print(f"measuring {n} rank{'s' * (n > 1)}: each module with micro-batches of {', '.join(map(str, sizes))} "
              f"samples, about {seconds - for_links:.0f} s{links}", flush=True)
    load_code(clock.device)
    dist.barrier()
    machine = {"device": str(clock.device), **clock.measure(sorted(sizes), seconds - for_links)}
    machines = [None] * n
    dist.all_gather_object(machines, (this_host(), machine, measure_links(clock.device, for_links)))
    hosts, machines, links = map(list, zip(*machines))
    return {"model_name": model_name, "model": model_facts(clock.config), "seq_len": clock.seq_len,
            "dtype": str(clock.dtype).removeprefix("torch."), **clock.extras(), "hosts": host_names(hosts),
            "modules": clock.modules, "machines": machines, "links": links}


def describe_machines(cluster: dict, wanted: tuple[int, ...]) -> str:
    """A line for each machine and its links. `wanted`: the micro-batch sizes that were to be timed."""
    lines = []
    for rank, (host, machine) in enumerate(zip(cluster["hosts"], cluster["machines"])):
        rates = ", ".join(f"to {i} {link['bandwidth'] * 8e-6:.4g} Mbit/s {link['latency'] * 1e3:.2g} ms"
                          for i, link in enumerate(cluster["links"][rank]) if link)
        size = max(machine["forward"], key=int)
        sample = (sum(machine["forward"][size]) + sum(machine["backward"][size])) / int(size)
        lines.append(f"rank {rank} on {host} ({machine['device']}): {cluster['seq_len'] / sample:.0f} "
                     f"tokens/s alone, {machine['free_memory'] / 1e9:.1f} GB free; {rates or 'no links'}")
        if left_out := [str(size) for size in wanted if str(size) not in machine["forward"]]:
            lines.append(f"    no time or memory for micro-batches of {', '.join(left_out)} samples: a larger "
                         "--measure_seconds gives more time")
    return "\n".join(lines)


def time_runs(make_run: Callable[[int], Callable], sizes: list[int], seconds: float) -> dict[int, list[float]]:
    """Size -> the seconds that make_run(size)() returns: their means over blocks of time, and of the blocks the median.

    A machine that is throttled is fast and slow by turns, which no single call shows. Sizes take turns, so that what
    else the machine does for a while changes few blocks of each. The first run of a size warms up, and counts only
    where no time is left. Sizes that would take too long are left out, but never the first.
    """
    deadline, first, runs = time.perf_counter() + seconds, {}, {}
    for size in sizes:
        expected = max((sum(numbers) * size / before for before, numbers in first.items()), default=0.0)
        if first and expected > (deadline - time.perf_counter()) / 2:
            break
        runs[size] = make_run(size)
        first[size] = runs[size]()
    blocks = {size: [] for size in first}
    turns = [size for _ in range(BLOCKS) for size in first]
    for turn, size in enumerate(turns):
        rows, start = [], time.perf_counter()
        end = start + (deadline - start) / (len(turns) - turn)
        while time.perf_counter() < end:
            rows.append(runs[size]())
        if rows:
            blocks[size].append([statistics.fmean(column) for column in zip(*rows)])
    return {size: [statistics.median(column) for column in zip(*(blocks[size] or [first[size]]))] for size in first}


class Cost(NamedTuple):
    """Of a module: its fields in cluster.json, and by micro-batch size its seconds [forward, backward]."""

    facts: dict[str, float]
    seconds: dict[int, list[float]]


class ModuleClock:
    """Builds the modules of a model on this rank, one at a time, and times each.

    `modules`, after measure(): for each module of the whole model its name, its numbers of parameters, and the bytes
    that it takes while it computes: `saved_bytes` that a sample leaves for its backward, `working_bytes` of a sample
    and `fixed_bytes` of any micro-batch that are needed for a moment besides.
    """

    parts = {"embedding": 0.15, "layer": 0.5, "final_norm": 0.05, "final_proj": 0.2}  # and their share of the time
    last = "final_proj"  # the part that ends in the loss
    known: dict[str, dict[str, float]] | None = None  # what measure_memory returned on another rank

    def __init__(self, config, seq_len: int, dtype: torch.dtype, device: torch.device):
        self.config, self.seq_len, self.dtype, self.device = config, seq_len, dtype, device
        self.names = ["embedding", *(f"decoder_layers.{i}" for i in range(config.num_hidden_layers)), "final_norm",
                      "final_proj"]

    def build(self, name: str) -> tuple[nn.Module, Callable]:
        """A module, and the call that a stage makes of it. The weights are random: zeros would be faster."""
        config, hidden = self.config, self.config.hidden_size
        rotary = rotary_tables(self.seq_len, config.head_dim, config.rope_parameters["rope_theta"], self.dtype,
                               self.device)
        make, call = {
            "embedding": (lambda: Embedding(config.vocab_size, hidden), lambda ids: module(ids).to(self.dtype)),
            "layer": (lambda: DecoderLayer(config), lambda x: module(x, *rotary)),
            "final_norm": (lambda: RMSNorm(hidden, config.rms_norm_eps), lambda x: module(x)),
            "final_proj": (lambda: Linear(hidden, config.vocab_size, bias=False),
                           lambda x: cross_entropy(module(x), x.new_zeros(x.shape[:2], dtype=torch.int64))),
        }[name]
        with torch.device(self.device):
            module = make().to(torch.promote_types(self.dtype, torch.float32))  # the master's dtype
        for param in module.parameters():
            nn.init.uniform_(param, -0.05, 0.05)
        return module, call

    def input_of(self, name: str, size: int) -> torch.Tensor:
        if name == "embedding":
            return torch.randint(self.config.vocab_size, (size, self.seq_len), device=self.device)
        shape = (size, self.seq_len, self.config.hidden_size)
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_()

    def modules_of(self, found: dict[str, Cost]) -> list[Cost]:
        """For each of `names` its cost, out of those of the parts."""
        return [found[name if name in found else "layer"] for name in self.names]

    def extras(self) -> dict:
        """Fields of cluster.json that our Llama does not need."""
        return {}

    def measure(self, sizes: list[int], seconds: float) -> dict:
        """Seconds of each module by micro-batch size, forward and backward, and of the optimizer; the memory that is
        free for a model in the end, when all libraries are loaded, and what else the process has then."""
        found, room = {}, float(free_memory(self.device))
        self.optimizer_seconds = 0.0  # of a parameter
        for name in self.parts:
            try:
                found[name] = self.measure_part(name, sizes, seconds, room)
            except torch.OutOfMemoryError:
                raise UserError(f"rank {dist.get_rank()} on {socket.gethostname()} has not the memory to time one "
                                f"{name} with a sample of {self.seq_len} tokens: take a shorter --seq_len, or measure "
                                "without this machine") from None
        costs = self.modules_of(found)
        self.modules = [{"name": name, **cost.facts} for name, cost in zip(self.names, costs)]
        common = [size for size in sizes if all(size in cost.seconds for cost in costs)]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        others = TRAINING_BYTES if self.device.type == "cpu" else 0.0
        return {"free_memory": max(0.0, free_memory(self.device) - others), "process_memory": process_bytes() + others,
                "optimizer_seconds": self.optimizer_seconds,
                **{kind: {str(size): [cost.seconds[size][k] for cost in costs] for size in common}
                   for k, kind in enumerate(("forward", "backward"))}}

    def measure_memory(self, room: float) -> dict[str, dict[str, float]]:
        """The facts of each part. Where other ranks take them as `known`, they need not have the memory for it."""
        return {name: self.measure_part(name, [], math.inf, room).facts for name in self.parts}

    @cast_weights_once()
    def measure_part(self, name: str, sizes: list[int], seconds: float, room: float) -> Cost:
        """What build(name) makes: its facts, and its seconds by micro-batch size. Of a layer also the optimizer's.

        Where the facts are known, memory may be short: the logits, the largest tensors, are then those of one sample.
        """
        end = time.perf_counter() + seconds * self.parts[name]
        module, call = self.build(name)
        trained = [param for param in module.parameters() if param.requires_grad]
        facts = self.known[name] if self.known else {
            "parameters": (count := sum(param.numel() for param in trained)),
            "frozen_parameters": sum(param.numel() for param in module.parameters()) - count,
            **self.memory(name, module, call, room, seconds * self.parts[name])}
        if not sizes:
            return Cost(facts, {})
        fitting = [size for size in sizes if size * facts["saved_bytes"] < room / 2] or sizes[:1]
        if self.known and name == self.last:
            fitting = sizes[:1]
        timed = time_runs(functools.partial(self.passes, name, call), fitting, end - time.perf_counter())
        if self.known and name == self.last:
            timed = {size: [size / sizes[0] * value for value in timed[sizes[0]]] for size in sizes}
        if name.startswith("layer") and trained:
            self.optimizer_seconds = self.time_optimizer(trained, seconds * OPTIMIZER)
        return Cost(facts, timed)

    def memory(self, name: str, module: nn.Module, call: Callable, room: float = math.inf,
               seconds: float = math.inf) -> dict[str, float]:
        """What one sample takes, and what a second one adds to it: the difference is what any micro-batch takes.

        Without the time or memory for two samples, one takes it all.
        """
        saved, peaks, start = [], [], time.perf_counter()
        for size in (1, 2):
            if size == 2 and (4 * peaks[0] > room or 2 * (time.perf_counter() - start) > seconds):
                break
            run = self.passes(name, call, size)
            run()  # makes gradients, and copies of the weights in the dtype
            weights = [*module.parameters(), *model.casts.values()]
            saved.append(saved_bytes(call, self.input_of(name, size), weights))
            peaks.append(peak_bytes(run, self.device))
        a_sample = saved[-1] - saved[0] or saved[0]
        slope = max(0, peaks[-1] - peaks[0] or peaks[0])
        return {"saved_bytes": float(a_sample), "working_bytes": float(max(0, slope - a_sample)),
                "fixed_bytes": float(max(0, peaks[0] - slope))}

    def passes(self, name: str, call: Callable, size: int) -> Callable:
        """What runs a micro-batch forward and backward, and returns the seconds of each."""
        x = self.input_of(name, size)
        gradient = None if name == self.last else torch.randn_like(call(x))

        def run() -> tuple[float, float]:
            x.grad = None
            start = self.now()
            out = call(x)
            middle = self.now()
            if out.requires_grad:  # not where an embedding is frozen
                torch.autograd.backward(out, gradient)
            return middle - start, self.now() - middle

        return run

    def time_optimizer(self, params: list[nn.Parameter], seconds: float) -> float:
        """AdamW's seconds a parameter."""
        optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)
        optimizer.step()  # makes the moments

        def run() -> tuple[float]:
            start = self.now()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return (self.now() - start,)

        return time_runs(lambda _: run, [1], seconds)[1][0] / sum(param.numel() for param in params)

    def now(self) -> float:
        wait_for(self.device)
        return time.perf_counter()
