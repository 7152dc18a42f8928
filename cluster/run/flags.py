"""Flags that the training scripts share, and the optimizer that some of them describe."""

import argparse
import os
import re
from collections.abc import Callable

import torch

from models.lora import fraction
from utils import ROOT, UserError, number, positive_float, positive_int, zero_or_more, zero_or_more_float

# Those of terminals, but for line ends and tabs; and surrogates, which stand for bytes that are no UTF-8.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]|\r(?!\n)")
seed = number(int, lambda value: 0 <= value < 1 << 40, "from 0 to 2^40 - 1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of all three scripts: what is trained, on what data and on what device."""
    parser.add_argument("--dataset_name", default="sotu",
                        help="sotu, a .txt, .jsonl, .json or .parquet file or a folder of them, or a Hub id, with "
                             ":CONFIG behind it where there are several; columns: text, messages, conversations, "
                             "prompt and completion, or instruction and output")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--learning_rate", type=positive_float, help="default: 0.6 / width, at most 3e-3 (LoRA: 2e-4)")
    parser.add_argument("--seed", type=seed, default=42)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", choices=["auto", "gloo"], default="auto",
                        help="gloo: machines with and without a GPU together, whose messages pass through host memory")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float64"],
                        help="of the activations; auto: bfloat16 where a GPU has it, else float32. A bfloat16 model of "
                             "transformers sends float32 between stages: --wire_dtype bfloat16 halves that")


def add_run_flags(parser: argparse.ArgumentParser, first_batch: int = 1) -> None:
    """Flags of the two scripts that train on all machines together: steps, shares of the work, what a run leaves.

    `first_batch`: --profile_batch counts from there on."""
    parser.add_argument("--max_grad_norm", type=zero_or_more_float, default=1.0, help="clip gradients (0: never)")
    parser.add_argument("--weight_decay", type=zero_or_more_float, default=0.01, help="of AdamW (%(default)s)")
    parser.add_argument("--adam_betas", type=betas, default=[0.9, 0.999], metavar="B1,B2",
                        help="of AdamW: how much of its averages of gradients and of their squares stays (0.9,0.999)")
    parser.add_argument("--warmup_steps", type=zero_or_more, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--lr_decay", choices=["none", "cosine"], default="none", help="the learning rate after these")
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    none = first_batch - 1
    parser.add_argument("--profile_batch", type=number(int, lambda value: value >= none, f"{none} or more"), default=0,
                        help=f"write this step's timeline, from {first_batch} on ({none}: none; default: %(default)s)")
    parser.set_defaults(first_batch=first_batch)
    parser.add_argument("--equal_shares", action="store_true", help="take all machines as equally fast")
    parser.add_argument("--run_name")
    parser.add_argument("--log_dir", type=os.path.abspath, default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--wandb_project", default="picotron_tutorial")
    parser.add_argument("--wandb_group", help="W&B shows the runs of a group together")


def check_text(flag: str, text: str) -> None:
    """Raises UserError for control characters other than line ends and tabs, which would do something to a terminal."""
    if CONTROL.search(text):
        raise UserError(f"{flag} {text!r} has control characters, or bytes that are no text: leave them out")


def betas(text: str) -> list[float]:
    """The type of --adam_betas."""
    if text.count(",") != 1:
        raise argparse.ArgumentTypeError(f"must be two numbers, as in 0.9,0.999, got {text!r}")
    return [fraction(each) for each in text.split(",")]


def make_adamw(args, params, make: Callable = torch.optim.AdamW) -> torch.optim.AdamW:
    """`params`: (name, parameter) pairs; those that are frozen are left out. `make`: AdamW, or what takes as much."""
    trained = [(name, param) for name, param in params if param.requires_grad]
    return make(trained, lr=args.learning_rate, betas=tuple(args.adam_betas),
                weight_decay=args.weight_decay, fused=True)
