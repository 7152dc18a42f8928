"""Step 2, the process group manager: ranks as a grid, with a group along each axis. Each rank still trains by itself.

    torchrun --nproc_per_node 8 train.py --tp_size 2 --pp_size 2 --dp_size 2
"""

import os
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from metrics import RunLogger
from model import Llama, cast_weights_once, cross_entropy, init_weights
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, choose_device, compile_layers, default_learning_rate, load_config,
    one_clear_error, positive_float, positive_int, to_readable_format,
)


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    # Environment
    parser.add_argument("--omp_num_threads", type=positive_int, default=None,
                        help="threads a process (default: torch's choice)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default="auto",
                        help="of the activations; auto is bfloat16 where the GPU has it, else float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder layers")
    parser.add_argument("--timeout", type=positive_float, default=600, help="seconds that ranks wait for each other")
    # Model
    parser.add_argument("--model_name", default=TINY_LLAMA, help="a directory with a config.json, or a Hub id")
    parser.add_argument("--num_hidden_layers", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_attention_heads", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_key_value_heads", type=positive_int, default=None, help="instead of the model's own")
    # Training
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--learning_rate", type=positive_float, help="default: 0.6 / width, at most 3e-3")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--micro_batch_size", type=positive_int, default=4, help="samples that pass the model at once")
    parser.add_argument("--max_tokens", type=positive_int, default=25600, help="tokens to train on")
    # Parallelism
    parser.add_argument("--tp_size", type=positive_int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp_size", type=positive_int, default=1, help="data-parallel ranks")
    parser.add_argument("--pp_size", type=positive_int, default=1, help="pipeline stages")
    # Logging
    parser.add_argument("--run_name", default="default_run")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--wandb_project", default="picotron_tutorial")
    parser.add_argument("--wandb_group", help="W&B shows the runs of a group together")
    return parser.parse_args()


def main():
    args = parse_args()
    device, dtype, backend = choose_device(args.device, args.dtype)
    pgm.init_process_group(backend, args.timeout, {**vars(args), "dtype": dtype})
    pgm.setup_process_group_manager(dp_size=args.dp_size, pp_size=args.pp_size, tp_size=args.tp_size)
    grid = pgm.process_group_manager
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)  # OMP_NUM_THREADS would be read only at import

    config = load_config(
        args.model_name, num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads, num_key_value_heads=args.num_key_value_heads)
    with torch.device("meta"):  # shapes only; init_weights allocates the memory
        model = Llama(config, dtype)

    tokens_per_step = args.micro_batch_size * args.seq_len
    num_steps = args.max_tokens // tokens_per_step
    if num_steps == 0:
        raise UserError(f"--max_tokens {args.max_tokens} is less than the {tokens_per_step} of one step: raise it")

    init_weights(model, args.seed, device)
    if args.compile:
        compile_layers(model.decoder_layers.children(), device)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)
    if grid.is_logging_rank:
        num_params = to_readable_format(sum(p.numel() for p in model.parameters()))
        print(f"{num_params} parameters on {device}, activations in {dtype}, learning rate {args.learning_rate:.2g}")
    logger = RunLogger(args, grid, num_steps, tokens_per_step)

    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(config.vocab_size, (args.micro_batch_size, args.seq_len + 1), generator=generator).to(device)
    input_ids, target_ids = tokens[:, :-1], tokens[:, 1:]  # each (B, T): the target is the next token

    for step in range(1, num_steps + 1):
        start = time.perf_counter()
        model.zero_grad()
        with cast_weights_once():
            logits = model(input_ids)  # (B, T, V)
            loss = cross_entropy(logits, target_ids)
            del logits  # the largest tensor of all, and backward does not need it
            loss.backward()
        optimizer.step()
        logger.log(step, loss.item(), time.perf_counter() - start)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="lower --micro_batch_size or --seq_len"):
        main()
