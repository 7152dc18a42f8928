"""What run_causal_lm.py and run_gpt2.py share: a model with its weights, and the loss. The rest is train.py."""

import functools
import os
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from train import Task
from utils import UserError, default_learning_rate, require_reachable_hub


def make_hugging_face(args, class_name: str, toy: dict, pipelines: Callable | None = None) -> Task:
    """The model that load_model gives, and the loss of next tokens. All ranks call it."""
    if args.num_attention_heads or args.num_key_value_heads:
        raise UserError("--num_attention_heads and --num_key_value_heads are for train.py: leave them out")
    sizes = {"num_hidden_layers": args.num_hidden_layers} if args.num_hidden_layers else {}
    model, weights = load_model(class_name, toy, args, args.random_weights, **sizes)
    args.learning_rate = args.learning_rate or min(1e-3, default_learning_rate(model.config.hidden_size))
    criterion = functools.partial(
        mean_cross_entropy, router_loss_coef=getattr(model.config, "router_aux_loss_coef", 0))
    return Task(model, criterion, weights, pipelines)


def load_model(class_name: str, toy: dict, args, random_weights: bool = False,
               **sizes: int) -> tuple[nn.Module, str | None]:
    """A toy model of a class of transformers, with random weights, or that of --model_name_or_path and its directory.

    `sizes` are instead of those of the configuration.
    """
    import transformers  # imported here, because it takes seconds

    model_class = getattr(transformers, class_name)
    pattern = "*.json" if random_weights else "*.safetensors"
    directory = args.model_name and local_directory(args.model_name, pattern=pattern)
    config_class = model_class.config_class
    config = config_class.from_pretrained(directory, **sizes) if directory else config_class(**{**toy, **sizes})
    if args.dtype == "float64":
        config._experts_implementation = "eager"  # the library's grouped matmuls have no float64
    check_positions(config, args.seq_len)
    if directory is None or random_weights:
        torch.manual_seed(args.seed)
        return model_class(config), None
    with torch.device("meta"):
        return model_class(config), directory


def local_directory(name_or_path: str, flag: str = "--model_name_or_path", pattern: str = "*.safetensors") -> str:
    """The directory itself, or one with the files of that Hub id, downloaded: those of `pattern` and the small ones."""
    if os.path.isdir(name_or_path):
        return name_or_path
    require_reachable_hub(name_or_path, flag)
    from huggingface_hub import snapshot_download

    return snapshot_download(name_or_path, allow_patterns=[pattern, "*.json", "*.txt", "tokenizer*"])


def check_positions(config, seq_len: int) -> None:
    """Raises UserError where the model has fewer positions than a sample has tokens."""
    limit = getattr(config, "max_position_embeddings", seq_len)
    if limit < seq_len:
        raise UserError(f"--seq_len {seq_len} is more than the {limit} positions of the model: use {limit} or less")


def mean_cross_entropy(output, batch: dict[str, torch.Tensor], router_loss_coef: float = 0) -> torch.Tensor:
    """Mean cross-entropy of next tokens, (B, T, V) and (B, T).

    Where a mixture of experts returns its router's loss, `router_loss_coef` times this is added.
    """
    logits, targets = output.logits.flatten(0, -2), batch["target_ids"].flatten()
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    router_loss = getattr(output, "aux_loss", None)
    return loss if router_loss is None else loss + router_loss_coef * router_loss
