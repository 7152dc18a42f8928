"""LoRA (Hu et al. 2021): the model's weights are frozen, and beside some of its matrices two thin ones are trained.

    y = W x + alpha / r * B A x        W (out, in) is frozen; A (r, in) is random and B (out, r) zero at first

The layers are those of the library peft. A stage gets its frozen weights, and then the adapters of its own layers, so
that no rank needs the whole model. The frozen weights and the activations are of --dtype.
The adapters, their gradients and the optimizer's state are in float32 or more; autocast casts an adapter to bfloat16
once an optimizer step. Only the adapters have gradients. So these alone are summed between pipelines, and these alone
are in a run's checkpoints:

    step_00000120/
        adapter_config.json  adapter_model.safetensors   the whole adapter, as peft reads it
        adapter-00001-of-00002.safetensors               the adapters of stage 1 of 2: a run goes on from these
        optimizer-00001-of-00002.safetensors  state.json  tokenizer.json ...
"""

import argparse
import json
import math
import os
import tempfile
import warnings
from zlib import crc32

import torch
import torch.nn as nn

import process_group_manager as pgm
from hf_tensor_parallel import RowParallel, SharedByHeads
from models.four_bits import PACKED_BYTES, is_matrix, load_packed, pack
from models.names import peft_name
from pipeline_template import listed_modules, names_of
from ranks.collectives import say
from tensor_parallel import Reduce, split_parameter
from utils import UserError, number, positive_float, positive_int

RATE = 2e-4  # the default learning rate
ALL = "all-linear"
fraction = number(float, lambda value: 0 <= value < 1, "from 0 to less than 1")


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora_rank", type=positive_int, metavar="R",
                        help="train LoRA adapters of this rank, and no weights (default: all weights are trained)")
    parser.add_argument("--lora_alpha", type=positive_float, help="adapters count alpha / rank (default: 2 x rank)")
    parser.add_argument("--lora_dropout", type=fraction, default=0.0, help="of what enters an adapter")
    parser.add_argument("--lora_targets", default=ALL, metavar="q_proj,v_proj",
                        help=f"the matrices that get adapters (default: {ALL}, those of all decoder layers)")
    parser.add_argument("--base_bits", type=int, choices=[4],
                        help="hold the frozen matrices of decoder layers in 4 bits a number (default: as --dtype says)")


def check_lora_flags(args) -> None:
    if args.lora_rank is None:
        if args.lora_alpha or args.lora_dropout or args.lora_targets != ALL or args.base_bits:
            raise UserError("--lora_alpha, --lora_dropout, --lora_targets and --base_bits are for LoRA: add "
                            "--lora_rank, or leave them out")
        return
    if args.from_scratch:
        raise UserError("--from_scratch is for training all weights: leave it out, or --lora_rank")
    if args.tp_size > 1 and args.lora_dropout:
        raise UserError(f"--tp_size {args.tp_size} with --lora_dropout {args.lora_dropout}: tensor-parallel ranks "
                        "would drop other numbers than one rank does: leave out one of the two")
    if args.tp_size > 1 and args.base_bits:
        raise UserError(f"--tp_size {args.tp_size} with --base_bits {args.base_bits}: numbers share a scale across "
                        "the cuts between tensor-parallel ranks; use --pipelines to divide the model")
    if args.base_bits and args.dtype == "float64":
        raise UserError(f"--base_bits {args.base_bits} with --dtype float64: what is unpacked is float32 or bfloat16, "
                        "choose one of them")
    args.lora_alpha = args.lora_alpha or 2.0 * args.lora_rank


class Lora:
    """Adapters for `model`, a whole model of transformers on the meta device.

    `names`: of all adapters' parameters, as files have them. Raises UserError for targets that match nothing, and where
    peft is missing.
    """

    def __init__(self, args, model: nn.Module, dtype: torch.dtype):
        try:
            from peft import LoraConfig, TaskType
            if args.base_bits:
                import bitsandbytes  # noqa: F401  takes seconds
        except ImportError as error:
            raise UserError(f"LoRA needs the library {error.name}: pip install {error.name}") from None
        self.dtype, self.master_dtype, self.seed = dtype, torch.promote_types(dtype, torch.float32), args.seed
        self.targets = find_targets(model, args.lora_targets)
        largest = max(min(model.get_submodule(name).weight.shape) for name in self.targets)
        if args.lora_rank > largest:
            raise UserError(f"--lora_rank {args.lora_rank}: the matrices have {largest} rows or columns at most, an "
                            "adapter has fewer: choose 4 to 64")
        leaves = sorted({name.rpartition(".")[2] for name in self.targets})
        self.config = LoraConfig(
            task_type=TaskType.CAUSAL_LM, base_model_name_or_path=os.path.abspath(args.model_name) if os.path.isdir(
                args.model_name) else args.model_name, r=args.lora_rank, lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout, target_modules=leaves, inference_mode=False)
        self.shapes = {}  # A (r, in) and B (out, r) of each matrix, by the names that files have
        for name in self.targets:
            weight = model.get_submodule(name).weight
            width, height = weight.shape if hasattr(model.get_submodule(name), "nf") else weight.T.shape
            self.shapes[peft_name(f"{name}.lora_A.weight")] = args.lora_rank, width
            self.shapes[peft_name(f"{name}.lora_B.weight")] = height, args.lora_rank
        self.names, self.num_trained = [*self.shapes], sum(map(math.prod, self.shapes.values()))
        self.num_frozen, self.base_bits = sum(param.numel() for param in model.parameters()), args.base_bits
        matrices = matrices_of(model) if args.base_bits else []
        self.num_packed = sum(model.get_submodule(name).weight.numel() for name in matrices)
        self.frozen_bytes = dtype.itemsize * (self.num_frozen - self.num_packed) + PACKED_BYTES * self.num_packed

    def prepare(self, stage) -> None:
        """Before a stage on the meta device gets its weights: they will be of the frozen weights' dtype."""
        for param in stage.model.parameters():
            param.data = param.data.to(self.dtype)

    def apply(self, stage, device: torch.device) -> None:
        """Freezes the weights of a stage, packs them with --base_bits, and adds the adapters of its own layers.

        A is drawn by the seed and the parameter's name, so it is the same in every topology.
        """
        if self.base_bits:
            for layer in stage.own_layers():
                pack(layer, self.dtype)
        for module in stage.model.modules():
            if isinstance(module, RowParallel):
                module.input_size, module.output_size = module.weight.shape  # peft asks; adapters get their shape below
        with names_of("peft"), warnings.catch_warnings():
            from peft import inject_adapter_in_model
            from peft.tuners.lora import Linear, LoraLayer

            self.config._register_custom_module({RowParallel: Linear})  # which is no nn.Linear
            warnings.simplefilter("ignore", FutureWarning)  # of peft, about transformers
            inject_adapter_in_model(self.config, stage.model)
        for module in [*stage.model.modules()]:
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False  # peft would compute adapters in float32: see autocast
                split_adapter(module)
        for name, param in stage.model.named_parameters():
            if param.requires_grad:
                module, _, key = name.rpartition(".")
                whole = initial_value(name, self.shapes[peft_name(name)], self.seed)
                part = split_parameter(stage.model.get_submodule(module), key, whole)
                param.data = part.to(device, self.master_dtype, copy=True)

    def weights(self, base, loader, device: torch.device, is_moved: bool = False):
        """What plugin.configure takes as `weights`: `base` gives a stage the frozen ones, `loader` (of a checkpoint, or
        None) the adapters. Where the loader moves what ranks hold in memory, it gives the frozen ones, too, but for
        those in 4 bits."""
        base = loader.weights if is_moved and not self.base_bits else base

        def give(stage) -> None:
            with pgm.together():
                self.prepare(stage)
                if self.base_bits:
                    load_packed(stage, base, self.dtype)
                else:
                    base(stage)
                self.apply(stage, device)
            if loader:
                loader.load_adapters(stage)

        return give

    def files(self) -> dict[str, bytes]:
        """The content of adapter_config.json, by that name."""
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8-sig") as file:
                return {"adapter_config.json": json.dumps(json.load(file), indent=2).encode()}


def matrices_of(model: nn.Module) -> list[str]:
    """The names of all matrices of the decoder layers."""
    layers = tuple(f"{name}." for name in listed_modules(model)[1])
    return [name for name, module in model.named_modules() if name.startswith(layers) and is_matrix(module)]


def find_targets(model: nn.Module, wanted: str) -> list[str]:
    """The names of the matrices that get adapters. Raises UserError where a part of `wanted` matches nothing."""
    linear = matrices_of(model)
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    chosen = leaves if wanted == ALL else [part.strip() for part in wanted.split(",")]
    if unknown := [part for part in chosen if part not in leaves]:
        raise UserError(f"--lora_targets {wanted}: the decoder layers of this model have no matrix {unknown[0]!r}: "
                        f"choose among {', '.join(leaves)}, or {ALL}")
    return [name for name in linear if name.rpartition(".")[2] in chosen]


def split_adapter(layer: nn.Module) -> None:
    """Splits the adapter of a matrix that is split over the tp group, where it is used, so that all gradients are those
    of one process. `layer`: peft's, around the matrix."""
    matrix, a, b = layer.base_layer, layer.lora_A, layer.lora_B
    if type(matrix) is RowParallel:  # W x and A x are partial sums: g behind A, then each rank has all of B A x
        a["default"].tp_dims = {"weight": 1}
        a["default"].register_forward_hook(lambda _, args, partial_sum: Reduce.apply(partial_sum))
    elif isinstance(matrix, RowParallel) or matrix._forward_hooks:
        pass  # it has f and g of its own, between activations that are whole, and so is its adapter
    elif hasattr(matrix, "tp_dims"):  # column-parallel: each rank's part of B adds its share to the gradient of A
        b["default"].tp_dims, b["default"].tp_fused = {"weight": 0}, {"weight": matrix.tp_fused["weight"]}
        a["default"] = SharedByHeads(a["default"])


def initial_value(name: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Zeros for B; for A (r, in) what peft draws: uniform up to 1 / sqrt(in)."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(seed + crc32(peft_name(name).encode()))
        value.uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    return value


def print_sizes(lora: Lora) -> None:
    """A line on rank 0: how much is trained."""
    bits = f", {lora.num_packed:,} of them in {lora.base_bits} bits" if lora.base_bits else ""
    share = lora.num_trained / (lora.num_trained + lora.num_frozen)
    say(f"LoRA: {lora.num_trained:,} numbers are trained, {share:.2%} of all, beside {lora.num_frozen:,} frozen ones "
        f"in {str(lora.dtype).removeprefix('torch.')}{bits}; {len(lora.targets)} matrices")
