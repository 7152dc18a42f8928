"""A Llama over a few machines that are not alike, say three with different GPUs: data parallelism, shares by speed.

    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --max_steps_per_epoch 20
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        cluster/train_distributed.py

Each machine holds the whole model: a pipeline of one stage. A step's micro-batches are shared out by measured speed, so
that none waits for the slowest; every sample of the global batch counts once, whoever computes it. The losses are those
of one process that reads as many micro-batches a step. With --local_steps they are not: see training/local_steps.py.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import functools
import os

import torch
import torch.distributed as dist

from dataloader import next_tokens
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from model import Llama, cross_entropy, init_weights
from pipeline_template import PipelineTemplate
from planning.shares import shares_by_speed
from run_common import check_positions
from tensor_parallel import split_over_tp
from training.board import Board
from training.common import add_flags, add_run_flags, gather, load_text, print_banner
from training.compression import compress
from training.hf_checkpoint import save_hugging_face
from training.local_steps import add_local_flags, check_local_flags, local_steps_of_round, train_locally
from training.loop import make_llama, seconds_of_microbatch, train
from training.speeds import measured_speeds
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, default_learning_rate, load_config, once_per_machine, one_clear_error,
    positive_int,
)


def positive_ints(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--max_steps_per_epoch", type=positive_int, help="an epoch of so much of the data only")
    parser.add_argument("--batch_size", type=positive_int, default=4, help="samples of a micro-batch")
    parser.add_argument("--gradient_accumulation", type=positive_int, default=8,
                        help="a step has so many micro-batches times the number of ranks, shared out by speed")
    parser.add_argument("--num_microbatches", type=positive_ints, metavar="4,2,1",
                        help="instead: micro-batches a step, rank by rank")
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a Llama: a directory with config.json, or a Hub id")
    add_flags(parser)
    add_run_flags(parser, profile_batch=-1)
    parser.add_argument("--checkpoint_dir", default=os.path.join(ROOT, "checkpoints"))
    add_local_flags(parser)
    parser.set_defaults(run_name="train_distributed", log_dir=os.path.join(ROOT, "logs", "runs"))
    args = parser.parse_args()
    check_local_flags(args)
    return args


def choose_shares(args, config, device: torch.device, dtype: torch.dtype) -> list[int]:
    """Micro-batches of a step, rank by rank: as told, or by speed: measured before, or now. Collective.

    With --local_steps, by speed: the local steps of a round.
    """
    world_size, mean = dist.get_world_size(), args.local_steps or args.gradient_accumulation
    if args.num_microbatches:
        if len(args.num_microbatches) != world_size:
            raise UserError(f"--num_microbatches {args.num_microbatches}: write {world_size} numbers, one per rank, "
                            "with commas between them")
        return args.num_microbatches
    if args.equal_shares or world_size == 1:
        return [mean] * world_size
    if speeds := measured_speeds(args, args.batch_size, dtype, config):
        seconds = [speed.whole_model for speed in speeds]
    else:
        model = make_llama(config, args.seed, device, dtype, args.recompute)
        seconds = gather(seconds_of_microbatch(model, args.batch_size, args.seq_len, device))
    if dist.get_rank() == 0:
        tokens_per_second = ", ".join(f"{args.batch_size * args.seq_len / value:.0f}" for value in seconds)
        print(f"tokens/s of each rank alone: {tokens_per_second}", flush=True)
    return shares_by_speed(mean * world_size, seconds)


def token_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(logits, batch["target_ids"])


def main():
    args = parse_args()
    plugin = HeterogeneousParallelPlugin(1, args.batch_size, args.dtype, args.device, recompute=args.recompute)
    print_banner(plugin.device, plugin.compute_dtype)
    config = once_per_machine(lambda: load_config(args.model_name, num_attention_heads=None))
    check_positions(config, args.seq_len)
    shares, is_first = choose_shares(args, config, plugin.device, plugin.compute_dtype), dist.get_rank() == 0
    if args.local_steps:
        steps, shares = local_steps_of_round(args, shares)
        if is_first:
            print(f"local steps of a round: {', '.join(map(str, steps))}", flush=True)
    if is_first:
        print(f"micro-batches of a {'round' if args.local_steps else 'step'}, of {args.batch_size} samples each: "
              f"{', '.join(map(str, shares))}", flush=True)
    with torch.device("meta"):  # shapes only; memory comes with the weights
        model = Llama(config, plugin.compute_dtype)
    whole = PipelineTemplate.from_layers_per_stage(model, [config.num_hidden_layers])
    plugin.set_pipelines([whole] * len(shares), shares)
    compress(plugin, config, gradient_wire_dtype=args.gradient_wire_dtype)

    samples_of_step = plugin.global_batch_size // (args.local_steps or 1)
    samples = load_text(args, args.model_name, config.vocab_size,
                        args.max_steps_per_epoch and args.max_steps_per_epoch * samples_of_step)
    if args.local_steps and len(samples) < plugin.global_batch_size:
        raise UserError(f"the data set has {len(samples)} samples, fewer than the {plugin.global_batch_size} of a "
                        f"round of --local_steps {args.local_steps}: lower it, or add data")
    loader = plugin.prepare_dataloader(samples, shuffle=True, seed=args.seed, collate_fn=next_tokens)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    num_steps = args.epochs * loader.steps_per_epoch  # of rounds, with --local_steps
    if args.local_steps:
        whole_model = make_llama(config, args.seed, plugin.device, plugin.compute_dtype, args.recompute)
        optimizer = adamw(whole_model.named_parameters())
        training = train_locally(args, plugin, whole_model, optimizer, loader, token_loss, steps, num_steps)
    else:
        model, optimizer, _ = plugin.configure(
            model, adamw, weights=lambda stage: init_weights(stage.model, args.seed, plugin.device, split_over_tp))
        whole_model = model.module.model
        training = train(args, plugin, model, optimizer, loader, token_loss, num_steps)
    board = Board(os.path.join(args.log_dir, args.run_name), plugin.device)
    total = 0.0
    for step in training:
        board.log(step, plugin.global_batch_size * args.seq_len)
        total += step.loss
        if step.number % loader.steps_per_epoch == 0 and is_first:
            epoch = step.number // loader.steps_per_epoch
            path = os.path.join(args.checkpoint_dir, args.run_name, f"epoch_{epoch}")
            save_hugging_face(whole_model, args.model_name, path)
            print(f"epoch {epoch}: loss {total / loader.steps_per_epoch:.4f}, checkpoint {path}", flush=True)
            total = 0.0
    board.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --batch_size or --seq_len"):
        main()
