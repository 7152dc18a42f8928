"""How fast the machines are, and the links between them: cluster.json, for plan.py.

    torchrun ... plan.py --measure cluster.json

No machine has to hold the model: one module is measured at a time. First the rank with the most free memory finds what
memory each takes. Then every rank times them, all ranks at once, as they will compute in training. Then the links are
timed, one after the other, in both directions: small messages give the latency, one large enough to take a while the
bandwidth. What it costs the processors to send is in it.

The time that measuring takes is given, and shared out to modules, micro-batch sizes and links. What takes long is
repeated less often, and sizes for which no time is left are left out.
"""

import itertools
import math
import statistics
import time

import torch
import torch.distributed as dist

from planning.machines import model_facts
from ranks.collectives import gather, once, say
from ranks.memory import free_memory
from ranks.placement import host_names, machines
from ranks.progress import progress

LINKS = 1 / 3  # of the time
MICRO_BATCH_SIZES = (1, 2, 4, 8)
SMALLEST_MESSAGE, LARGEST_MESSAGE = 1 << 14, 1 << 24  # numbers of 4 bytes


def measure_with(profiler, model_name: str, sizes: tuple[int, ...] = MICRO_BATCH_SIZES,
                 seconds: float = 30.0, memory_seconds: float = math.inf) -> dict:
    """The content of cluster.json on every rank, but for the flags. Collective. Takes about so many `seconds`.

    `profiler`: a LayerProfiler. `sizes`: micro-batch sizes to time, in samples of profiler.seq_len
    tokens. `memory_seconds`: for that of one module.
    """
    n = dist.get_world_size()
    for_links = seconds * LINKS if n > 1 else 0.0
    links = f", then {n * (n - 1)} links, about {for_links:.0f} s" if n > 1 else ""
    say(f"measuring {n} rank{'s' * (n > 1)}: each module with micro-batches of {', '.join(map(str, sizes))} samples, "
        f"about {seconds - for_links:.0f} s{links}")
    start, free = time.perf_counter(), gather(free_memory(profiler.device))
    profiler.facts = once(free.index(max(free)), lambda: profiler.measure_memory(max(free), memory_seconds))
    left = max(seconds - for_links - (time.perf_counter() - start), (seconds - for_links) / 2)
    machine = {"device": str(profiler.device), **profiler.measure(sorted(sizes), left)}
    everyone, links = map(list, zip(*gather((machine, measure_links(profiler.device, for_links)))))
    return {"model_name": model_name, "model": model_facts(profiler.config), "seq_len": profiler.seq_len,
            **profiler.dtypes(), "hosts": host_names(machines()), "modules": profiler.modules(),
            "machines": everyone, "links": links}


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


def now(device: torch.device) -> float:
    """The clock when a GPU has finished what it was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_links(device: torch.device, seconds: float) -> list[dict | None]:
    """Latency (seconds) and bandwidth (bytes a second) from this rank to each other, None to itself. Collective.

    All links together take about so many `seconds`.
    """
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    links = [None] * dist.get_world_size()
    pairs = list(itertools.permutations(range(len(links)), 2))
    for sender, receiver in progress("measuring links", pairs, by_all=True):
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
        sent = now(wire)
        dist.send(message, receiver)
        dist.recv(answer, receiver)
        return now(wire) - sent

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
        dist.send(answer, sender)
