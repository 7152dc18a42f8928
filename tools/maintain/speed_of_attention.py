"""Ring attention in both layouts beside whole attention, and a step of training with cp beside one process: seconds.

    torchrun --nproc_per_node 2 tools/maintain/speed_of_attention.py       attention alone, forward and backward
    python tools/maintain/speed_of_attention.py --seq_len 4096             steps of train.py, with one rank and with two

What is compared takes turns, in --rounds rounds, one thread a rank; a figure is the median of its rounds. Whole
attention is computed by rank 0 alone, while the others wait.
"""

import tools_path  # noqa: F401  before launch

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import STEPS, Help
from turns import Program

sys.path.insert(0, str(STEPS["15"]))
import process_group_manager as pgm  # noqa: E402
from context_parallel import RingAttention, local_positions  # noqa: E402

STEP_RUNS = {"one process": (1, []), "zigzag": (2, ["--cp_size", 2]),
             "contiguous": (2, ["--cp_size", 2, "--cp_layout", "contiguous"])}


def compare_attention(seq_len: int, heads: int, head_dim: int, rounds: int) -> dict[str, list[float]]:
    """name -> seconds of each round."""
    size, times = int(os.environ["WORLD_SIZE"]), {"whole": [], "zigzag": [], "contiguous": []}
    torch.set_num_threads(1)
    pgm.init_process_group("gloo")
    pgm.setup_process_group_manager(1, 1, 1, size)
    whole = torch.rand(4, 1, heads, seq_len, head_dim)
    for _ in range(rounds + 1):
        for name, seconds in times.items():
            places = local_positions(name, seq_len) if name != "whole" else torch.arange(seq_len)
            q, k, v, grad = whole[:, :, :, places].contiguous()
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
            dist.barrier()
            start = time.perf_counter()
            if name != "whole":
                RingAttention.apply(name, q, k, v).backward(grad)
            elif dist.get_rank() == 0:
                F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    return times


def compare_steps(seq_len: int, rounds: int, flags: list[str]) -> dict[str, list[float]]:
    """name -> seconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seq_len", seq_len, "--micro_batch_size", 1, "--gradient_accumulation_steps", 1, "--log_dir", folder,
                 "--max_tokens", seq_len * (rounds + 3), *flags]
        programs = [Program(name, ranks, STEPS["15"] / "train.py", *words, "--run_name", name.replace(" ", "_"), *more)
                    for name, (ranks, more) in STEP_RUNS.items()]
        try:
            return {program.name: seconds for program, seconds in zip(programs, zip(*(
                [program.turn() for program in programs] for _ in range(rounds + 1))))}
        finally:
            for program in programs:
                program.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--seq_len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8, help="of attention alone")
    parser.add_argument("--head_dim", type=int, default=64, help="of attention alone")
    parser.add_argument("--rounds", type=int, default=9)
    args, flags = parser.parse_known_args()  # other flags are those of train.py
    if "RANK" in os.environ:
        times = compare_attention(args.seq_len, args.heads, args.head_dim, args.rounds)
    else:
        times = compare_steps(args.seq_len, args.rounds, flags)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first round warms up
    first = next(iter(medians))
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"| | seconds | speed of {first} = 1 |\n| --- | ---: | ---: |")
        for name, seconds in medians.items():
            print(f"| {name} | {seconds:.3f} | {medians[first] / seconds:.2f} |")


if __name__ == "__main__":
    main()
