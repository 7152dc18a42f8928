"""Step 12's reduce-scatter and all-gather beside the library's over gloo: milliseconds, bytes over loopback.

    torchrun --nproc_per_node 4 tools/maintain/speed_of_shards.py

All ranks run one after the other what is compared, and start over, in --rounds rounds; a figure is the median of its
rounds. Bytes are those of the loopback interface in the last round. Only Linux counts them.
"""

import tools_path  # noqa: F401  before launch

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from launch import STEPS, Help

sys.path.insert(0, str(STEPS["12"]))
from zero import all_gather, all_gather_tensor, reduce_scatter, reduce_scatter_tensor  # noqa: E402


def contestants(length: int) -> dict:
    """name -> what to time, on flat tensors of `length` numbers."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    full, equal = torch.rand(length), [length // size] * size
    unequal = [length // 2, *[length // 2 // (size - 1)] * (size - 1)]
    unequal[-1] += length - sum(unequal)

    def scatter(sizes: list[int]) -> None:
        handle, (total, *others) = reduce_scatter(full, sizes, group)
        handle.wait()
        for other in others:
            total += other

    return {
        "all-reduce": lambda: dist.all_reduce(full),
        "reduce-scatter of the library": lambda: reduce_scatter_tensor(torch.empty(length // size), full),
        "reduce-scatter": lambda: scatter(equal),
        "reduce-scatter, half of it on rank 0": lambda: scatter(unequal),
        "all-gather of the library": lambda: all_gather_tensor(full, full.split(equal)[rank]),
        "all-gather": lambda: all_gather(full, equal, group).wait(),
        "all-gather, half of it from rank 0": lambda: all_gather(full, unequal, group).wait(),
    }


def bytes_so_far() -> int:
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--megabytes", type=float, default=16.8)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    programs = contestants(int(args.megabytes * 1e6 / 4) // size * size)
    times, sent = {name: [] for name in programs}, {}
    for _ in range(args.rounds + 1):
        for name, program in programs.items():
            dist.barrier()
            before, start = bytes_so_far(), time.perf_counter()
            program()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            sent[name] = bytes_so_far() - before
    if dist.get_rank() == 0:
        print(f"{size} ranks, {args.megabytes} MB\n\n| | ms | MB sent by all |\n| --- | ---: | ---: |")
        for name in programs:
            print(f"| {name} | {1e3 * statistics.median(times[name][1:]):.1f} | {sent[name] / 1e6:.1f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
