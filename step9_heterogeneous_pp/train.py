"""Step 9, heterogeneous pipelines: one model on pipelines with unlike numbers of stages, layers and micro-batches.

    torchrun --nproc_per_node 3 train.py --pipelines "8;5,3" --num_microbatches "6,2"
    torchrun --nproc_per_node 4 train.py --dp_size 2 --pp_size 2
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from dataloader import collate_batch, load_samples
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from metrics import RunLogger
from model import Llama, init_weights
from pipeline_parallel import SCHEDULES
from pipeline_template import PipelineTemplate
from tensor_parallel import cross_entropy, split_over_tp
from timeline import check_profile_batch, timeline
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, default_learning_rate, load_config,
    make_scheduler, one_clear_error, positive_float, positive_int, to_readable_format, zero_or_more,
    zero_or_more_float,
)


def counts(text: str) -> list[int]:
    """The type of flags like 5,3."""
    try:
        return [positive_int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers and commas, as in 5,3") from None


@dataclass
class Task:
    """What a script trains. The flags say the rest: in which steps, on which ranks."""

    model: nn.Module  # whole, on the meta device where its weights come later
    criterion: Callable  # (output, batch) -> the mean loss of a micro-batch
    weights: Callable | str | None = None  # as plugin.configure takes them
    pipelines: Callable | None = None  # model -> templates, and micro-batches of each, where no flag gives them


def parse_args(doc: str, reads_weights: bool = False, **defaults):
    parser = ArgumentParser(description=doc.splitlines()[0])
    # Environment
    parser.add_argument("--omp_num_threads", type=positive_int, default=None,
                        help="threads a process (default: torch's choice)")
    parser.add_argument("--tokenizers_parallelism", choices=["true", "false"], default="true", help="encode in threads")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default="auto",
                        help="of the activations (run_*: of matmuls); auto: bfloat16 where a GPU has it, else float32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder layers")
    parser.add_argument("--timeout", type=positive_float, default=600, help="seconds that ranks wait for each other")
    # Model
    parser.add_argument("--model_name", *["--model_name_or_path"] * reads_weights, default=TINY_LLAMA,
                        help="a directory, or a Hub id" + (", with its weights" if reads_weights else "; no weights"))
    if reads_weights:
        parser.add_argument("--random_weights", action="store_true", help="of a new model; files need have none")
    parser.add_argument("--num_hidden_layers", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_attention_heads", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_key_value_heads", type=positive_int, default=None, help="instead of the model's own")
    # Data
    parser.add_argument("--dataset_name", default="sotu", help="sotu, .txt, .jsonl, .csv, .parquet files, or a Hub id")
    parser.add_argument("--num_workers", type=zero_or_more, default=0, help="extra processes that load samples")
    parser.add_argument("--num_proc", type=positive_int, default=4, help="threads that encode text")
    # Training
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--learning_rate", type=positive_float, help="default: 0.6 / width, up to 3e-3 (run_*: 1e-3)")
    parser.add_argument("--warmup_steps", type=zero_or_more, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--lr_decay", choices=["none", "cosine"], default="none", help="the learning rate after these")
    parser.add_argument("--max_grad_norm", type=zero_or_more_float, default=1.0, help="clip gradients (0: never)")
    parser.add_argument("--seq_len", type=positive_int, default=128, help="tokens in a sample")
    parser.add_argument("--micro_batch_size", "--microbatch_size", type=positive_int, default=4, help="samples at once")
    parser.add_argument("--gradient_accumulation_steps", type=positive_int, default=8, help="micro-batches a step")
    parser.add_argument("--num_microbatches", type=counts, metavar="6,2", help="instead: those of each pipeline")
    parser.add_argument("--max_tokens", type=positive_int, default=204800, help="tokens to train on")
    parser.add_argument("--eval_every", type=zero_or_more, default=0, help="steps between evaluations (0: none)")
    parser.add_argument("--steps", type=positive_int, help="instead: optimizer steps")
    # Parallelism
    parser.add_argument("--tp_size", type=positive_int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp_size", type=positive_int, default=1, help="data-parallel ranks")
    parser.add_argument("--pp_size", type=positive_int, default=1, help="pipeline stages")
    parser.add_argument("--pipelines", type=lambda text: [counts(part) for part in text.split(";")], metavar="8;5,3",
                        help="instead of these two: decoder layers of each stage, with ';' between pipelines")
    parser.add_argument("--pp_engine", choices=list(SCHEDULES), default="1f1b", help="the pipeline's schedule")
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    # Logging
    parser.add_argument("--run_name", default="default_run")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--wandb_project", default="picotron_tutorial")
    parser.add_argument("--wandb_group", help="W&B shows the runs of a group together")
    parser.add_argument("--profile_batch", type=zero_or_more, default=0, help="write this step's timeline (0: none)")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.pipelines and (args.dp_size, args.pp_size) != (1, 1):
        raise UserError("--pipelines says how many pipelines and stages there are: leave out --dp_size and --pp_size")
    os.environ["TOKENIZERS_PARALLELISM"] = args.tokenizers_parallelism
    os.environ["RAYON_NUM_THREADS"] = str(args.num_proc)  # the tokenizer's threads
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)  # OMP_NUM_THREADS would be read only at import
    return args


def choose_pipelines(args, model, pipelines: Callable | None) -> tuple[list[PipelineTemplate], dict | list]:
    """The templates and numbers of micro-batches that the flags ask for, or else those of `pipelines(model)`.

    Raises UserError where flags are not possible.
    """
    if pipelines and args.pipelines is None and args.dp_size == args.pp_size == 1:
        templates, num_microbatches = pipelines(model)
    else:
        size, left_over = divmod(model.config.num_hidden_layers, args.pp_size)  # or one more layer in the first stages
        layers = args.pipelines or [[size + (s < left_over) for s in range(args.pp_size)]] * args.dp_size
        templates = [PipelineTemplate.from_layers_per_stage(model, sizes) for sizes in layers]
        num_microbatches = [args.gradient_accumulation_steps] * len(layers)
    return templates, args.num_microbatches or num_microbatches


def print_parameters(model, device, dtype, learning_rate: float) -> None:
    """Prints the largest number of parameters that a rank holds: an uneven split is possible. All ranks call it."""
    num_params = torch.tensor(sum(p.numel() for p in model.parameters()), device=device)
    dist.all_reduce(num_params, dist.ReduceOp.MAX)
    if pgm.process_group_manager.is_logging_rank:
        dtypes = f"activations in {dtype}"
        if model.module.autocast:  # it leaves the residuals, which stages send, in the dtype of the parameters
            dtypes = f"matmuls in {dtype}, messages in {model.module.dtype} (cluster/: --wire_dtype bfloat16 halves it)"
        print(f"up to {to_readable_format(num_params.item())} parameters per rank on {device}, {dtypes}, "
              f"learning rate {learning_rate:.2g}")


def make_llama(args, plugin: HeterogeneousParallelPlugin) -> Task:
    """Our Llama, on text. All ranks call it."""
    config = load_config(
        args.model_name, num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads, num_key_value_heads=args.num_key_value_heads)
    with torch.device("meta"):  # shapes only; init_weights allocates the memory
        model = Llama(config, plugin.compute_dtype)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)

    def criterion(logits, batch):
        return cross_entropy(logits, batch["target_ids"], config.vocab_size)

    return Task(model, criterion, lambda stage: init_weights(stage.model, args.seed, plugin.device, split_over_tp))


def evaluate(args, step: int, plugin, model: nn.Module, task: Task, held_out: list) -> dict[str, float]:
    """Every `--eval_every` steps the mean loss of the held-out samples, without dropout."""
    if not held_out or step % args.eval_every:
        return {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a DataLoader draws a number from dropout's generator
        loss = plugin.execute_pipeline(*map(iter, held_out), model.eval(), task.criterion, optimizer=None)
    model.train()
    return {"validation_loss": loss.item()}


def main(doc: str = __doc__, make_task: Callable = make_llama, reads_weights: bool = False, **defaults):
    """Trains the task that make_task(args, plugin) returns. `defaults` are other values of flags than those above."""
    args = parse_args(doc, reads_weights, **defaults)
    plugin = HeterogeneousParallelPlugin(args.tp_size, args.micro_batch_size, args.dtype, args.device,
                                         SCHEDULES[args.pp_engine], args.recompute, args.timeout, args.compile,
                                         vars(args))
    with pgm.together():
        task = make_task(args, plugin)
    plugin.set_pipelines(*choose_pipelines(args, task.model, task.pipelines))
    grid, device = pgm.process_group_manager, plugin.device

    tokens_per_step = plugin.global_batch_size * args.seq_len
    num_steps = args.steps or args.max_tokens // tokens_per_step
    if num_steps == 0:
        raise UserError(f"--max_tokens {args.max_tokens} is less than the {tokens_per_step} of one step: raise it")
    check_profile_batch(args.profile_batch, num_steps)

    parts = load_samples(args.dataset_name, args.model_name or TINY_LLAMA, args.seq_len, task.model.config.vocab_size,
                         num_steps * plugin.global_batch_size, os.path.join(args.log_dir, "token_cache"),
                         held_out=plugin.global_batch_size if args.eval_every else 0)
    data_loader, *held_out = (
        plugin.prepare_dataloader(part, collate_fn=collate_batch, num_workers=args.num_workers) for part in parts)
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    model, optimizer, data_loader = plugin.configure(task.model, adamw, data_loader, task.weights, args.seed)
    with pgm.together():
        logger = RunLogger(args, grid, num_steps, tokens_per_step)
    print_parameters(model, device, plugin.compute_dtype, args.learning_rate)
    scheduler = make_scheduler(optimizer, num_steps, args.warmup_steps, args.lr_decay)
    batches = iter(data_loader)

    for step in range(1, num_steps + 1):
        if step == args.profile_batch:
            timeline.start()
        start = time.perf_counter()
        loss = plugin.execute_pipeline(batches, model, task.criterion, optimizer)
        with timeline.span("gradient norm"):
            grad_norm = plugin.clip_grad_norm(model, args.max_grad_norm)
        with timeline.span("optimizer"):
            optimizer.step()
        numbers = loss.item(), grad_norm.item(), scheduler.get_last_lr()[0], time.perf_counter() - start
        logger.log(step, *numbers, **evaluate(args, step, plugin, model, task, held_out))
        scheduler.step()
        if step == args.profile_batch:
            timeline.write(os.path.join(args.log_dir, args.run_name, f"timeline_batch{step}_all.json"), grid)
    logger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, lower --micro_batch_size, or raise --tp_size or --pp_size"):
        main()
