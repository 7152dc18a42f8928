"""Tensor parallelism for our Llama and Hugging Face's decoders: modules of each decoder layer are split or replaced.

Most models say themselves how, in the configuration's base_model_tp_plan: for each place in a layer a style (STYLES).
The table PLANS does it for models without a plan, and ours. Norms stay whole on each tp rank, and so do embeddings and
head of Hugging Face's models. They see the same activations there, so their gradients are equal on all tp ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import process_group_manager as pgm
from model import Llama, cast
from pipeline_template import PipelineTemplate, Unsupported, entry_of, listed_modules
from tensor_parallel import Copy, Reduce, VocabParallelEmbedding, keep_split_parameters, split_over_tp
from utils import UserError


class RowParallel(nn.Module):
    """As step 8's RowParallelLinear, of an nn.Linear or GPT-2's Conv1D, y = x W + b. The bias is added to the sum."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.is_conv, self.bias = hasattr(layer, "nf"), None
        self.tp_dims = {"weight": 0 if self.is_conv else 1}
        keep_split_parameters(self, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in/tp) -> (..., out)
        weight = cast(self.weight, x.dtype)
        y = Reduce.apply(F.linear(x, weight.T if self.is_conv else weight))
        return y if self.bias is None else y + cast(self.bias, y.dtype)


class RowParallelOfWholeInput(RowParallel):
    """As RowParallel, of an input that every rank has whole. f adds up what backward leaves in the parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        return super().forward(split_over_tp(Copy.apply(x), -1))


class SharedByHeads(nn.Module):
    """A norm (B, T, heads/tp, hd) -> the same, whose weight (hd) all heads share: its gradient is summed over tp. Or an
    activation (B, T, width/tp), whose parameters are those of the whole width."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = (module,)  # in a tuple, so that parameters and buffers keep their names
        for name, param in module.named_parameters():
            self.register_parameter(name, param)
        for name, buffer in module.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = {name: Copy.apply(param) for name, param in self.named_parameters()}
        return torch.func.functional_call(self.module[0], shared | dict(self.named_buffers()), (x,))


# The functions below change a module in place and return it. Its own forward then computes this rank's part.


def share_input(block: nn.Module) -> nn.Module:
    """Puts f (Copy) in front of all floating-point inputs, once for all that read them."""
    def copy(x):
        return Copy.apply(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    block.register_forward_pre_hook(
        lambda _, args, kwargs: (tuple(map(copy, args)), {key: copy(x) for key, x in kwargs.items()}), with_kwargs=True)
    return block


def divide_heads(attention: nn.Module) -> nn.Module:
    """Divides the number of heads and, in GPT-2, their width together, which its forward reads, by tp_size."""
    for name in {"num_heads", "split_size"} & vars(attention).keys():
        setattr(attention, name, getattr(attention, name) // pgm.process_group_manager.tp_world_size)
    return attention


def column(layer: nn.Module, fused: int = 1) -> nn.Module:
    """Splits the outputs of an nn.Linear or a Conv1D, (..., out/tp), in whose weight `fused` matrices lie side by side,
    or a norm with a weight for each head (heads/tp, hd).

    f is not in front of it, but of the block, once for all layers that read its input.
    """
    is_conv = hasattr(layer, "nf")
    layer.tp_dims = {name: int(is_conv and name == "weight") for name, _ in layer.named_parameters()}
    layer.tp_fused = dict.fromkeys(layer.tp_dims, fused)
    keep_split_parameters(layer, layer)
    if is_conv:
        layer.nf = layer.weight.size(1)
    return layer


def column_with_whole_output(layer: nn.Module) -> nn.Module:
    """Splits the outputs. Every rank then gets the whole output: the sum of the parts, padded with zeros."""
    own = split_over_tp(torch.arange(layer.out_features, device="cpu"), 0).tolist()
    padding = own[0], layer.out_features - 1 - own[-1]
    column(share_input(layer)).register_forward_hook(
        lambda _, args, y: Reduce.apply(F.pad(y, padding)))
    return layer


def split_experts(experts: nn.Module) -> nn.Module:
    """Splits the width of each expert: gate and up (E, 2 width, D), down (E, D, width)."""
    shapes = {key: param.shape for key, param in experts.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or shapes["gate_up_proj"][1] != 2 * shapes["down_proj"][2]:
        raise Unsupported(f"Tensor parallelism for {type(experts).__name__} is not implemented: its parameters are "
                          f"{', '.join(shapes)}. Use tp_size 1")
    experts.tp_dims, experts.tp_fused = {"gate_up_proj": 1, "down_proj": 2}, {"gate_up_proj": 2}
    keep_split_parameters(share_input(experts), experts)
    experts.register_forward_hook(lambda _, args, out: Reduce.apply(out))
    return experts


SHARED = "replicated_with_grad_allreduce"
STYLES = {
    "colwise": column, "colwise_qkv": partial(column, fused=3), "colwise_gather_output": column_with_whole_output,
    "rowwise": RowParallel, "rowwise_split_input": RowParallelOfWholeInput,
    SHARED: SharedByHeads, "moe_tp_experts": split_experts, "heads": divide_heads,
}
PLANS = {  # class of a decoder layer whose model has no plan -> a plan for it
    "DecoderLayer": {"attention.q_proj": "colwise", "attention.k_proj": "colwise", "attention.v_proj": "colwise",
                     "attention.out_proj": "rowwise", "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise",
                     "mlp.down_proj": "rowwise"},
    "GPT2Block": {"attn": "heads", "attn.c_attn": "colwise_qkv", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise",
                  "mlp.c_proj": "rowwise"},
    "OPTDecoderLayer": {"self_attn": "heads", "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise",
                        "self_attn.v_proj": "colwise", "self_attn.out_proj": "rowwise", "fc1": "colwise",
                        "fc2": "rowwise"},
}
LEFT_OUT = {  # class of a decoder layer -> what its model's plan leaves out between column- and row-parallel layers
    "PhiDecoderLayer": dict.fromkeys(("self_attn.q_layernorm", "self_attn.k_layernorm"), SHARED),
    "Glm4MoeDecoderLayer": dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), SHARED),
    "ApertusDecoderLayer": {"mlp.act_fn": SHARED},
    "Apertus1p5TextDecoderLayer": {"mlp.act_fn": SHARED},
    "CohereDecoderLayer": {"self_attn.q_norm": "colwise", "self_attn.k_norm": "colwise"},  # a weight for each head
}
SIZES = ("num_attention_heads", "num_attention_heads_per_layer", "num_key_value_heads", "intermediate_size", "ffn_dim",
         "n_inner")  # what is split


def replacements(model: nn.Module, layer: nn.Module) -> list[tuple[str, Callable]]:
    """For each place in a decoder layer what replaces the module there, by the table or the model's own plan.

    What reads the input of a block (of attention, say) shares one f in front of it. Raises Unsupported where
    there is no plan, or it has a style that we don't have, or is silent about a parameter of a block that is split.
    """
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    own = {place.removeprefix("layers.*."): style for place, style in plan.items() if place.startswith("layers.*.")}
    styles = entry_of(PLANS, layer) or own and {**(entry_of(LEFT_OUT, layer) or {}), **own}
    modules, params = dict(layer.named_modules()), dict(layer.named_parameters())
    experts = tuple(f"{place}." for place, style in styles.items() if style == "moe_tp_experts")
    styles = {place: style for place, style in styles.items()
              if (place in modules or place in params) and not place.startswith(experts)}
    unknown = [f"{style} of {place}" for place, style in styles.items() if style not in STYLES or place in params]
    columns = [place for place, style in styles.items() if style in ("colwise", "colwise_qkv")]
    blocks = {place.rpartition(".")[0] or place for place in columns}
    unknown += [f"no style of {name}" for name in params if name.startswith(tuple(f"{block}." for block in blocks))
                and not name.startswith(tuple(f"{place}." for place in styles))]
    unknown += [f"{style} of {place}, with modules of its own" for place, style in styles.items()
                if style == SHARED and place in modules and [*modules[place].children()]]
    unknown += [f"{style} of {place}, beside colwise" for place, style in styles.items()
                if style in ("colwise_gather_output", "rowwise_split_input") and place.rpartition(".")[0] in blocks]
    if unknown or not styles:
        raise Unsupported(f"Tensor parallelism for {PipelineTemplate.get_model_name(model)} is not implemented, since "
                          f"it has {', '.join(unknown) or 'no plan (base_model_tp_plan)'}. Use tp_size 1")
    return [(block, share_input) for block in blocks] + [(place, STYLES[style]) for place, style in styles.items()]


def apply_tensor_parallel(model: nn.Module) -> nn.Module:
    """Splits our Llama or a Hugging Face decoder over the tp group, in place, on the meta device or with its weights.

    Raises Unsupported for a model that cannot be split, UserError where tp_size does not divide the heads,
    the key/value heads or the MLP's width. Call it before PipelineStage, which then keeps the stage's part.
    """
    tp_size = pgm.process_group_manager.tp_world_size
    if tp_size == 1:
        return model
    layers = [model.get_submodule(name) for name in listed_modules(model)[1]]
    places = [replacements(model, layer) for layer in layers]
    for name in SIZES:
        sizes = getattr(model.config, name, None) or 0
        for size in sizes if isinstance(sizes, list) else [sizes]:  # in some models layers differ
            if size % tp_size:
                raise UserError(f"{name}={size} cannot be split over tp_size={tp_size}: use a tp_size that divides "
                                f"{size}")
    for layer, replaced in zip(layers, places):
        for place, replace in replaced:
            parent, _, key = place.rpartition(".")
            setattr(layer.get_submodule(parent), key, replace(layer.get_submodule(place)))
    if isinstance(model, Llama):  # its embedding and its projection are split along the vocabulary
        model.embedding = VocabParallelEmbedding(model.embedding, model.dtype)
        share_input(column(model.final_proj))
        model.tie_weights()
    return model
