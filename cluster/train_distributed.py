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
import os

from data.batches import add_data_flags
from models.causal import OVERRIDES, make_model
from models.lora import add_lora_flags
from ranks.errors import one_error_of_all
from run.check_replicas import add_check_flag
from run.flags import add_flags, add_run_flags
from run.generation import end_of_elastic_run
from run.layout import add_layout_flags
from run.local_steps import add_local_flags
from run.samples import add_replan_flag
from run.start import add_checkpoint_flags
from run.train import check_flags, run_training
from utils import ROOT, TINY_LLAMA, ArgumentParser, positive_int

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
    add_flags(parser)
    add_run_flags(parser)
    add_checkpoint_flags(parser)
    add_local_flags(parser)
    add_replan_flag(parser)
    add_check_flag(parser)
    add_layout_flags(parser)  # the last: it decides the defaults of what a plan decides
    parser.set_defaults(run_name="train_distributed", log_dir=os.path.join(ROOT, "logs", "runs"))
    return parser


def parse_args() -> argparse.Namespace:
    args = make_parser().parse_args()
    check_flags(args)
    return args


def main() -> None:
    run_training(parse_args(), make_model)


if __name__ == "__main__":
    with one_error_of_all(out_of_memory="use --recompute, or lower --batch_size or --seq_len"), end_of_elastic_run():
        main()
