"""How fast the machines are, and the links between them: cluster.json, for plan.py.

    torchrun ... plan.py --measure cluster.json

No machine has to hold the model: one module is measured at a time. First the rank with the most free memory finds what
memory each takes. Then every rank times them, all ranks at once, as they will compute in training. Then the links are
timed, one after the other.

The time that measuring takes is given, and shared out to modules, micro-batch sizes and links. What takes long is
repeated less often, and sizes for which no time is left are left out.
"""

import math
import time

import torch.distributed as dist

from planning.profiler import LayerProfiler
from planning.links import measure_links
from planning.machines import model_facts
from ranks.collectives import from_rank, gather, say
from ranks.memory import free_memory
from ranks.placement import host_names, machines

LINKS = 1 / 3  # of the time
MICRO_BATCH_SIZES = (1, 2, 4, 8)


def measure_with(profiler: LayerProfiler, model_name: str, sizes: tuple[int, ...] = MICRO_BATCH_SIZES,
                 seconds: float = 30.0, memory_seconds: float = math.inf) -> dict:
    """The content of cluster.json on every rank, but for the flags. Collective. Takes about so many `seconds`.

    `sizes`: micro-batch sizes to time, in samples of profiler.seq_len tokens. `memory_seconds`: for that of one module.
    """
    n = dist.get_world_size()
    for_links = seconds * LINKS if n > 1 else 0.0
    links = f", then {n * (n - 1)} links, about {for_links:.0f} s" if n > 1 else ""
    say(f"measuring {n} rank{'s' * (n > 1)}: each module with micro-batches of {', '.join(map(str, sizes))} samples, "
        f"about {seconds - for_links:.0f} s{links}")
    start, free = time.perf_counter(), gather(free_memory(profiler.device))
    profiler.facts = from_rank(free.index(max(free)), lambda: profiler.measure_memory(max(free), memory_seconds))
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
