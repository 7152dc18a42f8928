"""How fast each machine computes each module, and how fast the links between machines are: cluster.json, for plan.py.

    torchrun ... plan.py --measure cluster.json

Every rank builds one module at a time, times it as a stage would run it, and frees it: the embedding, one decoder layer
(all are alike), the final norm, the projection with the loss. So no machine has to hold the model. All ranks compute at
once, as they will in training. Links are timed one after the other, in both directions: small messages give the
latency, one large enough to take a while the bandwidth. What it costs the processors to send is in it.

The time that measuring takes is given, and shared out to modules, micro-batch sizes and links. What takes long is
repeated less often, and sizes for which no time is left are left out.
"""

import functools
import itertools
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn

import model
from model import (
    DecoderLayer, Embedding, Linear, RMSNorm, cast_weights_once, check_config, cross_entropy, rotary_tables,
)
from planning.machines import MODEL
from training.machine_facts import free_memory
from utils import UserError

BLOCKS = 5
LINKS = 1 / 3  # of the time
PARTS, OPTIMIZER = {"embedding": 0.15, "layer": 0.5, "final_norm": 0.05, "final_proj": 0.2}, 0.1  # of the rest
SMALLEST_MESSAGE, LARGEST_MESSAGE = 1 << 14, 1 << 24  # numbers of 4 bytes
MICRO_BATCH_SIZES = (1, 2, 4, 8)


def measure_cluster(config, seq_len: int, dtype: torch.dtype, device: torch.device, model_name: str,
                    sizes: tuple[int, ...] = MICRO_BATCH_SIZES, seconds: float = 30.0) -> dict:
    """The content of cluster.json on every rank, but for the flags. Collective. Takes about so many `seconds`.

    `config`: of our Llama. `sizes`: micro-batch sizes to time, in samples of `seq_len` tokens.
    """
    check_config(config)
    n = dist.get_world_size()
    for_links = seconds * LINKS if n > 1 else 0.0
    if dist.get_rank() == 0:
        links = f", then {n * (n - 1)} links, about {for_links:.0f} s" if n > 1 else ""
        print(f"measuring {n} rank{'s' * (n > 1)}: each module with micro-batches of {', '.join(map(str, sizes))} "
              f"samples, about {seconds - for_links:.0f} s{links}", flush=True)
    one = torch.ones(1, requires_grad=True)
    torch.autograd.backward(2 * one, one.detach())  # at the first one, torch loads code for a second or more
    dist.barrier()
    clock = ModuleClock(config, seq_len, dtype, device)
    machine = {"device": str(device), **clock.measure(sorted(sizes), seconds - for_links)}
    machines = [None] * n
    dist.all_gather_object(machines, (socket.gethostname(), machine, measure_links(device, for_links)))
    hosts, machines, links = map(list, zip(*machines))
    return {"model_name": model_name, "model": {name: getattr(config, name) for name in MODEL}, "seq_len": seq_len,
            "dtype": str(dtype).removeprefix("torch."), "hosts": hosts, "modules": clock.modules,
            "machines": machines, "links": links}


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


def wait_for(device: torch.device) -> None:
    """Lets a GPU finish what it was given to do, because the clock is to be read then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


class ModuleClock:
    """Builds the modules of a model on this rank, one at a time, and times each.

    `modules`, after measure(): for each module of the whole model its name, number of parameters, and the bytes that a
    sample leaves for its backward.
    """

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

    def measure(self, sizes: list[int], seconds: float) -> dict:
        """Seconds of each module by micro-batch size, forward and backward, and of the optimizer; the memory that is
        free before anything is built."""
        timed, facts, room = {}, {}, float(free_memory(self.device))
        for name in PARTS:
            try:
                facts[name], timed[name], seconds_a_parameter = self.measure_part(name, sizes, seconds, room)
            except torch.OutOfMemoryError:
                raise UserError(f"rank {dist.get_rank()} on {socket.gethostname()} has not the memory to time one "
                                f"{name} with a sample of {self.seq_len} tokens: take a shorter --seq_len, or measure "
                                "without this machine") from None
            if name == "layer":
                optimizer_seconds = seconds_a_parameter
        parts = [name if name in timed else "layer" for name in self.names]
        self.modules = [{"name": name, **facts[part]} for name, part in zip(self.names, parts)]
        common = [size for size in sizes if all(size in times for times in timed.values())]
        return {"free_memory": room, "optimizer_seconds": optimizer_seconds,
                **{kind: {str(size): [timed[part][size][k] for part in parts] for size in common}
                   for k, kind in enumerate(("forward", "backward"))}}

    @cast_weights_once()
    def measure_part(self, name: str, sizes: list[int], seconds: float, room: float) -> tuple[dict, dict, float | None]:
        """What build(name) makes: its facts, its seconds by micro-batch size, and for a layer the optimizer's."""
        module, call = self.build(name)
        saved = float(self.saved_bytes(module, call, self.input_of(name, 1)))
        facts = {"parameters": sum(param.numel() for param in module.parameters()), "saved_bytes": saved}
        fitting = [size for size in sizes if size * saved < room / 2] or sizes[:1]
        timed = time_runs(functools.partial(self.passes, name, call), fitting, seconds * PARTS[name])
        return facts, timed, self.time_optimizer(module, seconds * OPTIMIZER) if name == "layer" else None

    def passes(self, name: str, call: Callable, size: int) -> Callable:
        """What runs a micro-batch forward and backward, and returns the seconds of each."""
        x = self.input_of(name, size)
        gradient = None if name == "final_proj" else torch.randn_like(call(x))

        def run() -> tuple[float, float]:
            x.grad = None
            start = self.now()
            out = call(x)
            middle = self.now()
            torch.autograd.backward(out, gradient)
            return middle - start, self.now() - middle

        return run

    def time_optimizer(self, module: nn.Module, seconds: float) -> float:
        """AdamW's seconds a parameter."""
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True)
        optimizer.step()  # makes the moments

        def run() -> tuple[float]:
            start = self.now()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return (self.now() - start,)

        return time_runs(lambda _: run, [1], seconds)[1][0] / sum(param.numel() for param in module.parameters())

    def now(self) -> float:
        wait_for(self.device)
        return time.perf_counter()

    def saved_bytes(self, module: nn.Module, call: Callable, x: torch.Tensor) -> int:
        """Bytes that a call keeps for its backward, parameters and their copies in the dtype not counted."""
        call(x)  # makes the copies
        weights = (*module.parameters(), *model.casts.values())
        own, storages = {weight.untyped_storage().data_ptr() for weight in weights}, {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage  # kept, so that no address is used again
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            call(x)
        return sum(storage.nbytes() for storage in storages.values())


def measure_links(device: torch.device, seconds: float) -> list[dict | None]:
    """Latency (seconds) and bandwidth (bytes a second) from this rank to each other, None to itself. Collective.

    All links together take about so many `seconds`.
    """
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    links = [None] * dist.get_world_size()
    pairs = list(itertools.permutations(range(len(links)), 2))
    for sender, receiver in pairs:
        if dist.get_rank() == sender:
            links[receiver] = time_link(receiver, wire, seconds / len(pairs))
        elif dist.get_rank() == receiver:
            answer_link(sender, wire)
    return links


def time_link(receiver: int, wire: torch.device, seconds: float) -> dict[str, float]:
    """Messages of growing size go to the receiver, an empty answer to each comes back.

    They grow until one takes a sixteenth of the time. The last size is sent again while there is time.
    """
    answer = torch.zeros(1, device=wire)

    def has_time(share: float) -> bool:
        return time.perf_counter() - start < share * seconds

    def round_trip(numbers: int) -> float:
        dist.send(torch.tensor([numbers], device=wire), receiver)  # what comes next
        message = torch.zeros(numbers, device=wire)
        dist.recv(answer, receiver)
        wait_for(wire)
        sent = time.perf_counter()
        dist.send(message, receiver)
        dist.recv(answer, receiver)
        wait_for(wire)
        return time.perf_counter() - sent

    round_trip(1)  # connects, and waits until the receiver has done with other links
    start = time.perf_counter()
    trips = [round_trip(1)]
    while len(trips) < 12 and has_time(0.2):
        trips.append(round_trip(1))
    latency = statistics.median(trips) / 2
    numbers, trips = SMALLEST_MESSAGE, []
    while len(trips) < 2 or len(trips) < 5 and has_time(0.8):
        trips.append(round_trip(numbers))
        is_quick = statistics.median_low(trips) - 2 * latency < seconds / 16
        if is_quick and numbers < LARGEST_MESSAGE and has_time(0.6):
            numbers, trips = 4 * numbers, []
    dist.send(torch.tensor([0], device=wire), receiver)
    trip = statistics.median_low(trips)
    return {"latency": latency, "bandwidth": 4 * numbers / max(trip - 2 * latency, trip / 4, 1e-9)}


def answer_link(sender: int, wire: torch.device) -> None:
    numbers, answer = torch.zeros(1, dtype=torch.int64, device=wire), torch.zeros(1, device=wire)
    while True:
        dist.recv(numbers, sender)
        if not numbers.item():
            return
        message = torch.empty(numbers.item(), device=wire)
        dist.send(answer, sender)
        dist.recv(message, sender)
        wait_for(wire)
        dist.send(answer, sender)
