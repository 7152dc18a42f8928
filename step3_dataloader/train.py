"""Step 3, the data loader: real text and gradient accumulation. The baseline that later steps have to reproduce.

    torchrun --nproc_per_node 1 train.py --run_name baseline
"""

import os
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from dataloader import MicroBatchDataLoader, load_samples
from metrics import RunLogger
from model import Llama, cast_weights_once, cross_entropy, init_weights
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, choose_device, compile_layers, default_learning_rate, load_config,
    make_scheduler, one_clear_error, positive_float, positive_int, to_readable_format, zero_or_more, zero_or_more_float,
)


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    # Environment
    parser.add_argument("--omp_num_threads", type=positive_int, default=None,
                        help="threads a process (default: torch's choice)")
    parser.add_argument("--tokenizers_parallelism", choices=["true", "false"], default="true", help="encode in threads")
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
    # Data
    parser.add_argument("--dataset_name", default="sotu", help="sotu, .txt, .jsonl, .csv, .parquet files, or a Hub id")
    parser.add_argument("--num_workers", type=zero_or_more, default=0, help="extra processes that load samples")
    parser.add_argument("--num_proc", type=positive_int, default=4, help="threads that encode text")
    # Training
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--learning_rate", type=positive_float, help="default: 0.6 / width, at most 3e-3")
    parser.add_argument("--warmup_steps", type=zero_or_more, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--lr_decay", choices=["none", "cosine"], default="none", help="the learning rate after these")
    parser.add_argument("--max_grad_norm", type=zero_or_more_float, default=1.0, help="clip gradients (0: never)")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--micro_batch_size", type=positive_int, default=4, help="samples that pass the model at once")
    parser.add_argument("--gradient_accumulation_steps", type=positive_int, default=8, help="micro-batches a step")
    parser.add_argument("--max_tokens", type=positive_int, default=204800, help="tokens to train on")
    parser.add_argument("--eval_every", type=zero_or_more, default=0, help="steps between evaluations (0: none)")
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
    args = parser.parse_args()
    for flag, step in (("tp_size", 4), ("dp_size", 5), ("pp_size", 7)):
        if (size := getattr(args, flag)) > 1:
            raise UserError(f"--{flag} {size}: step {step} adds this axis, here it has to be 1")
    return args


def train_step(model, data_loader) -> torch.Tensor:
    """Forward and, unless gradients are off, backward of an optimizer step's micro-batches. Returns their mean loss."""
    total_loss = 0.0
    num_microbatches = data_loader.gradient_accumulation_steps
    for _ in range(num_microbatches):
        batch = next(data_loader)
        logits = model(batch["input_ids"])  # (B, T, V)
        loss = cross_entropy(logits, batch["target_ids"]) / num_microbatches
        del logits  # the largest tensor of all, and backward does not need it
        if torch.is_grad_enabled():
            loss.backward()  # gradients add up, each divided already: their sum is the gradient of the mean loss
        total_loss += loss.detach()
    return total_loss


def evaluate(args, step: int, model, held_out: list[MicroBatchDataLoader]) -> dict[str, float]:
    """Every `--eval_every` steps the mean loss of the held-out samples, a global batch which is never trained on."""
    if not held_out or step % args.eval_every:
        return {}
    with torch.no_grad(), cast_weights_once():
        return {"validation_loss": train_step(model, *held_out).item()}


def make_data_loaders(args, config, device, num_steps: int, global_batch_size: int) -> list[MicroBatchDataLoader]:
    """The run's micro-batches and, with --eval_every, those of the held-out samples: the last global batch."""
    os.environ["TOKENIZERS_PARALLELISM"] = args.tokenizers_parallelism
    os.environ["RAYON_NUM_THREADS"] = str(args.num_proc)  # the tokenizer's threads
    parts = load_samples(
        args.dataset_name, args.model_name, args.seq_len, config.vocab_size, num_steps * global_batch_size,
        os.path.join(args.log_dir, "token_cache"), held_out=global_batch_size if args.eval_every else 0)
    sizes = args.micro_batch_size, args.gradient_accumulation_steps
    return [MicroBatchDataLoader(part, *sizes, device, args.num_workers) for part in parts]


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

    global_batch_size = args.micro_batch_size * args.gradient_accumulation_steps  # in samples
    tokens_per_step = global_batch_size * args.seq_len
    num_steps = args.max_tokens // tokens_per_step
    if num_steps == 0:
        raise UserError(f"--max_tokens {args.max_tokens} is less than the {tokens_per_step} of one step: raise it")

    data_loader, *held_out = make_data_loaders(args, config, device, num_steps, global_batch_size)
    init_weights(model, args.seed, device)
    if args.compile:
        compile_layers(model.decoder_layers.children(), device)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)
    if grid.is_logging_rank:
        num_params = to_readable_format(sum(p.numel() for p in model.parameters()))
        print(f"{num_params} parameters on {device}, activations in {dtype}, learning rate {args.learning_rate:.2g}")
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    logger = RunLogger(args, grid, num_steps, tokens_per_step)

    for step in range(1, num_steps + 1):
        start = time.perf_counter()
        model.zero_grad()
        with cast_weights_once():
            loss = train_step(model, data_loader)
        rows = [torch.linalg.vector_norm(param.grad, dim=-1) for param in model.parameters()]  # short sums are exact
        grad_norm = torch.nn.utils.get_total_norm(rows)
        if args.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, grad_norm)
        optimizer.step()
        numbers = loss.item(), grad_norm.item(), scheduler.get_last_lr()[0], time.perf_counter() - start
        logger.log(step, *numbers, **evaluate(args, step, model, held_out))
        scheduler.step()
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="lower --micro_batch_size or --seq_len"):
        main()
