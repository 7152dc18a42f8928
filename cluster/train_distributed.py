"""A model over a few machines that are not alike, say three with different GPUs, that survives the loss of one.

    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --max_steps_per_epoch 20
    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --model_name ID --lora_rank 16
    torchrun --standalone --nproc_per_node 3 cluster/train_distributed.py --pipelines "8;5,3" --num_microbatches "6,2"
    cluster/launch_cluster.sh --elastic 2:3 hosts.txt -- cluster/train_distributed.py --save_every 50

By default each machine holds the whole model, a pipeline of one stage, and a step's micro-batches are shared out by
measured speed, so that none waits for the slowest. With --pipelines or a --plan machines share the model, and where one
of them can't hold it, they plan by themselves. Every target of the global batch counts once, whoever computes it: the
losses are those of one process that reads as many micro-batches a step. With --local_steps they are not: see
training/local_steps.py.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import functools
import os

import torch
import torch.distributed as dist

import process_group_manager as pgm
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from planning.schedules import SCHEDULES
from training.auto_plan import plan_by_itself
from training.board import Board
from training.common import add_flags, add_run_flags, print_banner
from training.compression import WIRE_DTYPES, compress
from data.load import add_data_flags, check_data_flags, load_data
from training.evaluation import Evaluator
from training.layout import add_layout_flags, choose_layout
from training.local_steps import add_local_flags, check_local_flags, train_rounds
from training.loop import train
from training.lora import add_lora_flags, check_lora_flags, choose_lora_dtype, print_sizes
from training.models import SIZES, make_model
from training.plan_file import add_plan_flag, follow_plan, make_arrangement
from checkpoints.run import Run, add_checkpoint_flags
from checkpoints.survive import end_of_elastic_run, is_elastic
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, choose_device, number, one_clear_error, positive_int,
)

ELASTIC_TIMEOUT = 60  # seconds that ranks wait for each other where another start is better than a long wait


threads = number(int, lambda value: 1 <= value <= 4096, "from 1 to 4096")


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--max_steps_per_epoch", type=positive_int, help="an epoch of so much of the data only")
    parser.add_argument("--max_steps", type=positive_int, help="instead of --epochs: optimizer steps in all")
    parser.add_argument("--batch_size", type=positive_int, default=4, help="samples of a micro-batch")
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a directory with config.json, or a Hub id")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive_int, help="instead of the model's own")
    parser.add_argument("--init_from", help="weights to start from: a directory with safetensors, or a Hub id "
                                            "(default: those of --model_name)")
    parser.add_argument("--from_scratch", action="store_true", help="draw random weights, by --seed")
    add_lora_flags(parser)
    add_data_flags(parser)
    add_layout_flags(parser)
    add_plan_flag(parser)
    parser.add_argument("--pp_engine", choices=list(SCHEDULES), default="1f1b", help="the pipelines' schedule")
    parser.add_argument("--wire_dtype", choices=WIRE_DTYPES, help="what stages send hidden states and gradients as")
    parser.add_argument("--omp_num_threads", type=threads, help="threads a process (default: torch's choice)")
    add_flags(parser)
    add_run_flags(parser, profile_batch=-1)
    add_checkpoint_flags(parser)
    add_local_flags(parser)
    parser.set_defaults(run_name="train_distributed", log_dir=os.path.join(ROOT, "logs", "runs"))
    args = parser.parse_args()
    check_local_flags(args)
    check_lora_flags(args)
    check_data_flags(args)
    return parser, args


def micro_batches_of(run: Run, args) -> int | None:
    """The micro-batches of a step that the checkpoint has decided; None in a new run."""
    if run.found is None:
        return None
    count, left_over = divmod(run.found.state["global_batch"], args.batch_size)
    if left_over:
        raise UserError(f"--batch_size {args.batch_size} does not divide the {run.found.state['global_batch']} samples "
                        f"of a step of {run.found.path}: choose one that does")
    return count


def main():
    parser, args = parse_args()
    device, dtype, backend = choose_device(args.device, args.dtype)
    plan = {}
    arrange = make_arrangement(parser, args, plan)
    pgm.init_process_group(backend, ELASTIC_TIMEOUT if is_elastic() else 600, arrange)
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)  # OMP_NUM_THREADS would be read only at import
    if args.lora_rank:
        dtype = choose_lora_dtype(args, device, dtype)
    print_banner(device, dtype)
    plan_by_itself(args, device, dtype)
    run = Run(args)
    made = make_model(args, device, dtype, run.found is not None)
    if made.lora:
        print_sizes(made.lora)
    if plan:
        follow_plan(args, plan, made.model.config, str(dtype).removeprefix("torch."))
        args.batch_size, args.pipelines = args.micro_batch_size, [args.pipelines]
        args.num_microbatches = [args.num_microbatches]
    plugin = HeterogeneousParallelPlugin(args.tp_size, args.batch_size, args.dtype, args.device,
                                         SCHEDULES[args.pp_engine], args.recompute)
    templates, shares = choose_layout(args, made.model, device, dtype, micro_batches_of(run, args), made.lora)
    if args.local_steps:
        train_rounds(args, plugin, made, templates, shares, run)
    else:
        train_together(args, plugin, made, templates, shares, run)
    dist.destroy_process_group()


def train_together(args, plugin, made, templates: list, shares: list[int], run: Run) -> None:
    """Synchronous training: all machines make each optimizer step together."""
    if dist.get_rank() == 0:
        print(f"micro-batches of a step, of {args.batch_size} samples each: {', '.join(map(str, shares))}", flush=True)
    plugin.set_pipelines(templates, shares)
    has_stages, has_peers = any(template.num_stages > 1 for template in templates), len(templates) > 1
    if is_elastic():  # with fewer machines there may be nothing to send
        compress(plugin, made.model.config, args.wire_dtype if has_stages else None,
                 args.gradient_wire_dtype if has_peers else None)
    else:
        compress(plugin, made.model.config, args.wire_dtype, args.gradient_wire_dtype)
    run.check(made.names, plugin.global_batch_size, args.seq_len)
    data = load_data(args, args.model_name, made.model.config.vocab_size, plugin.global_batch_size, args.max_steps,
                     args.max_steps_per_epoch)
    run.check_data(args.model_name, made.model.config.vocab_size, data.read)
    steps_per_epoch = data.train.steps_per_epoch
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    data.train.set_steps(num_steps)
    loader = plugin.prepare_dataloader(data.train, collate_fn=data.collate)
    def adamw(params):
        trained = [(name, param) for name, param in params if param.requires_grad]
        return torch.optim.AdamW(trained, lr=args.learning_rate, fused=True)

    weights = run.weights(plugin.device, made.initial, made.lora)
    model, optimizer, _ = plugin.configure(made.model, adamw, weights=weights, seed=args.seed)
    ready = functools.partial(run.begin, plugin, model, optimizer, names=made.names, files=made.files,
                              tokenizer=args.model_name, steps_per_epoch=steps_per_epoch)
    criterion, evaluator = data.weighted(made.criterion), None
    if data.evaluation:
        evaluator = Evaluator(plugin, model, data.evaluation, data.collate_evaluation, made.criterion,
                              args.eval_batches)
    board, total, count = None, 0.0, 0
    for step in train(args, plugin, model, optimizer, loader, criterion, num_steps, run, ready, steps_per_epoch,
                      evaluator):
        board = board or Board(os.path.join(args.log_dir, args.run_name), plugin.device, run.start)
        with run.watch.lost_peers():
            board.log(step, plugin.global_batch_size * args.seq_len, step.evaluation, step.sample)
        total, count = total + step.loss, count + 1
        if steps_per_epoch and step.number % steps_per_epoch == 0:
            if dist.get_rank() == 0:
                print(f"epoch {step.number // steps_per_epoch}: loss {total / count:.4f}", flush=True)
            total, count = 0.0, 0
    if board:
        board.close()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --batch_size or --seq_len"), end_of_elastic_run():
        main()
