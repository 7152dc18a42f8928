"""The weights of a model that all ranks share, and those of a stage that was built on the meta device.

A model that has its weights in memory gets those of rank 0. A stage on the meta device gets them from a state dict, or
from a directory in the Hub's format:

    model.safetensors.index.json      which parameter is in which file (or there is one file, model.safetensors)
    model-00001-of-00002.safetensors  a rank reads the parameters of its stage only, and of each of them only the part
    model-00002-of-00002.safetensors  that its place in the tp group keeps

The names in a file can differ from the model's. Files of a bare model lack the first part (`h.0...` is the model's
`transformer.h.0...`), a tied head is not in the file, and older files have older names, which transformers knows.
"""

import copy
import functools
import glob
import json
import os
import re
from collections.abc import Callable, Mapping
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import SafetensorError, safe_open

from pipeline_stage import PipelineStage
from pipeline_template import Unsupported, names_of
from tensor_parallel import split_parameter
from utils import UserError

CONVERT = "from transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR').save_pretrained('NEW')"
UNPACKED = "which is not read: take the model that was quantized, in bfloat16, float16 or float32"


def share_weights(model: nn.Module, device: torch.device) -> None:
    """Gives the whole model the parameters and buffers that it has on rank 0, frozen ones too. All ranks call it.

    They can differ where a script sets no seed, or adds a new head. Only what differs is sent, over `device`.
    Raises UserError, on every rank, where the ranks have models of unlike shapes.
    """
    tensors = {f"{name} {tuple(tensor.shape)}": tensor.detach()
               for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    digests = {name: crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
               for name, tensor in tensors.items()}
    of_ranks: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, digests)
    for rank, found in enumerate(of_ranks):
        if odd := found.keys() ^ of_ranks[0].keys():
            raise UserError(f"rank {rank} has another model than rank 0: only one of them has {min(odd)}. Make it of "
                            "the same configuration on all ranks")
    unlike = [name for name in tensors if any(found[name] != of_ranks[0][name] for found in of_ranks)]
    for name in unlike:
        value = tensors[name].to(device).contiguous()
        dist.broadcast(value, 0)
        tensors[name].copy_(value)
    if unlike and dist.get_rank() == 0:
        print(f"{len(unlike)} of {len(tensors)} parameters and buffers were unlike on some ranks ({unlike[0]}, ...): "
              "all ranks train those of rank 0", flush=True)


def open_directory(directory: str) -> dict[str, Callable]:
    """For each parameter in the safetensors of a directory, a function that returns a slice, which reads when indexed.

    A file is opened when one of its parameters is asked for, so a rank needs only the files with its own parameters.
    Raises UserError where the directory has none, or quantized ones, and later for a file that is missing or damaged.
    """
    config, index, single = (os.path.join(directory, name) for name in
                             ("config.json", "model.safetensors.index.json", "model.safetensors"))
    if os.path.isfile(config) and (how := look_into(config, lambda file: json.load(file).get("quantization_config"))):
        raise UserError(f"{directory} is quantized ({how.get('quant_method', how)}), {UNPACKED}")
    if os.path.isfile(index):
        file_of = look_into(index, lambda file: dict(json.load(file)["weight_map"]))
        if outside := [name for name in file_of.values() if os.path.basename(str(name)) != name]:
            raise UserError(f"{index} names {outside[0]!r}, which is not a file of that folder: take these weights "
                            "from where they were made")
    elif os.path.isfile(single):
        file_of = look_into(single, lambda file: dict.fromkeys(file.keys(), os.path.basename(single)))
    else:
        raise UserError(f"{directory} has neither model.safetensors nor model.safetensors.index.json, but "
                        f"{', '.join(sorted(glob.glob('*', root_dir=directory))) or 'nothing'}: name a directory that "
                        f"save_pretrained wrote, or one from the Hub. To convert others: python -c \"{CONVERT}\"")
    return {name: functools.partial(get_slice, directory, file_of, name) for name in file_of}


def get_slice(directory: str, file_of: Mapping[str, str], name: str):
    """A slice, which reads when indexed. Keep it for a moment: each page that was read counts as the process's."""
    return look_into(os.path.join(directory, file_of[name]), lambda file: file.get_slice(name))


def look_into(path: str, take: Callable):
    """take(file) of a file that is opened: JSON, else safetensors. Raises UserError where it is missing or damaged."""
    if os.path.isfile(path):
        require_content(path)
    try:
        with (open(path, encoding="utf-8-sig") if path.endswith(".json") else safe_open(path, framework="pt")) as file:
            return take(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{path} can't be read ({error}): copy it there anew, with the files beside it") from None


def require_content(path: str) -> None:
    """Raises UserError for a pointer, which a clone without Git LFS leaves in place of a large file."""
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise UserError(f"{path} is a Git LFS pointer, not the file itself: git lfs pull brings that")


def load_weights(stage: PipelineStage, source: Mapping[str, torch.Tensor] | str,
                 device: torch.device | str = "cpu") -> None:
    """Gives each parameter of the stage its values, on `device` and in its dtype, and computes the stage's buffers.

    `source` is a full state dict, whose values may be functions as those of open_directory, or a directory.
    Raises UserError where parameters are missing there, or where a shape is not the model's.
    """
    where = source if isinstance(source, str) else "the state dict"
    source = open_directory(source) if isinstance(source, str) else source
    model, known = stage.model, by_our_names(source, stage)
    make_buffers(model, device, known)
    names: dict[torch.Tensor, list[str]] = {}  # several names where parameters of one stage are tied
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    values = {}
    for tensor, here in names.items():
        # A tied head and its embedding have one value, also where they are on two stages: the embedding's comes first.
        anywhere = (*stage.tied, *here) if stage.tied and set(stage.tied) & set(here) else here
        found = next((name for name in anywhere if name in known), None)
        if found is None and isinstance(tensor, nn.Parameter):
            raise UserError(f"{where} has no weights for {here[0]} of stage {stage.stage_index}")
        if found is None:
            continue  # a buffer that files leave out
        module, _, key = here[0].rpartition(".")
        full = known[found]() if callable(known[found]) else known[found]
        part = split_parameter(model.get_submodule(module), key, full)
        if tensor.is_floating_point() and (part.itemsize < 2 or not part.is_floating_point()):
            raise UserError(f"{found} is quantized ({part.dtype}) in {where}, {UNPACKED}")
        if part.shape != tensor.shape:
            raise UserError(f"{found} has the shape {tuple(part.shape)} in {where}, but {here[0]} of the model "
                            f"{tuple(tensor.shape)}: are the configuration and the weights of one model?")
        is_new = getattr(known[found], "func", None) is join and part.nbytes == full.nbytes
        value = part.to(device, tensor.dtype, copy=not is_new).contiguous()
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        values.update(dict.fromkeys(here, value))
    model.load_state_dict(values, strict=False, assign=True)


@names_of("transformers")
def by_our_names(source: Mapping, stage: PipelineStage) -> dict[str, Callable]:
    """The source by the names of the model's parameters. Of a mixture of experts, files have each expert by itself."""
    model = stage.model
    if not hasattr(model, "base_model_prefix"):  # our Llama
        return dict(source)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings, converters = ([change for change in changes if isinstance(change, kind)]
                             for kind in (WeightRenaming, WeightConverter))
    state = dict.fromkeys((*model.state_dict(), *(stage.tied or ())), True)
    found, parts = {}, {}
    for name in sorted(source, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)]):  # 2 before 10
        ours, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is None or ours in source:
            found[ours] = source[name]
        else:
            parts.setdefault(ours, []).append((ours, name, pattern, functools.partial(read, source[name])))
    for name, collected in parts.items():
        converter = next(converter for converter in converters if collected[0][2] in converter.source_patterns)
        first = converter.target_patterns[0]
        for target in converter.target_patterns:  # several, where files have several parameters as one
            own = name.replace(first, target)
            found[own] = functools.partial(join, converter, name, own, collected, model)
    return found


def read(full) -> torch.Tensor:
    return (full() if callable(full) else full)[...]


@names_of("transformers")
def join(converter, name: str, own: str, parts: list[tuple], model: nn.Module) -> torch.Tensor:
    """The parameter `own` out of several of the files, or of one, as transformers joins or divides them, in memory of
    its own. `name`: that by which the converter knows all of them."""
    converter = copy.deepcopy(converter)
    for part in parts:
        converter.add_tensor(*part)
    value = converter.convert(name, model=model, config=model.config)[own]
    value = value[0] if isinstance(value, list) else value
    return value if len(parts) > 1 else value.clone()


@names_of("transformers")
def make_buffers(model: nn.Module, device: torch.device | str, known: Mapping) -> None:
    """Computes the buffers that are still on the meta device: rotary frequencies, position ids.

    Most are in no file. A Hugging Face model computes them together with its initial weights, which are on the meta
    device here, where nothing is computed. Raises Unsupported for a buffer that has no values then, nor in `known`.
    """
    for module_name, module in list(model.named_modules()):
        unset = {name: torch.full_like(buffer, float("nan") if buffer.is_floating_point()
                                       else torch.iinfo(buffer.dtype).min, device=device)
                 for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        module._buffers.update({name: value.clone() for name, value in unset.items()})
        if unset:
            model._init_weights(module)
        for name, value in unset.items():
            is_unset = torch.isclose(module._buffers[name], value, rtol=0, atol=0, equal_nan=True)
            if is_unset.any() and f"{module_name}.{name}" not in known:
                raise Unsupported(f"the buffer {module_name}.{name} is not computed with the initial weights")
