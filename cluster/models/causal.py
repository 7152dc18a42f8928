"""The model of --model_name: our Llama where it is one that ours implements, else the class of transformers."""

import argparse
import functools
import json
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn

import process_group_manager as pgm
from model import Llama, init_weights
from models.lora import RATE, Lora
from models.loss import mean_cross_entropy
from models.names import their_name
from models.published import published_weights
from pipeline_parallel import Action
from pipeline_template import PipelineTemplate, newer_than_tried
from ranks.collectives import gather, once, say
from ranks.placement import machine_rank
from run_common import check_positions, load_model, local_directory
from tensor_parallel import cross_entropy, split_over_tp
from utils import UserError, default_learning_rate, load_config, read_config

POSITIVE_INTEGERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")
WEIGHTS = re.compile(r"\.(safetensors|bin|pth?|gguf|h5|msgpack)(\.index\.json)?$")  # in whichever format
# Fields of a configuration that do not change what a model computes from its weights.
WORDS_ONLY = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache",
              "model_type", "initializer_range", "bos_token_id", "eos_token_id", "id2label", "label2id",
              "quantization_config", "output_attentions", "output_hidden_states", "return_dict", "tokenizer_class",
              "pretraining_tp"}
OVERRIDES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class Model(NamedTuple):
    """`model`: whole, on the meta device, without weights.

    `names`: of the parameters that are saved, as files have them. `files`: what checkpoints have beside these: the
    content of config.json, or of adapter_config.json. `learning_rate`: its default. `draw`: makes the model once more,
    with random weights. `initial`: as plugin.configure(weights=...), once with_weights has looked for them; `source`:
    where they are read from, None where they are drawn.
    """

    model: nn.Module
    criterion: Callable
    names: list[str]
    files: dict[str, bytes]
    learning_rate: float
    draw: Callable | None = None
    lora: Lora | None = None
    initial: Callable | None = None
    source: str | None = None


def make_model(args, dtype: torch.dtype, toy: dict | None = None) -> Model:
    """What is known of the model before it has weights. `toy`: the configuration where --model_name is not given.

    Collective. Raises UserError.
    """
    fields = once(machine_rank(), lambda: read_config(args.model_name)) if args.model_name else toy
    if fields.get("model_type") == "llama" and is_ours(fields) and not args.lora_rank:
        return our_llama(args, dtype)
    return of_transformers(args, fields, dtype)


def with_weights(made: Model, args, device: torch.device, has_weights: bool) -> Model:
    """The model with what gives a stage its initial weights. `has_weights`: a checkpoint gives them. Collective."""
    published = find_published(args) if made.lora or not has_weights else None
    if published:
        return made._replace(initial=lambda stage: published(stage, device), source=args.init_from or args.model_name)
    if has_weights:
        return made
    if made.draw:
        return made._replace(model=made.draw())
    return made._replace(initial=lambda stage: init_weights(stage.model, args.seed, device, split_over_tp))


def find_published(args) -> Callable | None:
    """What gives a stage the weights of --init_from or --model_name; None where they are to be drawn. Collective."""
    flag, name = ("--init_from", args.init_from) if args.init_from else ("--model_name", args.model_name)
    if args.from_scratch:
        if args.init_from:
            raise UserError("--init_from with --from_scratch: leave out one of them")
        return None
    directory = once(machine_rank(), lambda: local_directory(name, flag))
    is_bare = all(gather(os.path.isdir(name) and not any(map(WEIGHTS.search, os.listdir(name)))))
    may_be_drawn = not args.init_from and not args.lora_rank
    if is_bare and may_be_drawn:
        say(f"{name} has no weights: they are drawn by --seed")
        return None
    with pgm.together():
        return published_weights(directory)


def is_ours(fields: dict) -> bool:
    """Whether our Llama can be made of a configuration; transformers says below what is wrong with an odd one."""
    counts = [fields.get(name) for name in POSITIVE_INTEGERS]
    rotary = fields["rope_parameters"] if isinstance(fields.get("rope_parameters"), dict) else {}
    numbers = [fields.get("rms_norm_eps"), fields.get("initializer_range"), rotary.get("rope_theta")]
    if not all(type(count) is int and count > 0 for count in counts) or fields["head_dim"] % 2:
        return False
    if not all(type(value) in (int, float) for value in numbers):
        return False
    if rotary.get("rope_type") in ("linear", "llama3"):  # our_llama says what is wrong with their numbers
        rotary = {**rotary, "rope_type": "default"}
    try:
        with torch.device("meta"):
            Llama(argparse.Namespace(**{**fields, "num_hidden_layers": 1, "rope_parameters": rotary}))
        return True
    except (UserError, AttributeError, TypeError, RuntimeError, ArithmeticError):  # read again below
        return False


def our_llama(args, dtype: torch.dtype) -> Model:
    sizes = {name: getattr(args, name) for name in OVERRIDES}
    config = once(machine_rank(), lambda: load_config(args.model_name, **sizes))
    with torch.device("meta"):  # shapes only; memory comes with the weights
        model = Llama(config, dtype)
    if config.head_dim % 2:
        raise UserError(f"--num_attention_heads {config.num_attention_heads} leaves {config.head_dim} numbers a head, "
                        "and rotary embeddings need an even number: choose fewer heads")
    check_positions(config, args.seq_len)

    def criterion(logits, batch):
        return cross_entropy(logits, batch["target_ids"], config.vocab_size)

    names = [their_name(name) for name, _ in model.named_parameters()]
    return Model(model, criterion, names, config_file(model, dtype), default_learning_rate(config.hidden_size))


def of_transformers(args, fields: dict, dtype: torch.dtype) -> Model:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES  # takes seconds

    if (kind := fields.get("model_type")) not in CLASSES:
        raise UserError(f"--model_name {args.model_name!r} is a {kind}, and transformers has no causal language model "
                        f"of this type: use one that writes text{newer_than_tried('transformers')}")
    if args.num_attention_heads or args.num_key_value_heads:
        raise UserError("--num_attention_heads and --num_key_value_heads are for a Llama: leave them out")
    directory = args.model_name and once(
        machine_rank(), lambda: local_directory(args.model_name, "--model_name", "*.json"))
    toy = {} if directory else {name: value for name, value in fields.items() if name != "model_type"}
    sizes = {"num_hidden_layers": args.num_hidden_layers} if args.num_hidden_layers else {}
    settings = argparse.Namespace(**{**vars(args), "model_name": directory})

    def draw() -> nn.Module:
        return load_model(CLASSES[kind], toy, settings, random_weights=True, **sizes)[0]

    try:
        with torch.device("meta"):
            model = draw()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many classes, for fields that do not go together
        raise UserError(f"--model_name {args.model_name!r}: transformers makes no {CLASSES[kind]} of its config.json "
                        f"({' '.join(str(error).split())[:300]}): correct it"
                        f"{newer_than_tried('transformers')}") from None
    rate = RATE if args.lora_rank else min(1e-3, default_learning_rate(model.config.hidden_size))
    coefficient = getattr(model.config, "router_aux_loss_coef", 0)
    criterion = functools.partial(mean_cross_entropy, router_loss_coef=coefficient)
    if args.lora_rank:
        lora = Lora(args, model, dtype)
        return Model(model, criterion, lora.names, lora.files(), rate, lora=lora)
    names = [name for name, _ in model.named_parameters()]
    return Model(model, criterion, names, config_file(model, dtype), rate, draw)


def make_llama(config, seed: int, device: torch.device, dtype: torch.dtype) -> Llama:
    """The whole model on this rank, with its initial weights."""
    with torch.device("meta"):
        model = Llama(config, dtype)
    init_weights(model, seed, device, lambda full, dim: full)
    return model


def fields_of(model: nn.Module) -> dict:
    """The configuration of a model, ours or one of transformers."""
    return vars(model.config) if isinstance(model, Llama) else model.config.to_dict()


def function_of(model: nn.Module) -> dict:
    """The fields of its configuration that say what the model computes, as JSON has them."""
    return json.loads(json.dumps({name: value for name, value in fields_of(model).items() if name not in WORDS_ONLY},
                                 default=str))


def config_file(model: nn.Module, dtype: torch.dtype) -> dict[str, bytes]:
    """The content of config.json, by that name, for a model whose activations are of `dtype`."""
    kind = "LlamaForCausalLM" if isinstance(model, Llama) else type(model).__name__
    master_dtype = torch.promote_types(dtype, torch.float32)  # of the parameters
    config = {**fields_of(model), "architectures": [kind], "dtype": str(master_dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)  # the published weights' own
    return {"config.json": json.dumps(config, indent=2).encode()}


def parts_of(model: nn.Module) -> tuple[int, int, int, int]:
    """Parameters of what is before the decoder layers, of one of these, and of what is behind; the number of layers."""
    names = PipelineTemplate.get_modules(model)
    sizes = [sum(param.numel() for param in model.get_submodule(name).parameters()) for name in names]
    layers = [k for k, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
    return sum(sizes[:layers[0]]), sizes[layers[0]], sum(sizes[layers[-1] + 1:]), len(layers)


def forward(stage, communication, number: int, batch: dict[str, torch.Tensor]):
    """What this stage makes of micro-batch `number`; hidden states are sent on to the next stage."""
    action = Action("F", number)
    communication.post_receive(action, stage.hidden_shape(**batch))
    out = stage(communication.receive(action), **batch)
    communication.send(action, out if isinstance(out, torch.Tensor) else None)
    return out
