"""What a parameter is called: in our Llama, in the files of Hugging Face, and in those of peft."""

import re
from collections.abc import Callable

import torch

from pipeline_template import names_of

THEIR_NAMES = (  # our Llama's -> Hugging Face's
    (r"^embedding\.", "model.embed_tokens."),
    (r"^decoder_layers\.", "model.layers."),
    (r"^final_norm\.", "model.norm."),
    (r"^final_proj\.", "lm_head."),
    (r"\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.", ".self_attn."),
)


def their_name(name: str) -> str:
    """A parameter of our Llama as Hugging Face calls it."""
    for pattern, replacement in THEIR_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def peft_name(name: str) -> str:
    """A parameter of a model of transformers in the files: an adapter's has the name that peft gives it there."""
    return f"base_model.model.{name.replace('.default.', '.')}" if ".lora_" in name else name


def name_function(stage) -> Callable[[str], str]:
    """From a parameter's name in the model to that in the files."""
    return peft_name if hasattr(stage.model, "base_model_prefix") else their_name


def trained_alone(stage) -> set[str] | None:
    """The names of the adapters' parameters, where these are all that is trained and saved; else None."""
    return {name for name, _ in stage.model.named_parameters() if ".lora_" in name} or None


def as_files_have_it(model, name: str, kind: str) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """A function that turns a parameter into what files have for it: of a mixture of experts each expert by itself.

    One of several that published files have as one keeps the name that it has in the model, which is read, too.
    """
    is_of_transformers, is_weight = hasattr(model, "base_model_prefix"), kind == "model" and ".lora_" not in name
    if not (is_of_transformers and is_weight):
        return lambda full: {name: full}
    with names_of("transformers"):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, revert_weight_conversion

        converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    if any(target in name for each in converters if len(each.target_patterns) > 1 for target in each.target_patterns):
        return lambda full: {name: full}
    return lambda full: revert_weight_conversion(model, {name: full})
