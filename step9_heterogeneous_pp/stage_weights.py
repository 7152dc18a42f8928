"""Weights for a stage that was built on the meta device: from memory, or from a directory like those of the Hub.

    model.safetensors.index.json      which parameter is in which file   (or one file, model.safetensors)
    model-00001-of-00002.safetensors  this rank opens the files that hold its stage's parameters, and reads of each
    model-00002-of-00002.safetensors  parameter the part that its place in the tp group keeps

Names in a file can differ from the model's. Files of a bare model lack the first part (gpt2 has `h.0...`, the model
`transformer.h.0...`), a tied head is not in the file, and older files have older names: see RENAMED.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping

import torch
import torch.nn as nn

from hf_tensor_parallel import split_parameter
from pipeline_stage import PipelineStage

RENAMED = (  # a name in older files -> the model's
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"^embed_out\.", "lm_head."),  # GPT-NeoX
    (r"^vit\.encoder\.layer\.", "vit.layers."),
    (r"^(vit\.layers\..*attention\.)attention\.query\.", r"\1q_proj."),
    (r"^(vit\.layers\..*attention\.)attention\.key\.", r"\1k_proj."),
    (r"^(vit\.layers\..*attention\.)attention\.value\.", r"\1v_proj."),
    (r"^(vit\.layers\..*attention\.)output\.dense\.", r"\1o_proj."),
    (r"^(vit\.layers\.\d+\.)intermediate\.dense\.", r"\1mlp.fc1."),
    (r"^(vit\.layers\.\d+\.)output\.dense\.", r"\1mlp.fc2."),
)


class SafetensorsDirectory(Mapping):
    """Name -> a slice that reads what is indexed of it. Files are opened when a parameter of theirs is asked for.

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
                             "name the directory of a model that save_pretrained wrote or that the Hub has so")

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


def load_weights(
    stage: PipelineStage, source: Mapping[str, torch.Tensor] | str, device: torch.device | str = "cpu",
    new_modules: tuple[str, ...] = (), seed: int = 0,
) -> list[str]:
    """Gives each parameter of the stage its values, on `device` and in the dtype it has, and computes its buffers.

    `source`: a full state dict, or a directory. Parameters of `new_modules` (the classifier of a task over a pretrained
    model) that are not there, or there for another number of classes, are drawn as Hugging Face draws them, by `seed`
    and name. Returns their names.
    Raises ValueError where others are missing, or a shape is not the model's.
    """
    where = source if isinstance(source, str) else "the state dict"
    source = SafetensorsDirectory(source) if isinstance(source, str) else source
    model, known = stage.model, names_in(source, getattr(stage.model, "base_model_prefix", ""))
    make_buffers(model, device)
    names: dict[nn.Parameter, list[str]] = {}  # several where parameters of one stage are tied
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    missing, drawn = [], []
    for param, here in names.items():
        # A tied head and its embedding have one value, also where they are on two stages: the embedding's comes first.
        anywhere = (*stage.tied, *here) if stage.tied and set(stage.tied) & set(here) else here
        found = next((known[name] for name in anywhere if name in known), None)
        may_be_new = here[0].startswith(tuple(f"{module}." for module in new_modules))
        is_new = may_be_new and (found is None or not fits(source[found], param))
        if found is None and not is_new:
            missing.append(here[0])
            continue
        module, _, key = here[0].rpartition(".")
        part = param if is_new else split_parameter(model.get_submodule(module), key, source[found])
        if part.shape != param.shape:
            raise ValueError(f"{found} has the shape {tuple(part.shape)} in {where}, but {here[0]} of the model "
                             f"{tuple(param.shape)}: are the configuration and the weights of one model?")
        value = torch.empty_like(part, device=device, dtype=param.dtype, memory_format=torch.contiguous_format)
        value = nn.Parameter(value if is_new else value.copy_(part), param.requires_grad)
        for name in here:  # tied within the stage: one parameter
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, value)
        drawn += here[:1] * is_new
    if missing:
        raise ValueError(f"{where} has no weights for {len(missing)} parameters of stage {stage.stage_index}: "
                         f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}")
    draw(model, drawn, seed)
    return drawn


@torch.no_grad()
def draw(model: nn.Module, names: list[str], seed: int) -> None:
    """Draws these parameters by `seed` and module. Hugging Face draws whole modules: what was loaded is put back."""
    for module_name in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(module_name)
        params = dict(module.named_parameters())
        loaded = {name: params[name].clone() for name in params if f"{module_name}.{name}" not in names}
        with torch.random.fork_rng():
            digest = hashlib.sha256(f"{seed} {module_name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            model._init_weights(module)
        for name, value in loaded.items():
            params[name].copy_(value)


def fits(full, param: nn.Parameter) -> bool:
    """Whether a tensor, or a slice of a file, has the parameter's shape (that of a task's head, which is not split)."""
    return tuple(full.shape if isinstance(full, torch.Tensor) else full.get_shape()) == tuple(param.shape)


def names_in(source: Mapping, base_prefix: str) -> dict[str, str]:
    """The name that a parameter can have in the model -> its name in the source."""
    known = {name: name for name in source}
    for name in source:
        for renamed in (name, f"{base_prefix}.{name}"):
            for pattern, replacement in RENAMED:
                renamed = re.sub(pattern, replacement, renamed)
            known.setdefault(renamed, name)
    return known


def make_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Computes the buffers that are still on the meta device: rotary frequencies, position ids.

    They are in no file. A Hugging Face model computes them where it draws weights; those are on the meta device yet,
    where nothing is drawn. Raises NotImplementedError for a buffer that this leaves untouched.
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
                raise NotImplementedError(f"the buffer {module_name}.{name} is not computed where weights are drawn")
