"""A rank's stage of a model that is divided over all ranks, with its weights, and beside them its adapters, if any."""

import contextlib
import copy
import operator
import os
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.files import ADAPTER, ADAPTER_CONFIG
from checkpoints.resume import Loader
from inference.find import find_checkpoint_of_run, find_model, read_tokenizer, reading
from models.causal import parts_of
from models.published import published_weights
from pipeline_parallel import connect_neighbours
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate, Unsupported
from planning.shares import layers_by_speed
from ranks.collectives import gather, once
from ranks.files import read_json
from ranks.join import print_banner
from ranks.lost import FOREVER
from ranks.memory import free_memory
from ranks.placement import home_rank, host_names, is_home, machines
from run_common import local_directory
from stage_weights import look_into
from utils import UserError


class Facts(NamedTuple):
    """What home_rank() finds for all ranks. `base`, `tokenizer`: where they are. `adapter`: folder, configuration."""

    base: str
    tokenizer: str
    config: object
    generation_config: object | None
    adapter: tuple[str, dict] | None


def make_stage(args, device: torch.device) -> tuple[PipelineStage, object]:
    """This rank's stage, and on home_rank() the tokenizer, else None. Collective. Raises UserError, on all ranks."""
    # What the model is
    found, disks = find_checkpoint_of_run(args)
    facts = once(home_rank(), lambda: read_facts(args, found and found.path))
    if (beams := facts.generation_config and facts.generation_config.num_beams or 1) > 1:
        raise UserError(f"{facts.base}/generation_config.json asks for a beam search (num_beams {beams}), which works "
                        "in one process only: start generate.py without torchrun, or set it to 1")
    with pgm.together():
        tokenizer = read_tokenizer(facts.tokenizer) if is_home() else None
    model = make_model(facts, dtype_here(args, facts))
    # Which rank holds which layers
    print_banner(device, model.dtype)
    free = gather(free_memory(device))
    try:
        template = PipelineTemplate.from_layers_per_stage(model, args.pipelines or layers_by_memory(model, free))
    except Unsupported as error:
        raise UserError(f"{error}. One process writes with it: start generate.py without torchrun") from None
    pgm.setup_process_group_manager([template.num_stages], 1)
    connect_neighbours()
    weights = dict(model.named_parameters(remove_duplicate=False))
    require_memory([sum(param.nbytes for param in own.values()) for own in by_stage(template, weights)], free)
    # This rank's, with their weights
    adapters = facts.adapter and share_adapters(model, template, *facts.adapter)
    stage = PipelineStage(model, template, pgm.process_group_manager.pp_rank)
    with pgm.together():
        if found:
            Loader(found, disks, device).weights(stage)
        else:
            published_weights(local_directory(facts.base, "--checkpoint"))(stage, device)
        if adapters:
            add_adapters(stage.model, facts.adapter[1], adapters, device)
    stage.model.to(device).eval()
    return stage, tokenizer


def read_facts(args, whole: str | None) -> Facts:
    """On home_rank(). `whole`: as find_model takes it. Raises UserError."""
    from transformers import AutoConfig, GenerationConfig

    base, tokenizer, adapter = find_model(args, whole)
    with reading(base):
        config, generation_config = AutoConfig.from_pretrained(base), None
        with contextlib.suppress(OSError):  # there is none
            generation_config = GenerationConfig.from_pretrained(base)
    config.output_router_logits = False  # for the loss of a mixture of experts' router
    return Facts(base, tokenizer, config, generation_config,
                 adapter and (adapter, read_json(os.path.join(adapter, ADAPTER_CONFIG), dict)))


def dtype_here(args, facts: Facts) -> str:
    """--dtype, but float32 for weights that are stored in bfloat16, where the GPU has that by emulation only."""
    is_emulated = args.lacks_bfloat16 and facts.config.dtype == torch.bfloat16
    return "float32" if args.dtype == "auto" and is_emulated else args.dtype


def make_model(facts: Facts, dtype: str) -> torch.nn.Module:
    """The whole model on the meta device. Raises UserError."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype) if dtype != "auto" else facts.config.dtype or torch.float32
    with reading(facts.base), torch.device("meta"):  # fields may not go together
        model = AutoModelForCausalLM.from_config(facts.config, dtype=dtype)
    model.generation_config = facts.generation_config or model.generation_config
    return model


def layers_by_memory(model: torch.nn.Module, free: list[int]) -> list[int]:
    """Layers of each stage, so that each rank's part of the weights is in proportion to its `free` memory."""
    embedding, layer, head, count = parts_of(model)
    if count < len(free):
        raise UserError(f"the model has {count} decoder layers, and each of {len(free)} processes needs at least one: "
                        f"start at most {count} of them")
    return layers_by_speed(count, [(embedding / each, layer / each, head / each) for each in free])


def require_memory(needed: list[int], free: list[int]) -> None:
    """Raises UserError, on all ranks, where a rank needs more bytes for its weights than it has free."""
    if any(map(operator.gt, needed, free)):
        listed = ", ".join(f"{host} {need / 1e6:.0f} of {room / 1e6:.0f}"
                           for host, need, room in zip(host_names(machines()), needed, free))
        raise UserError(f"not enough memory for the weights (needed of free MB: {listed}): choose other --pipelines, "
                        "or add machines")


def by_stage(template: PipelineTemplate, tensors: dict) -> list[dict]:
    """Those of the tensors, by their names in the model, that each stage has."""
    stages = [tuple(f"{module}." for module in stage) for stage in template.modules_per_stage]
    return [{name: tensor for name, tensor in tensors.items() if name.startswith(stage)} for stage in stages]


def share_adapters(model: torch.nn.Module, template: PipelineTemplate, folder: str, config: dict) -> dict:
    """The adapters of this rank's layers, which home_rank() reads. Collective. Raises UserError, on all ranks."""
    parts = None
    with pgm.together():
        if is_home():
            parts = by_stage(template, read_adapters(model, folder, config))
    group, own = dist.new_group(backend="gloo", timeout=FOREVER), [None]
    dist.scatter_object_list(own, parts, src=home_rank(), group=group)
    return own[0]


def read_adapters(model: torch.nn.Module, folder: str, config: dict) -> dict[str, torch.Tensor]:
    """All adapters, by their names in peft's file, for the model on the meta device.

    Raises UserError where the adapter is not one of this model, or of another kind than LoRA.
    """
    if config.get("peft_type") != "LORA" or config.get("modules_to_save"):
        raise UserError(f"{folder} is no plain LoRA adapter: add it to the weights first, by peft's merge_and_unload()")
    tensors = look_into(os.path.join(folder, ADAPTER), lambda file: {
        name.removeprefix("base_model.model."): file.get_tensor(name) for name in file.keys()})
    whole = inject(copy.deepcopy(model), config, folder).named_parameters()
    expected = {name.replace(".default.", "."): param.shape for name, param in whole if ".lora_" in name}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if odd := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
        raise UserError(f"{folder} is no adapter for this model: {len(odd)} of its matrices or the model's have no "
                        f"counterpart, among them {odd[0]}")
    return tensors


def inject(model: torch.nn.Module, config: dict, folder: str, **changes) -> torch.nn.Module:
    """The model with empty adapters. Raises UserError where peft is missing, or the adapter is another model's."""
    with reading(folder, "is no adapter for this model, or peft is missing"), warnings.catch_warnings():
        from peft import PeftConfig, inject_adapter_in_model

        warnings.simplefilter("ignore")
        return inject_adapter_in_model(PeftConfig.from_peft_type(**{**config, **changes}), model)


def add_adapters(model: torch.nn.Module, config: dict, adapters: dict[str, torch.Tensor], device: torch.device) -> None:
    """Adds adapters to the layers of a model or of a stage, beside the weights, in float32 or more."""
    names = sorted({name.partition(".lora_")[0] for name in adapters})
    dtype = torch.promote_types(model.dtype, torch.float32)
    inject(model, config, "the adapter", target_modules=names, exclude_modules=None, layers_to_transform=None,
           layers_pattern=None)
    for name, param in model.named_parameters():
        if ".lora_" in name:
            param.data = adapters[name.replace(".default.", ".")].to(device, dtype)
