"""Pipeline templates: which stage of a pipeline holds which modules of a model.

    PipelineTemplate("model.Llama", [["embedding", "decoder_layers.0"],                      # stage 0
                                     ["decoder_layers.1", "final_norm", "final_proj"]])      # stage 1

A template is plain data and names no rank, so two pipelines may share one, and it can be the key of a dictionary. A
model is cut between its decoder layers: what comes before them belongs to the first stage, what comes after to the
last. The configurations of most of Hugging Face's models say what the modules of the base model are, in the order in
which forward calls them (base_model_pp_plan: embed_tokens, layers, norm), and the table FAMILIES does it for others.
What the model has behind its base model follows, such as `lm_head`, `score` or `qa_outputs`. Modules without parameters
that every layer uses (`rotary_emb`) are not listed: each stage keeps them.
"""

import contextlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn

from utils import UserError


class Unsupported(UserError, NotImplementedError):
    """A model that step 9 cannot cut, or not in the way that was asked for."""

    def __str__(self) -> str:
        return super().__str__() + newer_than_tried("transformers")


# Packages of which more is used than they promise to keep: the oldest and the newest version that was tried.
TRIED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.24"), "peft": ("0.18", "0.21"),
         "bitsandbytes": ("0.50", "0.50")}


def newer_than_tried(package: str) -> str:
    """The end of an error that may be due to the version of a package. Empty for one that was tried, or not imported.
    """
    version = getattr(sys.modules.get(package), "__version__", "0")
    newest, found = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (TRIED[package][1], version))
    if found <= newest:
        return ""
    return f" ({package}: this version, {version}, is newer than those tried ({' to '.join(TRIED[package])}))"


@contextlib.contextmanager
def names_of(package: str) -> Iterator[None]:
    """Around what uses names that the package does not promise to keep. Raises UserError where they have changed."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        if isinstance(error, TypeError) and not newer_than_tried(package):
            raise  # of a version that was tried: a fault of this program, or of a file
        raise UserError(f"{package} no longer has what is used of it ({error}): pip install -c constraints.txt "
                        f"{package}{newer_than_tried(package)}") from error


FAMILIES = {  # base models without a plan: their modules in the order of forward, the list of layers among them
    "Llama": ("embedding", "decoder_layers", "final_norm", "final_proj"),
    "GPT2Model": ("wte", "wpe", "drop", "h", "ln_f"),
    "OPTModel": ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in", "decoder.layers",
                 "decoder.final_layer_norm", "decoder.project_out"),
    "BertModel": ("embeddings", "encoder.layer", "pooler"),
    "ViTModel": ("embeddings", "layers", "layernorm"),
}

ALIKE_FOR_ALL_LAYERS = {  # arguments of a layer: its input, and what each stage makes of the batch
    "self", "args", "kwargs", "hidden_states", "input_ids", "attention_mask", "conv_mask", "position_ids",
    "cache", "past_key_values", "layer_past", "use_cache", "output_attentions", "cache_position", "attention_scaling",
    "position_embeddings",
}


def entry_of(table: dict, module: nn.Module):
    """The table's entry for the module's class or one it inherits from, which is ours or one of transformers."""
    names = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.split(".")[0] in ("model", "transformers")]
    return next((table[name] for name in names if name in table), None)


def listed_modules(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """The names of the model's modules before its decoder layers, of the layers, and of the modules after them.

    A module that the configuration leaves out (None in the model) is skipped. Raises Unsupported for a model without a
    plan or a line in FAMILIES, whose layers need more than hidden states, or with parameters in none of these modules.
    """
    def refuse(reason: str):
        raise Unsupported(f"Auto policy for {PipelineTemplate.get_model_name(model)} is not implemented: {reason}")

    modules, base = dict(model.named_modules(remove_duplicate=False)), getattr(model, "base_model", model)
    family, children = entry_of(FAMILIES, base), [name for name, _ in model.named_children()]
    plan = family or getattr(model.config, "base_model_pp_plan", None) or ()
    inside = "" if base is model else f"{model.base_model_prefix}."
    heads = children[children.index(inside[:-1]) + 1 :] if inside[:-1] in children else []
    names = [name for name in (*(inside + name for name in plan), *heads) if name in modules]
    lists = [k for k, name in enumerate(names) if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        refuse(f"it has no plan (base_model_pp_plan) that names its layers, and is none of {', '.join(FAMILIES)}")
    first, layers, last = names[: lists[0]], names[lists[0]], names[lists[0] + 1 :]
    needs = {name for layer in modules[layers] for name in inspect.signature(type(layer).forward).parameters}
    if not family and (needs := needs - ALIKE_FOR_ALL_LAYERS):
        refuse(f"its layers also need {', '.join(sorted(needs))}, and stages send each other nothing but hidden states")
    if layerdrop := getattr(model.config, "layerdrop", 0):
        refuse(f"layerdrop={layerdrop} skips layers at random, those at a stage's ends, too: set layerdrop=0")
    prefixes = tuple(f"{name}." for name in names)
    if outside := [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]:
        refuse(f"its plan does not say which stage holds {', '.join(outside[:3])}")
    return first, [f"{layers}.{i}" for i in range(len(modules[layers]))], last


@dataclass(frozen=True)
class PipelineTemplate:
    """`modules_per_stage` lists the modules of each stage by name: all of the model's, in the order of get_modules.

    Raises UserError for a stage without modules, or a string in its place. check(model) compares with a model's names.
    """

    model_name: str
    modules_per_stage: Sequence[Sequence[str]]

    def __post_init__(self):
        stages = self.modules_per_stage
        if isinstance(stages, str) or not stages or not all(modules and type(modules) is not str for modules in stages):
            raise UserError(f"modules_per_stage={stages!r}: write a list with at least one name for each stage, as in "
                            "[['embedding', 'decoder_layers.0'], ['decoder_layers.1', ...]]")
        object.__setattr__(self, "modules_per_stage", tuple(map(tuple, stages)))  # so that it can be a key

    @staticmethod
    def get_model_name(model: nn.Module) -> str:
        """The full path of the model's class."""
        return f"{type(model).__module__}.{type(model).__qualname__}"

    @staticmethod
    def get_modules(model: nn.Module) -> list[str]:
        """The names of the modules to distribute, in the order of the forward pass."""
        first, layers, last = listed_modules(model)
        return first + layers + last

    @classmethod
    def from_layers_per_stage(cls, model: nn.Module, layers_per_stage: list[int]) -> "PipelineTemplate":
        """Stages with these numbers of decoder layers. Embeddings join the first stage, norm and head the last one.

        Raises UserError where a stage has no layer, or where the sum is not the model's number of layers.
        """
        first, layers, last = listed_modules(model)
        if min(layers_per_stage, default=0) < 1 or sum(layers_per_stage) != len(layers):
            sizes, total = ",".join(map(str, layers_per_stage)), sum(layers_per_stage)
            raise UserError(f"stages of {sizes or 'no'} decoder layers have {total} together, but the model has "
                            f"{len(layers)}: give each stage at least one, {len(layers)} in all")
        remaining = iter(layers)
        stages = [[next(remaining) for _ in range(count)] for count in layers_per_stage]
        stages[0] = first + stages[0]
        stages[-1] = stages[-1] + last
        return cls(cls.get_model_name(model), stages)

    @property
    def num_stages(self) -> int:
        return len(self.modules_per_stage)

    def check(self, model: nn.Module) -> None:
        """Raises Unsupported or UserError where this is no template for the model."""
        first, layers, last = listed_modules(model)
        if self.model_name != (model_name := self.get_model_name(model)):
            raise UserError(f"the pipeline template is one for {self.model_name}, but the model is a {model_name}: "
                            "take the name from PipelineTemplate.get_model_name(model)")
        wanted, listed = first + layers + last, [name for modules in self.modules_per_stage for name in modules]
        wrong = {"missing": [name for name in wanted if name not in listed],
                 "unknown": [name for name in dict.fromkeys(listed) if name not in wanted],
                 "repeated": [name for name, count in Counter(listed).items() if count > 1]}
        if not any(wrong.values()):
            for end, names, stage in ("first", first, 0), ("last", last, self.num_stages - 1):
                for name in names:
                    if name not in self.modules_per_stage[stage]:
                        raise UserError(f"The {end} stage must contain the {name} module: move it to stage {stage} of "
                                        f"0 to {self.num_stages - 1}")
            wrong["misplaced"] = [f"{name} (where the model has {other})" for name, other in zip(listed, wanted)
                                  if name != other][:1]
        if details := "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names):
            raise UserError(f"Modules in the pipeline template do not match the modules in the model: {details}")
