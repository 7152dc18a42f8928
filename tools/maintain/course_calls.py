"""Calls that all ranks make together, in turns: measure_course.py runs this under torchrun, one thread a rank.

collectives   step 12's reduce-scatter and all-gather beside the library's over gloo, of 16.8 MB. Bytes are those of the
              loopback interface in the last round, which only Linux counts.
attention     forward and backward of step 15's ring attention, 8 heads of 64, in both layouts, beside whole attention,
              which rank 0 computes alone while the others wait
"""

import tools_path  # noqa: F401  before launch

import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import modules_of
from turns import table, take_turns, times_as_fast

NUM_BYTES, HEADS, HEAD_DIM = 16.8e6, 8, 64


def collectives(_seq_len: int) -> dict[str, Callable]:
    with modules_of(12):
        from zero import all_gather, all_gather_tensor, reduce_scatter, reduce_scatter_tensor

    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    part = int(NUM_BYTES / 4) // size
    full, equal = torch.rand(part * size), [part] * size
    unequal = [part * size // 2, *[part // 2] * (size - 1)]
    unequal[-1] += part * size - sum(unequal)

    def scatter(sizes: list[int]) -> None:
        handle, (total, *others) = reduce_scatter(full, sizes, group)
        handle.wait()
        for other in others:
            total += other

    return {
        "all-reduce": lambda: dist.all_reduce(full),
        "reduce-scatter of the library": lambda: reduce_scatter_tensor(torch.empty(part), full),
        "reduce-scatter": lambda: scatter(equal),
        "reduce-scatter, half of it on rank 0": lambda: scatter(unequal),
        "all-gather of the library": lambda: all_gather_tensor(full, full.split(equal)[rank]),
        "all-gather": lambda: all_gather(full, equal, group).wait(),
        "all-gather, half of it from rank 0": lambda: all_gather(full, unequal, group).wait(),
    }


def attention(seq_len: int) -> dict[str, Callable]:
    with modules_of(15):
        import process_group_manager as pgm
        from context_parallel import RingAttention, local_positions

        pgm.setup_process_group_manager(1, 1, 1, dist.get_world_size())
    whole = torch.rand(4, 1, HEADS, seq_len, HEAD_DIM)

    def inputs(places: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v, and the gradient of the output."""
        return [part.contiguous().requires_grad_(k < 3) for k, part in enumerate(whole[:, :, :, places])]

    def alone(q, k, v, grad) -> None:
        if dist.get_rank() == 0:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    def ring(layout: str) -> Callable:
        q, k, v, grad = inputs(local_positions(layout, seq_len))
        return lambda: RingAttention.apply(layout, q, k, v).backward(grad)

    parts = inputs(torch.arange(seq_len))
    return {"whole": lambda: alone(*parts), "zigzag": ring("zigzag"), "contiguous": ring("contiguous")}


def bytes_so_far() -> int:
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def main(what: str, rounds: str, seq_len: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    calls, sent = {"collectives": collectives, "attention": attention}[what](int(seq_len)), {}

    def timed(name: str) -> Callable[[], float]:
        def turn() -> float:
            dist.barrier()
            before, start = bytes_so_far(), time.perf_counter()
            calls[name]()
            dist.barrier()
            sent[name] = bytes_so_far() - before
            return time.perf_counter() - start

        return turn

    seconds = take_turns({name: timed(name) for name in calls}, int(rounds))
    if dist.get_rank() == 0:
        first = next(iter(seconds.values()))
        print(table([f"{dist.get_world_size()} ranks", "ms", "times as fast as the first", "MB sent by all"], [
            [name, f"{1e3 * statistics.median(own):.1f}", f"{times_as_fast(own, first)[1]:.2f}",
             f"{sent[name] / 1e6:.1f}"] for name, own in seconds.items()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
