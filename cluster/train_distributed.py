"""A model over a few machines that are not alike, say three with different GPUs, that survives the loss of one.

    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --max_steps_per_epoch 20
    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --model_name ID --lora_rank 16
    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --pipelines "8;5,3" --num_microbatches "6,2"
    cluster/launch_cluster.sh --elastic 2:3 hosts.txt -- cluster/train_distributed.py --save_every 50

By default each machine holds the whole model, a pipeline of one stage, and a step's micro-batches are shared out by
measured speed, so that none waits for the slowest. With --pipelines or a --plan machines share the model, and where one
of them can't hold it, they plan by themselves. Every target of the global batch counts once, whoever computes it: the
losses are those of one process that reads as many micro-batches a step. With --local_steps they are not: see
run/local_steps.py.
"""

from ranks import course  # noqa: F401  before step 9's modules

import argparse
import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from data.batches import Data, add_data_flags, check_data_flags, pad, weighted
from models.causal import OVERRIDES, make_model, with_weights
from models.lora import add_lora_flags, check_lora_flags, choose_lora_dtype, print_sizes
from planning.plan_file import machines_of
from ranks.join import meet, print_banner
from ranks.placement import take_places
from run.evaluation import Evaluator
from run.flags import add_flags, add_run_flags, make_adamw
from run.generation import Generation, end_of_elastic_run, train_in_generations
from run.layout import add_layout_flags, check_layout_flags, choose_layout
from run.local_steps import add_local_flags, check_local_flags, train_rounds
from run.loop import print_epochs, train, warn_of_damage
from run.plan_at_start import find_plan
from run.replan import Replanner, add_replan_flag, check_replan_flag
from run.session import Run, add_checkpoint_flags
from utils import ROOT, TINY_LLAMA, ArgumentParser, number, one_clear_error, positive_int

threads = number(int, lambda value: 1 <= value <= 4096, "from 1 to 4096")


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--max_steps_per_epoch", type=positive_int, help="an epoch of so much of the data only")
    parser.add_argument("--max_steps", type=positive_int, help="instead of --epochs: optimizer steps in all")
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a directory with config.json, or a Hub id")
    for name in OVERRIDES:
        parser.add_argument(f"--{name}", type=positive_int, help="instead of the model's own")
    parser.add_argument("--init_from", help="weights to start from: a directory with safetensors, or a Hub id "
                                            "(default: those of --model_name)")
    parser.add_argument("--from_scratch", action="store_true", help="draw random weights, by --seed")
    add_lora_flags(parser)
    add_data_flags(parser)
    parser.add_argument("--omp_num_threads", type=threads, help="threads a process (default: torch's choice)")
    add_flags(parser)
    add_run_flags(parser, profile_batch=-1)
    add_checkpoint_flags(parser)
    add_local_flags(parser)
    add_replan_flag(parser)
    add_layout_flags(parser)  # the last: it decides the defaults of what a plan decides
    parser.set_defaults(run_name="train_distributed", log_dir=os.path.join(ROOT, "logs", "runs"))
    return parser


def check_flags(args) -> None:
    """Fills in defaults. Raises UserError for flags that do not go together."""
    check_layout_flags(args)
    check_local_flags(args)
    check_replan_flag(args)
    check_lora_flags(args)
    check_data_flags(args)


def parse_args() -> argparse.Namespace:
    args = make_parser().parse_args()
    check_flags(args)
    return args


def main(args: argparse.Namespace | None = None, make_model: Callable = make_model) -> None:
    """`args`: of another script, with all flags of this one. `make_model(args, dtype)` returns a Model."""
    train_in_generations(args or parse_args(), functools.partial(train_generation, make_model))


def train_generation(make_model: Callable, args: argparse.Namespace, generation: Generation) -> None:
    """The whole training with the processes that are there. An elastic run begins anew here when these change."""
    device, dtype = join(args, generation)
    made = make_model(args, dtype)
    if made.lora:
        print_sizes(made.lora)
    if plan := find_plan(args, made, device, dtype):
        take_places(machines_of(plan))
    run = Run(args, generation)  # finds the checkpoint to go on from
    layout = choose_layout(args, made, plan, run.found, device, dtype)
    replanner = Replanner(args, layout, made.model.config)
    made = with_weights(made, args, device, run.found is not None)
    args.learning_rate = args.learning_rate or made.learning_rate
    vars(args).update(layout.as_flags())  # for the records that the run leaves
    plugin = layout.form(args, made.model.config)
    if args.local_steps:
        train_rounds(args, plugin, made, layout, run)
    else:
        train_together(args, plugin, made, run, replanner)
    dist.destroy_process_group()


def join(args, generation: Generation) -> tuple[torch.device, torch.dtype]:
    """Meets the other ranks. Returns the device that this one computes on, and the dtype of all."""
    device, dtype = meet(args, generation.join)
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)  # OMP_NUM_THREADS would be read only at import
    if args.lora_rank:
        dtype = choose_lora_dtype(args, device, dtype)
    print_banner(device, dtype)
    return device, dtype


def train_together(args, plugin, made, run: Run, replanner: Replanner) -> None:
    """Synchronous training: all machines make each optimizer step together."""
    tokenizer = args.model_name or TINY_LLAMA
    run.check(made.names, plugin.global_batch_size, args.seq_len)
    data = Data(args, tokenizer, made.model.config.vocab_size, plugin.global_batch_size, args.max_steps,
                args.max_steps_per_epoch)
    run.check_data(tokenizer, made.model.config.vocab_size, data.read)
    steps_per_epoch = data.train.steps_per_epoch
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    data.train.set_steps(num_steps)
    loader = plugin.prepare_dataloader(data.train, collate_fn=data.collate)
    adamw, weights = functools.partial(make_adamw, args), run.weights(plugin.device, made)
    model, optimizer, _ = plugin.configure(made.model, adamw, weights=weights, seed=args.seed)
    ready = functools.partial(run.begin, plugin, model, optimizer, names=made.names, files=made.files,
                              tokenizer=tokenizer, steps_per_epoch=steps_per_epoch)
    criterion, evaluator = weighted(made.criterion), None
    if data.evaluation:
        evaluator = Evaluator(plugin, model, data.evaluation, pad, made.criterion, args.eval_batches)
    steps = train(args, plugin, model, optimizer, loader, criterion, num_steps, run, ready, steps_per_epoch, evaluator,
                  replanner)
    for step in print_epochs(steps, steps_per_epoch):
        warn_of_damage(step, run.start, run.source, made.model.config.vocab_size)


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --batch_size or --seq_len"), end_of_elastic_run():
        main()
