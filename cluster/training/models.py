"""The model of --model_name: our Llama where it is one that ours implements, else the class of transformers."""

import argparse
import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn

from model import Llama, init_weights
from run_common import check_positions, load_model, local_directory, mean_cross_entropy
from tensor_parallel import cross_entropy, split_over_tp
from training.pieces import their_name
from training.resume import published_weights
from utils import UserError, default_learning_rate, load_config, once_per_machine, read_config


COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class Model(NamedTuple):
    """`model`: whole, on the meta device where its weights come later. `initial`: as plugin.configure(weights=...).

    `names`: of its parameters, as files have them. `config`: the content of its config.json.
    """

    model: nn.Module
    initial: Callable | None
    criterion: Callable
    names: list[str]
    config: dict


def make_model(args, device: torch.device, dtype: torch.dtype, has_weights: bool) -> Model:
    """`has_weights`: a checkpoint gives them. Sets the default of args.learning_rate. Collective. Raises UserError."""
    fields = once_per_machine(lambda: read_config(args.model_name))
    published = None
    if args.init_from and not has_weights:
        directory = once_per_machine(lambda: local_directory(args.init_from, "--init_from"))
        published = published_weights(directory)
    if fields.get("model_type") == "llama" and is_ours(fields):
        return our_llama(args, device, dtype, published)
    return of_transformers(args, fields, device, dtype, published, has_weights)


def is_ours(fields: dict) -> bool:
    """Whether our Llama can be made of a configuration; transformers says below what is wrong with an odd one."""
    counts = [fields.get(name) for name in COUNTS]
    rotary = fields["rope_parameters"] if isinstance(fields.get("rope_parameters"), dict) else {}
    numbers = [fields.get("rms_norm_eps"), fields.get("initializer_range"), rotary.get("rope_theta")]
    if not all(type(count) is int and count > 0 for count in counts) or fields["head_dim"] % 2:
        return False
    if not all(type(value) in (int, float) for value in numbers):
        return False
    try:
        with torch.device("meta"):
            Llama(argparse.Namespace(**{**fields, "num_hidden_layers": 1}))
        return True
    except (UserError, AttributeError, TypeError, RuntimeError, OverflowError, ArithmeticError):  # read again below
        return False


def our_llama(args, device: torch.device, dtype: torch.dtype, published: Callable | None) -> Model:
    config = once_per_machine(lambda: load_config(args.model_name, **{name: getattr(args, name) for name in SIZES}))
    if config.head_dim % 2:
        raise UserError(f"--num_attention_heads {config.num_attention_heads} leaves {config.head_dim} numbers a head, "
                        "and rotary embeddings need an even number: choose fewer heads")
    check_positions(config, args.seq_len)
    with torch.device("meta"):  # shapes only; memory comes with the weights
        model = Llama(config, dtype)
    args.learning_rate = args.learning_rate or default_learning_rate(config.hidden_size)

    def initial(stage) -> None:
        if published:
            published(stage, device)
        else:
            init_weights(stage.model, args.seed, device, split_over_tp)

    def criterion(logits, batch):
        return cross_entropy(logits, batch["target_ids"], config.vocab_size)

    names = [their_name(name) for name, _ in model.named_parameters()]
    return Model(model, initial, criterion, names, checkpoint_config(model, master_dtype(dtype)))


def of_transformers(args, fields: dict, device: torch.device, dtype: torch.dtype, published: Callable | None,
                    has_weights: bool) -> Model:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES  # takes seconds

    if (kind := fields.get("model_type")) not in CLASSES:
        raise UserError(f"--model_name {args.model_name!r} is a {kind}, and transformers has no causal language model "
                        "of this type: use one that writes text")
    if args.num_attention_heads or args.num_key_value_heads:
        raise UserError("--num_attention_heads and --num_key_value_heads are for a Llama: leave them out")
    directory = once_per_machine(lambda: local_directory(args.model_name, "--model_name", "*.json"))
    sizes = {"num_hidden_layers": args.num_hidden_layers} if args.num_hidden_layers else {}
    settings = argparse.Namespace(**{**vars(args), "model_name": directory})
    try:
        with torch.device("meta") if has_weights or published else contextlib.nullcontext():
            model, _ = load_model(CLASSES[kind], {}, settings, random_weights=True, **sizes)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many classes, for fields that do not go together
        raise UserError(f"--model_name {args.model_name!r}: transformers makes no {CLASSES[kind]} of its config.json "
                        f"({' '.join(str(error).split())[:300]}): correct it") from None
    args.learning_rate = args.learning_rate or min(1e-3, default_learning_rate(model.config.hidden_size))
    coefficient = getattr(model.config, "router_aux_loss_coef", 0)
    criterion = functools.partial(mean_cross_entropy, router_loss_coef=coefficient)
    initial = (lambda stage: published(stage, device)) if published else None
    names, config = [name for name, _ in model.named_parameters()], checkpoint_config(model, master_dtype(dtype))
    return Model(model, initial, criterion, names, config)


def checkpoint_config(model: nn.Module, dtype: torch.dtype) -> dict:
    """The content of config.json for a model whose parameters are of `dtype`."""
    fields = vars(model.config) if is_our_llama(model) else model.config.to_dict()
    name = "LlamaForCausalLM" if is_our_llama(model) else type(model).__name__
    return {**fields, "architectures": [name], "dtype": str(dtype).removeprefix("torch.")}


def is_our_llama(model: nn.Module) -> bool:
    return isinstance(model, Llama)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parameters, where activations have `dtype`."""
    return torch.promote_types(dtype, torch.float32)
