"""Weights for a stage that was built on the meta device: from memory, or from a directory in the Hub's format.

    model.safetensors.index.json      which parameter is in which file   (or just one file, model.safetensors)
    model-00001-of-00002.safetensors  a rank opens the files that hold its stage's parameters, and reads only the part of
    model-00002-of-00002.safetensors  each parameter that its place in the tp group keeps

The names in a file can differ from the model's. Files of a bare model lack the first part (gpt2 has `h.0...`, the model
`transformer.h.0...`), a tied head is not in the file, and older files have older names, which transformers knows.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping

import torch
import torch.nn as nn

from hf_tensor_parallel import split_parameter
from pipeline_stage import PipelineStage


class SafetensorsDirectory(Mapping):
    """Name -> a slice that reads what is indexed of it. A file is opened when one of its parameters is asked for.

    Raises ValueError where the directory has no safetensors, or not all that its index names.
    """

    def __init__(self, directory: str):
        self.directory, self.handles, self.file_of = directory, {}, {}
        index, single = (os.path.join(directory, f"model.safetensors{end}") for end in (".index.json", ""))
        if os.path.isfile(index):
            with open(index) as file:
                self.file_of = json.load(file)["weight_map"]
        elif os.path.isfile(single):
            self.file_of = dict.fromkeys(self.open(os.path.basename(single)).keys(), os.path.basename(single))
        else:
            found = ", ".join(sorted(os.listdir(directory))) if os.path.isdir(directory) else "no such directory"
            raise ValueError(f"{directory} has neither model.safetensors nor model.safetensors.index.json ({found}): "
                             "name a directory that save_pretrained wrote, or one from the Hub")

    def open(self, name: str):
        from safetensors import safe_open

        path = os.path.join(self.directory, name)
        if name not in self.handles:
            if not os.path.isfile(path):
                raise ValueError(f"{path} is missing, though model.safetensors.index.json names it: copy it there")
            self.handles[name] = safe_open(path, framework="pt")
        return self.handles[name]

    def __getitem__(self, name: str):
        return self.open(self.file_of[name]).get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)


def load_weights(stage: PipelineStage, source: Mapping[str, torch.Tensor] | str, device: torch.device | str = "cpu",
                 new_modules: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """Gives each parameter of the stage its values, on `device` and in its dtype, and computes the stage's buffers.

    `source` is a full state dict, or a directory. Parameters of `new_modules` (the classifier of a new task) that are
    missing there, or there for another number of classes, are drawn by `seed` and name. Returns their names.
    Raises ValueError where other parameters are missing, or where a shape is not the model's.
    """
    where = source if isinstance(source, str) else "the state dict"
    source = SafetensorsDirectory(source) if isinstance(source, str) else source
    model, known = stage.model, names_in(source, stage.model)
    make_buffers(model, device)
    names: dict[nn.Parameter, list[str]] = {}  # several names where parameters of one stage are tied
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    missing, drawn = [], []
    for param, here in names.items():
        # A tied head and its embedding have one value, also where they are on two stages: the embedding's comes first.
        anywhere = (*stage.tied, *here) if stage.tied and set(stage.tied) & set(here) else here
        found = next((known[name] for name in anywhere if name in known), None)
        if here[0].startswith(tuple(f"{module}." for module in new_modules)) and (
                found is None or shape_of(source[found]) != param.shape):
            part = draw(here[0], param, model.config.initializer_range, seed)
            drawn.append(here[0])
        elif found is None:
            missing.append(here[0])
            continue
        else:
            module, _, key = here[0].rpartition(".")
            part = split_parameter(model.get_submodule(module), key, source[found])
        if part.shape != param.shape:
            raise ValueError(f"{found} has the shape {tuple(part.shape)} in {where}, but {here[0]} of the model "
                             f"{tuple(param.shape)}: are the configuration and the weights of one model?")
        value = torch.empty_like(part, device=device, dtype=param.dtype, memory_format=torch.contiguous_format)
        value = nn.Parameter(value.copy_(part), param.requires_grad)
        for name in here:
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, value)
    if missing:
        raise ValueError(f"{where} has no weights for {len(missing)} parameters of stage {stage.stage_index}: "
                         f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}")
    return drawn


def draw(name: str, param: nn.Parameter, std: float, seed: int) -> torch.Tensor:
    """Initial values that depend on `seed` and `name` only: zero for a bias, else normal."""
    if param.dim() == 1:
        return torch.zeros(param.shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(param.shape).normal_(0.0, std, generator=generator)


def shape_of(full) -> tuple[int, ...]:
    """The shape of a tensor, or of a slice of a file."""
    return tuple(full.shape if isinstance(full, torch.Tensor) else full.get_shape())


def names_in(source: Mapping, model: nn.Module) -> dict[str, str]:
    """The name that a parameter has in the model -> its name in the source."""
    if not hasattr(model, "base_model_prefix"):  # our Llama
        return {name: name for name in source}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    state = dict.fromkeys(model.state_dict(), True)
    return {rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]: name for name in source}


def make_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Computes the buffers that are still on the meta device: rotary frequencies, position ids.

    They are in no file. A Hugging Face model computes them together with its initial weights, which are on the meta
    device here, where nothing is computed. Raises NotImplementedError for a buffer that this leaves without values.
    """
    for module_name, module in list(model.named_modules()):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            buffer = module._buffers[name]
            unset = float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
            module._buffers[name] = torch.full_like(buffer, unset, device=device)
        if names:
            model._init_weights(module)
        for name in names:
            buffer = module._buffers[name]
            if (buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min).any():
                raise NotImplementedError(f"the buffer {module_name}.{name} is not computed with the initial weights")
