"""A Qwen over a few machines, say three Raspberry Pis: one pipeline, and a picture of a step.

    torchrun --standalone --nproc_per_node 3 cluster/three_stages_simple_pp.py --train_steps 20 --profile_batch 10
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        cluster/three_stages_simple_pp.py --train_steps 20 --profile_batch 10

Each process holds a stage: as many layers as make all stages take as long, by the speeds in cluster.json. One process
runs the same training as a single stage, with the same losses.
"""

from training.sudo_pass import drop_password

if __name__ == "__main__":
    drop_password()  # before the command line is read, and before anything slow

import argparse
import functools
import os

import torch
import torch.distributed as dist

from dataloader import next_tokens
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
from run_common import load_model, local_directory
from checkpoints.run import Run, add_checkpoint_flags
from training.common import add_flags, add_run_flags, from_environment, print_banner
from data.load import load_data
from training.loop import train
from training.loss import mean_cross_entropy
from training.machine_facts import once_per_machine
from training.models import config_file
from training.speeds import layers_by_speed, measured_speeds
from utils import (
    TINY_LLAMA, ArgumentParser, UserError, default_learning_rate, one_clear_error, positive_int, read_config,
)

CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOY = dict(vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=8,
           num_key_value_heads=4, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True)  # Qwen3


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_steps", type=positive_int, help="optimizer steps (default: one epoch of the data)")
    parser.add_argument("--batch_size", type=positive_int, default=from_environment("BATCH_SIZE", 16),
                        help="samples of a step (else $BATCH_SIZE, else 16)")
    parser.add_argument("--microbatch_num", type=positive_int, default=from_environment("MICROBATCH_NUM", 4),
                        help="micro-batches they are cut into (else $MICROBATCH_NUM, else 4)")
    parser.add_argument("--model_name", help="a Qwen2 or Qwen3: a directory, or a Hub id (default: a toy Qwen3)")
    add_flags(parser)
    add_run_flags(parser, profile_batch=from_environment("PROFILE_BATCH", 0, int))
    add_checkpoint_flags(parser)
    parser.add_argument("--sudo_pass", help=argparse.SUPPRESS)
    parser.set_defaults(run_name="three_stages", seq_len=64, packing="text", validation_split=None)
    args = parser.parse_args()
    if args.batch_size % args.microbatch_num:
        raise UserError(f"--batch_size {args.batch_size} is not a multiple of --microbatch_num {args.microbatch_num}: "
                        "micro-batches are all of one size, choose numbers that divide")
    return args


def load_qwen(args) -> tuple[torch.nn.Module, dict | None]:
    """The model and its weights; the toy has them, random ones, in itself. Collective."""
    directory, kind = None, "qwen3"
    if args.model_name is not None:
        directory = once_per_machine(lambda: local_directory(args.model_name, "--model_name"))
        kind = once_per_machine(lambda: read_config(directory)).get("model_type")
    if kind not in CLASSES:
        raise UserError(f"--model_name {args.model_name!r} is a {kind}, not one of {', '.join(CLASSES)}: run_gpt2.py, "
                        "run_llama.py and train.py of step 9 train others")
    return load_model(CLASSES[kind], TOY, argparse.Namespace(**{**vars(args), "model_name": directory}))


def main():
    args = parse_args()
    microbatch_size, is_first = args.batch_size // args.microbatch_num, int(os.environ.get("RANK", 0)) == 0
    plugin = HeterogeneousParallelPlugin(1, microbatch_size, args.dtype, args.device, recompute=args.recompute)
    print_banner(plugin.device, plugin.compute_dtype)
    run = Run(args)
    model, weights = load_qwen(args)
    speeds = measured_speeds(args, microbatch_size, plugin.compute_dtype)
    layers = layers_by_speed(model, speeds, dist.get_world_size())
    if is_first:
        print(f"decoder layers of the stages: {', '.join(map(str, layers))}", flush=True)
    plugin.set_pipelines([PipelineTemplate.from_layers_per_stage(model, layers)], [args.microbatch_num])

    names, files = [name for name, _ in model.named_parameters()], config_file(model, plugin.master_dtype)
    run.check(names, plugin.global_batch_size, args.seq_len)
    tokenizer = args.model_name or TINY_LLAMA
    data = load_data(args, tokenizer, model.config.vocab_size, args.batch_size, args.train_steps, shuffle=False)
    run.check_data(tokenizer, model.config.vocab_size, data.read)
    samples = data.train
    per_epoch, num_steps = samples.steps_per_epoch, args.train_steps or samples.steps_per_epoch
    samples.set_steps(num_steps)
    loader = plugin.prepare_dataloader(samples, collate_fn=next_tokens)
    args.learning_rate = args.learning_rate or default_learning_rate(model.config.hidden_size)
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    model, optimizer, _ = plugin.configure(model, adamw, weights=run.weights(plugin.device, weights), seed=args.seed)
    ready = functools.partial(run.begin, plugin, model, optimizer, names=names, files=files, tokenizer=tokenizer,
                              steps_per_epoch=per_epoch)
    for step in train(args, plugin, model, optimizer, loader, mean_cross_entropy, num_steps, run, ready, per_epoch):
        if is_first and per_epoch and step.number % per_epoch == 0 and step.number < num_steps:
            print(f"the data holds {per_epoch} steps and starts again", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, raise --microbatch_num, or lower --seq_len"):
        main()
