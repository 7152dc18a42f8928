"""A Qwen over a few machines, say three Raspberry Pis: one pipeline, and a picture of a step.

    torchrun --standalone --nproc_per_node 3 cluster/three_stages_simple_pp.py --train_steps 20 --profile_batch 10
    torchrun --nnodes 3 --node_rank N --nproc_per_node 1 --master_addr FIRST --master_port 29500 \
        cluster/three_stages_simple_pp.py --train_steps 20 --profile_batch 10

Each process holds a stage: as many layers as make all stages take as long, by speeds that are measured first. One
process runs the same training as a single stage, with the same losses.
"""

from ranks import course  # noqa: F401  before step 9's modules

import argparse
import functools

import train_distributed
from models.causal import make_model
from run.flags import add_flags, add_run_flags
from run.generation import end_of_elastic_run
from run.layout import BY_SPEED
from run.start import add_checkpoint_flags
from run.train import check_flags, run_training
from utils import ArgumentParser, UserError, one_clear_error, positive_int

TOY = dict(vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=8,
           num_key_value_heads=4, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True)  # Qwen3


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_steps", type=positive_int, help="optimizer steps (default: one epoch of the data)")
    parser.add_argument("--batch_size", type=positive_int, default=16, help="samples of a step (16)")
    parser.add_argument("--microbatch_num", type=positive_int, default=4, help="micro-batches they are cut into (4)")
    parser.add_argument("--model_name", help="a directory, or a Hub id (default: a toy Qwen3)")
    add_flags(parser)
    add_run_flags(parser, profile_batch=1)
    add_checkpoint_flags(parser)
    parser.set_defaults(run_name="three_stages", seq_len=64, packing="text", validation_split=None)
    args = parser.parse_args()
    if args.batch_size % args.microbatch_num:
        raise UserError(f"--batch_size {args.batch_size} is not a multiple of --microbatch_num {args.microbatch_num}: "
                        "micro-batches are all of one size, choose numbers that divide")
    return args


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
    with one_clear_error(out_of_memory="use --recompute, raise --microbatch_num, or lower --seq_len"):
        with end_of_elastic_run():
            main()
