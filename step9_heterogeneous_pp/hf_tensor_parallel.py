"""Tensor parallelism for Hugging Face's decoders, from outside: in each decoder layer, a table's modules are replaced.

The heads of the attention and the width of the MLP are split as in our Llama (tensor_parallel.py). Embeddings, norms
and head stay whole on each tp rank. They see the same activations there, so their gradients are equal on all tp ranks.

Two things are new. GPT-2 stores q, k and v side by side in one matrix, of which each third is split. And Qwen3 norms q
and k of each head with a weight that all heads share. A rank's gradient of it covers only its own heads, so the weight
passes through f, which sums over the tp ranks.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import process_group_manager as pgm
import tensor_parallel
from model import cast
from pipeline_template import PipelineTemplate
from tensor_parallel import ColumnParallelLinear, CopyToTensorParallel, ReduceFromTensorParallel, RowParallelLinear
from utils import UserError


def split_parameter(module: nn.Module, key: str, full) -> torch.Tensor:
    """The part of a full parameter that `module` holds as its `key` on this tp rank, by module.tp_dims and tp_fused.

    `full` is a tensor, or a slice of a safetensors file, of which no more than this part is read.
    """
    dim, fused = getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", 1)
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
        self.tp_fused = fused
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


COLUMN = partial(ColumnParallelLinear, copy_input=False)  # f is in front of the block, once for all that read its input
LLAMA = {
    "self_attn": copy_input, "self_attn.q_proj": COLUMN, "self_attn.k_proj": COLUMN, "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": RowParallelLinear,
    "mlp": copy_input, "mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": RowParallelLinear,
}
TP_MODULES = {  # class of a decoder layer -> the place in it -> what replaces the module there
    "GPT2Block": {
        "attn": partial(divide, names=("num_heads", "split_size")),
        "attn.c_attn": partial(ColumnParallelConv1D, fused=3), "attn.c_proj": RowParallelConv1D,
        "mlp.c_fc": ColumnParallelConv1D, "mlp.c_proj": RowParallelConv1D,
    },
    **{f"{name}DecoderLayer": LLAMA for name in ("Granite", "Llama", "Mistral", "Qwen2")},
    "Qwen3DecoderLayer": LLAMA | {"self_attn.q_norm": SharedByHeads, "self_attn.k_norm": SharedByHeads},
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


def apply_tensor_parallel(model: nn.Module) -> nn.Module:
    """Splits our Llama or a Hugging Face decoder over the tp group, in place, on the meta device or with its weights.

    Raises NotImplementedError for a model that is not in the table, UserError where tp_size does not divide the heads,
    the key/value heads or the MLP's width. Call it before PipelineStage, which then keeps the stage's part.
    """
    tp_size, model_name = pgm.process_group_manager.tp_world_size, PipelineTemplate.get_model_name(model)
    if model_name == "model.Llama" or tp_size == 1:
        return tensor_parallel.apply_tensor_parallel(model)
    layers = [module for module in model.modules() if type(module).__name__ in TP_MODULES]
    if not layers:
        raise NotImplementedError(f"Tensor parallelism for {model_name} is not implemented, only for models of these "
                                  f"decoder layers: model.Llama, {', '.join(TP_MODULES)}. Use tp_size 1")
    for name in SIZES:
        if (size := getattr(model.config, name, None)) is not None and size % tp_size:
            raise UserError(f"{name}={size} cannot be split over tp_size={tp_size}: use a tp_size that divides {size}")
    for layer in layers:
        for place, replace in TP_MODULES[type(layer).__name__].items():
            parent, _, key = place.rpartition(".")
            setattr(layer.get_submodule(parent), key, replace(layer.get_submodule(place)))
    return model
