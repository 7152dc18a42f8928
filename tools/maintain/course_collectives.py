"""Step 12's reduce-scatter and all-gather beside the library's over gloo, of 16.8 MB: all ranks call them in turns.

measure_course.py runs this under torchrun. Bytes are those of the loopback interface in the last round. Only Linux
counts them.
"""

import tools_path  # noqa: F401  before launch

import functools
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from launch import modules_of
from turns import table, take_turns

with modules_of(12):
    from zero import all_gather, all_gather_tensor, reduce_scatter, reduce_scatter_tensor

NUM_BYTES = 16.8e6


def collectives() -> dict:
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    sizes = [int(NUM_BYTES / 4) // size] * size
    full = torch.rand(sum(sizes))

    def scatter() -> None:
        handle, (total, *others) = reduce_scatter(full, sizes, group)
        handle.wait()
        for other in others:
            total += other

    return {
        "all-reduce of the library": lambda: dist.all_reduce(full),
        "reduce-scatter of the library": lambda: reduce_scatter_tensor(torch.empty(sizes[0]), full),
        "reduce-scatter": scatter,
        "all-gather of the library": lambda: all_gather_tensor(full, full.split(sizes)[rank]),
        "all-gather": lambda: all_gather(full, sizes, group).wait(),
    }


def bytes_so_far() -> int:
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def main(rounds: int) -> None:
    dist.init_process_group("gloo")
    calls, sent = collectives(), {}

    def turn(name: str) -> float:
        dist.barrier()
        before, start = bytes_so_far(), time.perf_counter()
        calls[name]()
        dist.barrier()
        sent[name] = bytes_so_far() - before
        return time.perf_counter() - start

    seconds = take_turns({name: functools.partial(turn, name) for name in calls}, rounds)
    if dist.get_rank() == 0:
        print(table([f"{dist.get_world_size()} ranks", "ms", "MB sent by all"], [
            [name, f"{1e3 * statistics.median(own):.1f}", f"{sent[name] / 1e6:.1f}"] for name, own in seconds.items()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
