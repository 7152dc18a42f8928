"""What the run_*.py scripts share: a model with its weights, and the loss. The rest is train.py."""

import functools
import os
from collections.abc import Callable
from zlib import crc32

import torch
import torch.nn as nn
import torch.nn.functional as F

from stage_weights import open_directory
from train import Task, main, text
from utils import UserError, default_learning_rate, one_clear_error, require_reachable_hub


DEFAULTS = dict(model_name=None, seq_len=64, max_tokens=40960, gradient_accumulation_steps=None)  # of the flags


def run(doc: str, class_name: str, toy: dict, pipelines: Callable, new_modules: tuple[str, ...] = (),
        data: Callable = text, **defaults) -> None:
    """A whole script: train.py with another model, pipelines and data, and with other `defaults` of its flags."""
    def make_task(args, _plugin) -> Task:
        return make_hugging_face(args, class_name, toy, new_modules, data, pipelines)

    with one_clear_error(out_of_memory="use --recompute, or lower --micro_batch_size"):
        main(doc, make_task, **DEFAULTS, **defaults)


def make_hugging_face(args, class_name: str, toy: dict, new_modules: tuple[str, ...] = (), data: Callable = text,
                      pipelines: Callable | None = None) -> Task:
    """The model that load_model gives, on text or other data. All ranks call it."""
    if args.num_attention_heads or args.num_key_value_heads:
        raise UserError("--num_attention_heads and --num_key_value_heads are for train.py: leave them out")
    if data is not text and args.dataset_name != "sotu":
        raise UserError(f"--dataset_name {args.dataset_name}: this script makes its own data, leave the flag out")
    sizes = {"num_hidden_layers": args.num_hidden_layers} if args.num_hidden_layers else {}
    model, weights = load_model(class_name, toy, args, new_modules, args.random_weights, **sizes)
    args.learning_rate = args.learning_rate or min(1e-3, default_learning_rate(model.config.hidden_size))
    criterion = functools.partial(
        mean_cross_entropy, router_loss_coef=getattr(model.config, "router_aux_loss_coef", 0))
    return Task(model, criterion, data, weights, pipelines)


def load_model(class_name: str, toy: dict, args, new_modules: tuple[str, ...] = (), random_weights: bool = False,
               **sizes: int) -> tuple[nn.Module, dict | None]:
    """A toy model of a class of transformers, with random weights, or the model of --model_name_or_path with its own.

    Parameters of `new_modules`, the classifier of a new task, are random where the files have none of their shape.
    `sizes` are instead of those of the configuration.
    """
    import transformers  # imported here, because it takes seconds

    model_class = getattr(transformers, class_name)
    pattern = "*.json" if random_weights else "*.safetensors"
    directory = args.model_name and local_directory(args.model_name, pattern=pattern)
    config_class = model_class.config_class
    config = config_class.from_pretrained(directory, **sizes) if directory else config_class(**{**toy, **sizes})
    config.num_labels = toy.get("num_labels", config.num_labels)
    if args.dtype == "float64":
        config._experts_implementation = "eager"  # the library's grouped matmuls have no float64
    if hasattr(config, "patch_size"):
        args.seq_len = (config.image_size // config.patch_size) ** 2 + 1  # tokens of an image
    check_positions(config, args.seq_len)
    if directory is None or random_weights:
        torch.manual_seed(args.seed)
        return model_class(config), None
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
    """Mean cross-entropy of next tokens, (B, T, V) and (B, T), or of classes, (B, classes) and (B).

    Where a mixture of experts returns its router's loss, `router_loss_coef` times this is added.
    """
    logits, targets = output.logits.flatten(0, -2), batch["target_ids"].flatten()
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    router_loss = getattr(output, "aux_loss", None)
    return loss if router_loss is None else loss + router_loss_coef * router_loss
