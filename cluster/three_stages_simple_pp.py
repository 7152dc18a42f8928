"""A Qwen over a few machines, say three Raspberry Pis: one pipeline, and a picture of a step.

    torchrun --standalone --nproc_per_node 3 cluster/three_stages_simple_pp.py --train_steps 20 --profile_batch 10
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        cluster/three_stages_simple_pp.py --train_steps 5 --batch_size 8 --microbatch_num 4

Each process holds a stage: as many layers as make all stages take as long, by speeds that are measured first. One
process runs the same training as a single stage, with the same losses.
"""

from ranks import course  # noqa: F401  before step 9's modules

import os
import sys

from hosts.inventory import without_password


def drop_password() -> None:
    """Starts this process anew, under the same id, without --sudo_pass; returns where it is not there.

    `ps` shows a command line to everybody, and W&B uploads it. Only a program that starts anew has another one.
    """
    if (kept := without_password(sys.argv[1:], os.environ.get("RANK", "0") == "0")) != sys.argv[1:]:
        script = sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv[1:])]  # Python's own flags, and the script's path
        os.execv(sys.executable, [sys.executable, *script, *kept])


if __name__ == "__main__":
    drop_password()  # before the command line is read, and before anything slow

import argparse
import functools

import train_distributed
from models.causal import make_model
from ranks.errors import one_error_of_all
from run.flags import add_flags, add_run_flags
from run.generation import end_of_elastic_run
from run.layout import BY_SPEED
from run.start import add_checkpoint_flags
from run.train import check_flags, run_training
from utils import ArgumentParser, UserError, positive_int

TOY = dict(vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=8,
           num_key_value_heads=4, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True)  # Qwen3


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_steps", type=positive_int, help="optimizer steps (default: one epoch of the data)")
    parser.add_argument("--batch_size", type=positive_int, default=from_environment("BATCH_SIZE", 16),
                        help="samples of a step (else $BATCH_SIZE, else 16)")
    parser.add_argument("--microbatch_num", type=positive_int, default=from_environment("MICROBATCH_NUM", 4),
                        help="micro-batches they are cut into (else $MICROBATCH_NUM, else 4)")
    parser.add_argument("--model_name", help="a directory, or a Hub id (default: a toy Qwen3)")
    add_flags(parser)
    add_run_flags(parser, first_batch=0)
    add_checkpoint_flags(parser)
    parser.add_argument("--sudo_pass", type=lambda _: None, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(profile_batch=from_environment("PROFILE_BATCH", 0, int), run_name="three_stages", seq_len=64,
                        packing="text", validation_split=None)
    args = parser.parse_args()
    if args.batch_size % args.microbatch_num:
        raise UserError(f"--batch_size {args.batch_size} is not a multiple of --microbatch_num {args.microbatch_num}: "
                        "micro-batches are all of one size, choose numbers that divide")
    return args


def from_environment(name: str, default: int, kind=positive_int) -> int:
    """The number in an environment variable, `default` where it is not set or empty. Raises UserError."""
    text = os.environ.get(name, "").strip()
    try:
        return kind(text) if text else default
    except (ValueError, argparse.ArgumentTypeError):
        raise UserError(f"the environment variable {name}={text!r} is no number that --{name.lower()} takes: correct "
                        "it, or unset it") from None


def main():
    """train_distributed.py with one pipeline over all processes, its layers by speed."""
    args = parse_args()
    own = {"batch_size": args.batch_size // args.microbatch_num, "num_microbatches": [[args.microbatch_num]],
           "max_steps": args.train_steps, "pipelines": BY_SPEED, "from_scratch": args.model_name is None}
    others = train_distributed.make_parser().parse_args([])
    check_flags(others)
    run_training(argparse.Namespace(**{**vars(others), **vars(args), **own}),
                 functools.partial(make_model, toy={"model_type": "qwen3", **TOY}))


if __name__ == "__main__":
    with one_error_of_all(out_of_memory="use --recompute, raise --microbatch_num, or lower --seq_len"):
        with end_of_elastic_run():
            main()
