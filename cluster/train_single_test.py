"""Is this machine ready? Its device and memory, a short training, tokens/s, and the batch size that fits.

    python cluster/train_single_test.py
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        cluster/train_single_test.py

Under torchrun every rank does all of it by itself, and rank 0 prints a table of them. All train the same model on the
same samples, so their losses have to be equal: a machine that computes something else is not ready.

The batch size is doubled until memory is over. A GPU says so. A CPU's machine would start to swap or end some process
instead, so there the next batch is tried only where twice what this one kept for backward, and half of that again for
what comes and goes, is free.
"""

from ranks import course  # noqa: F401  before step 9's modules

import argparse
import itertools
import socket
import statistics
import time

import torch
import torch.distributed as dist

from data.encoded import load_samples
from dataloader import collate_batch
from metrics import peak_memory_gb
from model import Llama, check_config, cross_entropy
from models.causal import make_llama
from planning.module_memory import saved_bytes
from ranks.collectives import gather, once, say
from ranks.errors import one_error_of_all
from ranks.join import meet, print_banner, print_table
from ranks.memory import free_memory
from ranks.placement import machine_rank
from run.flags import add_flags
from run_common import check_positions
from utils import (
    TINY_LLAMA, ArgumentParser, UserError, default_learning_rate, load_config, positive_float,
    positive_int,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}  # unlike machines sum in unlike orders
TRANSIENT = 1.5  # the most that is alive during backward, in units of what forward kept


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=10, help="of the short training")
    parser.add_argument("--batch_size", type=positive_int, default=4, help="samples of a step of it")
    parser.add_argument("--max_batch_size", type=positive_int, default=64, help="the largest that is tried")
    parser.add_argument("--memory_gb", type=positive_float, help="memory to use (default: all that is free)")
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a Llama: a directory with config.json, or a Hub id")
    add_flags(parser)
    return parser.parse_args()


def short_training(args, model: Llama, samples, device: torch.device) -> tuple[list[float], float]:
    """The losses, and tokens a second: the mean over the steps after the first, which warms up."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)
    indices, losses, seconds = itertools.cycle(range(len(samples))), [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        batch = collate_batch([samples[next(indices)] for _ in range(args.batch_size)])
        optimizer.zero_grad()
        loss = one_microbatch(model, {name: ids.to(device) for name, ids in batch.items()})
        optimizer.step()
        losses.append(loss.item())  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return losses, args.batch_size * args.seq_len / statistics.fmean(seconds[1:] or seconds)


def one_microbatch(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward of one micro-batch, (B, T), on this rank by itself; the loss. Gradients are added."""
    loss = cross_entropy(model(batch["input_ids"]), batch["target_ids"])
    loss.backward()
    return loss.detach()


def kept_for_backward(model: Llama, ids: torch.Tensor) -> int:
    """Runs one micro-batch, ids (B, T), forward and backward. Returns the bytes that forward kept besides weights."""
    return saved_bytes(lambda: one_microbatch(model, {"input_ids": ids, "target_ids": ids}), model.parameters())


def largest_batch(args, model: Llama, device: torch.device) -> tuple[int, str]:
    """The largest power of two that fits, and what ended the search. 0 where not even one sample does."""
    bound = float("inf") if args.memory_gb is None else args.memory_gb * 1e9
    fits = kept = 0
    while (size := max(2 * fits, 1)) <= args.max_batch_size:
        needed = 2 * TRANSIENT * kept
        if device.type == "cpu" and needed > min(free_memory(device), bound):
            return fits, f"{size} would take {needed / 1e9:.2f} GB"
        ids = torch.zeros(size, args.seq_len, dtype=torch.int64, device=device)
        try:
            kept = kept_for_backward(model, ids)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return fits, f"{size} is out of memory"
        if device.type == "cuda" and torch.cuda.max_memory_allocated(device) > bound:
            return fits, f"{size} takes {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB"
        fits = size
    return fits, f"--max_batch_size {args.max_batch_size}"


def compare(everyone: list[dict], tolerance: float) -> None:
    """Raises UserError, on every rank, where machines trained to unlike losses."""
    losses = torch.tensor([facts["losses"] for facts in everyone], dtype=torch.float64)  # (ranks, steps)
    apart = (losses - losses[0]).abs().max().item()
    if not apart <= tolerance:
        last = ", ".join(f"rank {rank} on {facts['host']}: {facts['losses'][-1]:.6f}"
                         for rank, facts in enumerate(everyone))
        raise UserError(f"the machines train to unlike losses, {apart:.2g} apart ({last}): look for another version "
                        "of torch or of this project, or for bad memory")
    if len(everyone) > 1:
        say(f"all losses are equal: {apart:.1g} apart at most, of steps 1 to {losses.shape[1]}")


def main():
    args = parse_args()
    device, dtype = meet(args)
    print_banner(device, dtype)
    config = once(machine_rank(), lambda: load_config(args.model_name, num_attention_heads=None))
    check_config(config)
    check_positions(config, args.seq_len)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)
    samples = load_samples(args, args.model_name, config.vocab_size, args.steps * args.batch_size)
    model, free = make_llama(config, args.seed, device, dtype), free_memory(device)
    losses, speed = short_training(args, model, samples, device)
    fits, ended_by = largest_batch(args, model, device)
    everyone = gather({"host": socket.gethostname(), "losses": losses, "row": [
        device.type, f"{free / 1e9:.1f}", f"{peak_memory_gb():.2f}", f"{speed:.0f}", f"{losses[0]:.4f}",
        f"{losses[-1]:.4f}", fits, ended_by]})
    print_table(["rank", "host", "device", "GB free", "GB used", "tokens/s", "first loss", "last loss", "batch size",
                 "ended by"], [[rank, facts["host"], *facts["row"]] for rank, facts in enumerate(everyone)])
    compare(everyone, TOLERANCE[dtype])
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_error_of_all(out_of_memory="lower --batch_size or --seq_len"):
        main()
