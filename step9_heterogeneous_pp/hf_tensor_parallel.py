"""Tensor parallelism for Hugging Face's decoders, from outside: modules of each decoder layer are replaced.

Most models say themselves how, in the configuration's base_model_tp_plan: for each place in a layer a style.

    colwise, rowwise                 as ColumnParallelLinear and RowParallelLinear in our Llama (tensor_parallel.py)
    colwise_gather_output            colwise, and every rank then gets the whole output
    rowwise_split_input              rowwise, of an input that every rank has whole
    replicated_with_grad_allreduce   a norm of each head, whose weight all heads share: a rank's gradient of it covers
                                     only its own heads, so the weight passes through f, which sums over the tp ranks
    moe_tp_experts                   every rank has all experts, and a part of the width of each

The table TP_MODULES does it for models without a plan. GPT-2 stores q, k and v side by side in one matrix, of which
each third is split. Embeddings, norms and head stay whole on each tp rank. They see the same activations there, so
their gradients are equal on all tp ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import process_group_manager as pgm
import tensor_parallel
from model import cast
from pipeline_template import PipelineTemplate, listed_modules
from tensor_parallel import ColumnParallelLinear, CopyToTensorParallel, ReduceFromTensorParallel, RowParallelLinear
from utils import UserError


def split_parameter(module: nn.Module, key: str, full) -> torch.Tensor:
    """The part of a full parameter that `module` holds as its `key` on this tp rank, by module.tp_dims and tp_fused.

    `full` is a tensor, or a slice of a safetensors file, of which no more than this part is read.
    """
    dim, fused = getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", {}).get(key, 1)
    if dim is None:
        return full[...]
    grid = pgm.process_group_manager
    shape = full.shape if isinstance(full, torch.Tensor) else full.get_shape()
    width = shape[dim] // fused  # of each of the matrices that lie side by side
    share = torch.arange(width).tensor_split(grid.tp_world_size)[grid.tp_rank]  # uneven where it has to be
    start, stop = share[0].item(), share[-1].item() + 1
    parts = [full[(*(slice(None),) * dim, slice(i * width + start, i * width + stop))] for i in range(fused)]
    return parts[0] if fused == 1 else torch.cat(parts, dim)


class PartOfConv1D(nn.Module):
    """This rank's part of Hugging Face's Conv1D, y = x W + b."""

    def __init__(self, conv: nn.Module, fused: int = 1):
        super().__init__()
        self.tp_fused = dict.fromkeys(("weight", "bias"), fused)
        for key, param in conv.named_parameters():
            setattr(self, key, nn.Parameter(split_parameter(self, key, param.detach()).clone(), param.requires_grad))


class ColumnParallelConv1D(PartOfConv1D):
    """As ColumnParallelLinear: the columns of W (in, out/tp) are split."""

    tp_dims = {"weight": 1, "bias": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, in) -> (B, T, out/tp)
        return F.linear(CopyToTensorParallel.apply(x), cast(self.weight, x.dtype).T, cast(self.bias, x.dtype))


class RowParallelConv1D(PartOfConv1D):
    """As RowParallelLinear: the rows of W (in/tp, out) are split, and the bias is added to the sum, once."""

    tp_dims = {"weight": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, in/tp) -> (B, T, out)
        return ReduceFromTensorParallel.apply(F.linear(x, cast(self.weight, x.dtype).T)) + cast(self.bias, x.dtype)


class SharedByHeads(nn.Module):
    """A norm (B, T, heads/tp, hd) -> the same, whose weight (hd) all heads share: its gradient is summed over tp."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.weight = (norm,), norm.weight  # in a tuple, so that the weight keeps its name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.norm[0], {"weight": CopyToTensorParallel.apply(self.weight)}, (x,))


def copy_input(block: nn.Module) -> nn.Module:
    """The block itself, with CopyToTensorParallel (f) in front of it."""
    def copy_hidden_states(_, args, kwargs):
        if args:
            return (CopyToTensorParallel.apply(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": CopyToTensorParallel.apply(kwargs["hidden_states"])}

    block.register_forward_pre_hook(copy_hidden_states, with_kwargs=True)
    return block


def divide(block: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The block itself, with its numbers of heads or widths divided by tp_size."""
    for name in names:
        setattr(block, name, getattr(block, name) // pgm.process_group_manager.tp_world_size)
    return block


class ColumnParallelWithWholeOutput(ColumnParallelLinear):
    """As ColumnParallelLinear, and then every rank gets the whole output: the sum of the parts, padded with zeros."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.places = range(linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        own = tensor_parallel.split_over_tp(torch.tensor(self.places), 0).tolist()
        padding = (own[0], len(self.places) - 1 - own[-1])
        return ReduceFromTensorParallel.apply(F.pad(super().forward(x), padding))


class RowParallelOfWholeInput(RowParallelLinear):
    """As RowParallelLinear, of an input that every rank has whole. f adds up what backward leaves in the parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        return super().forward(tensor_parallel.split_over_tp(CopyToTensorParallel.apply(x), -1))


def split_experts(experts: nn.Module) -> nn.Module:
    """The module itself: gate and up (experts, 2 width, D), down (experts, D, width), each with a part of the width."""
    experts.tp_dims, experts.tp_fused = {"gate_up_proj": 1, "down_proj": 2}, {"gate_up_proj": 2}
    shapes = {key: getattr(experts, key).shape for key in experts.tp_dims}
    if set(shapes) != dict(experts.named_parameters()).keys() or shapes["gate_up_proj"][1] != 2 * shapes["down_proj"][2]:
        raise NotImplementedError(f"Tensor parallelism for {type(experts).__name__} is not implemented: its parameters "
                                  f"are {', '.join(key for key, _ in experts.named_parameters())}. Use tp_size 1")
    for key in experts.tp_dims:
        param = getattr(experts, key)
        setattr(experts, key, nn.Parameter(split_parameter(experts, key, param.detach()).clone(), param.requires_grad))
    copy = lambda x: CopyToTensorParallel.apply(x) if x.is_floating_point() else x  # noqa: E731
    experts.register_forward_pre_hook(lambda _, args: tuple(map(copy, args)))  # hidden states, experts, their weights
    experts.register_forward_hook(lambda _, args, out: ReduceFromTensorParallel.apply(out))
    return experts


COLUMN = partial(ColumnParallelLinear, copy_input=False)  # f is in front of the block, once for all that read its input
STYLES = {
    "colwise": ColumnParallelLinear, "rowwise": RowParallelLinear, "moe_tp_experts": split_experts,
    "colwise_gather_output": ColumnParallelWithWholeOutput, "rowwise_split_input": RowParallelOfWholeInput,
    "replicated_with_grad_allreduce": SharedByHeads,
}
TP_MODULES = {  # class of a decoder layer -> the place in it -> what replaces the module there
    "GPT2Block": {
        "attn": partial(divide, names=("num_heads", "split_size")),
        "attn.c_attn": partial(ColumnParallelConv1D, fused=3), "attn.c_proj": RowParallelConv1D,
        "mlp.c_fc": ColumnParallelConv1D, "mlp.c_proj": RowParallelConv1D,
    },
    "OPTDecoderLayer": {
        "self_attn": lambda block: copy_input(divide(block, names=("num_heads",))),
        "self_attn.q_proj": COLUMN, "self_attn.k_proj": COLUMN, "self_attn.v_proj": COLUMN,
        "self_attn.out_proj": RowParallelLinear,
        "fc1": ColumnParallelLinear, "fc2": RowParallelLinear,
    },
    "GPTNeoXLayer": {
        "attention.query_key_value": ColumnParallelLinear, "attention.dense": RowParallelLinear,
        "mlp.dense_h_to_4h": ColumnParallelLinear, "mlp.dense_4h_to_h": RowParallelLinear,
    },
}
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "ffn_dim", "n_inner")  # what is split


def replacements(model: nn.Module, layer: nn.Module) -> dict[str, Callable]:
    """For each place in a decoder layer what replaces the module there, by the table or the model's own plan.

    Where all of a block's parameters are split, what reads its input shares one f in front of the block.
    Raises NotImplementedError where there is neither, or the plan has a style that we don't have.
    """
    if (name := type(layer).__name__) in TP_MODULES:
        return TP_MODULES[name]
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    styles = {place.removeprefix("layers.*."): style for place, style in plan.items() if place.startswith("layers.*.")}
    modules, params = dict(layer.named_modules()), dict(layer.named_parameters())
    experts = tuple(f"{place}." for place, style in styles.items() if style == "moe_tp_experts")
    styles = {place: style for place, style in styles.items()
              if (place in modules or place in params) and not place.startswith(experts)}
    unknown = {place: style for place, style in styles.items() if style not in STYLES or place in params}
    if unknown or not styles:
        reason = ", ".join(f"{style} of {place}" for place, style in unknown.items()) or "no plan (base_model_tp_plan)"
        raise NotImplementedError(f"Tensor parallelism for {PipelineTemplate.get_model_name(model)} is not implemented, "
                                  f"since it has {reason}. Use tp_size 1")
    found = {place: STYLES[style] for place, style in styles.items()}
    for block in {place.rpartition(".")[0] for place, style in styles.items() if style == "colwise"} - {""}:
        inside = tuple(f"{place}." for place in styles if place.startswith(f"{block}."))
        if all(f"{block}.{name}".startswith(inside) for name, _ in modules[block].named_parameters()):
            found |= {place: COLUMN for place, style in styles.items()
                      if style == "colwise" and place.rpartition(".")[0] == block}
            found = {block: copy_input, **found}
    return found


def apply_tensor_parallel(model: nn.Module) -> nn.Module:
    """Splits our Llama or a Hugging Face decoder over the tp group, in place, on the meta device or with its weights.

    Raises NotImplementedError for a model that cannot be split, UserError where tp_size does not divide the heads,
    the key/value heads or the MLP's width. Call it before PipelineStage, which then keeps the stage's part.
    """
    tp_size, model_name = pgm.process_group_manager.tp_world_size, PipelineTemplate.get_model_name(model)
    if model_name == "model.Llama" or tp_size == 1:
        return tensor_parallel.apply_tensor_parallel(model)
    layers = [model.get_submodule(name) for name in listed_modules(model)[1]]
    places = [replacements(model, layer) for layer in layers]
    for name in SIZES:
        if (size := getattr(model.config, name, None)) is not None and size % tp_size:
            raise UserError(f"{name}={size} cannot be split over tp_size={tp_size}: use a tp_size that divides {size}")
    for layer, replaced in zip(layers, places):
        for place, replace in replaced.items():
            parent, _, key = place.rpartition(".")
            setattr(layer.get_submodule(parent), key, replace(layer.get_submodule(place)))
    return model
