"""How fast each machine computes each module, and how fast the links between machines are: cluster.json, for plan.py.

    torchrun ... plan.py --measure cluster.json

Every rank times the model as a single stage would run it: forward through all modules, a cut between any two, backward
from cut to cut. All ranks do so at once, as they will in training. Times are means over blocks of a fixed length (a
machine that is throttled is fast and slow by turns, and no single call shows that), and of the blocks the median.

Links are timed one after the other, in both directions: small messages give the latency, one large enough to take a
while the bandwidth. What it costs the processors to send is in it.
"""

import itertools
import json
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from training.machine_facts import free_memory
from model import Llama, cross_entropy, init_weights, rotary_tables

TIMED_LAYERS = 8  # decoder layers are all alike: of a deeper model so many are timed, the others take their mean
BLOCKS, BLOCK_SECONDS = 5, 0.6  # of timing a micro-batch size
LINK_SECONDS = 0.3  # that the large message takes at least
LARGEST_MESSAGE = 1 << 24  # numbers of 4 bytes, where that takes less
MICRO_BATCH_SIZES = (1, 2, 4, 8)


def measure_cluster(config, seq_len: int, dtype: torch.dtype, device: torch.device, model_name: str,
                    sizes: tuple[int, ...] = MICRO_BATCH_SIZES) -> dict:
    """The content of cluster.json on every rank. Collective.

    `config`: of our Llama. `sizes`: micro-batch sizes to time, in samples of `seq_len` tokens.
    """
    clock = ModuleClock(config, seq_len, dtype, device)
    dist.barrier()
    machine = clock.measure(sizes)
    machine.update(rank=dist.get_rank(), host=socket.gethostname(), device=str(device),
                   free_memory=float(free_memory(device)))
    machines = [None] * dist.get_world_size()
    dist.all_gather_object(machines, (machine, measure_links(device)))
    count, hidden_bytes = config.num_hidden_layers, seq_len * config.hidden_size * dtype.itemsize
    return {"model_name": model_name, "seq_len": seq_len, "dtype": str(dtype).removeprefix("torch."),
            "tied": bool(config.tie_word_embeddings), "num_layers": count, "hidden_bytes": hidden_bytes,
            "modules": clock.describe(), "machines": [machine for machine, _ in machines],
            "links": [links for _, links in machines]}


def write_cluster(path: str, cluster: dict) -> None:
    """On rank 0, with a line for each machine and link."""
    if dist.get_rank() > 0:
        return
    with open(path, "w") as file:
        json.dump(cluster, file, indent=1)
    for machine in cluster["machines"]:
        links = cluster["links"][machine["rank"]]
        rates = ", ".join(f"to {i} {link['bandwidth'] * 8e-6:.4g} Mbit/s {link['latency'] * 1e3:.2g} ms"
                          for i, link in enumerate(links) if link)
        size = max(machine["forward"], key=int)
        sample = (sum(machine["forward"][size]) + sum(machine["backward"][size])) / int(size)
        print(f"rank {machine['rank']} on {machine['host']} ({machine['device']}): {cluster['seq_len'] / sample:.0f} "
              f"tokens/s alone, {machine['free_memory'] / 1e9:.1f} GB free; {rates or 'no links'}")
    print(f"cluster: {path}", flush=True)


class ModuleClock:
    """The model on this rank, in one piece, and a clock for each of its modules.

    Of a deep model only TIMED_LAYERS layers are made: it may be larger than this machine.
    """

    def __init__(self, config, seq_len: int, dtype: torch.dtype, device: torch.device):
        self.config, self.seq_len, self.device = config, seq_len, device
        self.num_layers = config.num_hidden_layers
        timed = type(config)(**{**vars(config), "num_hidden_layers": min(self.num_layers, TIMED_LAYERS)})
        with torch.device("meta"):
            self.model = Llama(timed, dtype)
        init_weights(self.model, 0, device, lambda full, dim: full)
        rotary = rotary_tables(seq_len, config.head_dim, config.rope_parameters["rope_theta"], dtype, device)
        self.modules: list[nn.Module] = [self.model.embedding, *self.model.decoder_layers, self.model.final_norm,
                                         self.model.final_proj]
        middle = [lambda x, layer=layer: layer(x, *rotary) for layer in self.model.decoder_layers]
        self.calls = [lambda ids: self.model.embedding(ids).to(dtype), *middle, *self.modules[-2:]]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, ids: torch.Tensor, forward: list[float], backward: list[float]) -> None:
        """One micro-batch, ids (B, T): adds the seconds of each module; the loss counts with the last."""
        x, ends = ids, []
        for i, call in enumerate(self.calls):
            start = self.now()
            x = x.detach().requires_grad_() if x.is_floating_point() else x
            out = call(x)
            if i == len(self.calls) - 1:
                out = cross_entropy(out, ids)
            forward[i] += self.now() - start
            ends.append((x, out))
            x = out
        gradient = None
        for i in reversed(range(len(ends))):
            x, out = ends[i]
            start = self.now()
            torch.autograd.backward(out, gradient)
            backward[i] += self.now() - start
            gradient = x.grad

    def measure(self, sizes: tuple[int, ...]) -> dict:
        """Seconds of each module by micro-batch size, forward and backward, and of the optimizer."""
        found = {"forward": {}, "backward": {}}
        for size in sizes:
            ids = torch.randint(self.config.vocab_size, (size, self.seq_len), device=self.device)
            self.run(ids, [0.0] * len(self.calls), [0.0] * len(self.calls))  # warm
            blocks = [self.block(ids) for _ in range(BLOCKS)]
            for kind in found:
                per_module = [statistics.median(values) for values in zip(*(block[kind] for block in blocks))]
                found[kind][str(size)] = self.for_all_layers(per_module)
        return {**found, "optimizer_seconds": self.measure_optimizer()}

    def block(self, ids: torch.Tensor) -> dict[str, list[float]]:
        """The mean seconds of each module over BLOCK_SECONDS of micro-batches, three at least."""
        forward, backward = [0.0] * len(self.calls), [0.0] * len(self.calls)
        count, start = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - start < BLOCK_SECONDS:
            self.run(ids, forward, backward)
            count += 1
        return {"forward": [total / count for total in forward], "backward": [total / count for total in backward]}

    def for_all_layers(self, values: list[float]) -> list[float]:
        """Values of the modules that were timed -> of all modules, all layers with the mean of those timed."""
        first, *layers, norm, projection = values
        return [first, *[statistics.mean(layers)] * self.num_layers, norm, projection]

    def measure_optimizer(self) -> float:
        """AdamW's seconds a parameter, over BLOCK_SECONDS."""
        self.optimizer.step()  # makes its moments
        count, start = 0, self.now()
        while count < 3 or time.perf_counter() - start < BLOCK_SECONDS:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            count += 1
        seconds, parameters = (self.now() - start) / count, sum(param.numel() for param in self.model.parameters())
        return seconds / parameters

    def describe(self) -> list[dict]:
        """For each module its name, number of parameters, and the bytes that a sample leaves for its backward."""
        x, saved = torch.zeros(1, self.seq_len, dtype=torch.int64, device=self.device), []
        parameters = {param.untyped_storage().data_ptr() for param in self.model.parameters()}
        for i, call in enumerate(self.calls):
            storages: dict[int, int] = {}

            def note(tensor):
                if (storage := tensor.untyped_storage()).data_ptr() not in parameters:
                    storages[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                x = call(x.detach().requires_grad_() if x.is_floating_point() else x)
                if i == len(self.calls) - 1:
                    loss = cross_entropy(x, torch.zeros_like(x[..., 0], dtype=torch.int64))
            saved.append(float(sum(storages.values())))
        del loss
        count = [float(sum(param.numel() for param in module.parameters())) for module in self.modules]
        names = ["embedding", *(f"decoder_layers.{i}" for i in range(self.num_layers)), "final_norm", "final_proj"]
        return [{"name": name, "parameters": int(size), "saved_bytes": kept} for name, size, kept in
                zip(names, self.for_all_layers(count), self.for_all_layers(saved))]


def measure_links(device: torch.device) -> list[dict | None]:
    """Latency (seconds) and bandwidth (bytes a second) from this rank to each other, None to itself. Collective."""
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    links = [None] * dist.get_world_size()
    for sender, receiver in itertools.permutations(range(len(links)), 2):
        if dist.get_rank() == sender:
            links[receiver] = time_link(receiver, wire)
        elif dist.get_rank() == receiver:
            answer_link(sender, wire)
    return links


def time_link(receiver: int, wire: torch.device) -> dict[str, float]:
    """Messages of growing size go to the receiver, an empty answer to each comes back."""
    answer = torch.zeros(1, device=wire)

    def round_trip(numbers: int) -> float:
        dist.send(torch.tensor([numbers], device=wire), receiver)  # what comes next
        message = torch.zeros(numbers, device=wire)
        dist.recv(answer, receiver)
        start = time.perf_counter()
        dist.send(message, receiver)
        dist.recv(answer, receiver)
        return time.perf_counter() - start

    latency = statistics.median(round_trip(1) for _ in range(12)) / 2
    numbers, seconds = 1 << 14, 0.0
    while seconds < LINK_SECONDS and numbers < LARGEST_MESSAGE:
        numbers *= 2 if seconds > LINK_SECONDS / 8 else 4
        seconds = round_trip(numbers)
    dist.send(torch.tensor([0], device=wire), receiver)
    return {"latency": latency, "bandwidth": 4 * numbers / max(seconds - 2 * latency, 1e-9)}


def answer_link(sender: int, wire: torch.device) -> None:
    numbers, answer = torch.zeros(1, dtype=torch.int64, device=wire), torch.zeros(1, device=wire)
    while True:
        dist.recv(numbers, sender)
        if not numbers.item():
            return
        message = torch.empty(numbers.item(), device=wire)
        dist.send(answer, sender)
        dist.recv(message, sender)
        dist.send(answer, sender)
