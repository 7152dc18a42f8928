"""Tensor parallelism for Hugging Face's decoders, from outside: in each decoder layer a table's modules are replaced.

What is split is what tensor_parallel splits in our Llama: the heads of the attention and the width of the MLP, with f
where a block begins and g where it ends. Embeddings, norms and head stay whole on each tp rank. They see the same
activations there, so their gradients are the same on all tp ranks and need no all-reduce.

Two things are new. Three matrices can be fused into one: GPT-2 has q, k and v side by side (each third is split),
GPT-NeoX has them head by head (split like one matrix). And Qwen3 norms each head's q and k with a weight that all heads
share: a rank's gradient of it covers its own heads only, so the weight passes through f, which sums over the tp ranks.

Shapes: B samples, T tokens a sample, in and out the widths of a matrix, hd head size.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import process_group_manager as pgm
import tensor_parallel
from pipeline_template import PipelineTemplate
from tensor_parallel import ColumnParallelLinear, CopyToTensorParallel, ReduceFromTensorParallel, RowParallelLinear


def part_of(full, dim: int | None, fused: int = 1) -> torch.Tensor:
    """This tp rank's part of a tensor, or of a slice of a safetensors file, along `dim`; all of it where `dim` is None.

    `fused` matrices lie side by side along `dim`: the part has this rank's share of each. Of a file, no more is read.
    """
    if dim is None:
        return full[...]
    grid = pgm.process_group_manager
    shape = full.shape if isinstance(full, torch.Tensor) else full.get_shape()
    width = shape[dim] // fused
    share = torch.arange(width).tensor_split(grid.tp_world_size)[grid.tp_rank]  # uneven where it has to be
    start, stop = share[0].item(), share[-1].item() + 1
    before = (slice(None),) * dim
    parts = [full[(*before, slice(i * width + start, i * width + stop))] for i in range(fused)]
    return parts[0] if fused == 1 else torch.cat(parts, dim)


def split_parameter(module: nn.Module, key: str, full) -> torch.Tensor:
    """The part of a full parameter that `module` holds as its `key`: module.tp_dims and module.tp_fused say which."""
    return part_of(full, getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", 1))


class ColumnParallelConv1D(nn.Module):
    """ColumnParallelLinear for Hugging Face's Conv1D: y = x W + b, the columns of W (in, out/tp) are split."""

    tp_dims = {"weight": 1, "bias": 0}

    def __init__(self, conv: nn.Module, fused: int = 1):
        super().__init__()
        self.tp_fused = fused
        keep_parts(self, conv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, in) -> (B, T, out/tp)
        return F.linear(CopyToTensorParallel.apply(x), self.weight.T.to(x.dtype), self.bias.to(x.dtype))


class RowParallelConv1D(nn.Module):
    """RowParallelLinear for Conv1D: the rows of W (in/tp, out) are split; the bias is added once, to the sum."""

    tp_dims = {"weight": 0}

    def __init__(self, conv: nn.Module):
        super().__init__()
        keep_parts(self, conv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, in/tp) -> (B, T, out)
        return ReduceFromTensorParallel.apply(F.linear(x, self.weight.T.to(x.dtype))) + self.bias.to(x.dtype)


class SharedByHeads(nn.Module):
    """A norm (B, T, heads/tp, hd) -> the same, whose weight (hd) all heads share: its gradient is summed over tp."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.weight = (norm,), norm.weight  # in a tuple, so that the weight keeps its name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.norm[0], {"weight": CopyToTensorParallel.apply(self.weight)}, (x,))


def keep_parts(module: nn.Module, source: nn.Module) -> None:
    """Gives `module` this rank's part of each parameter of `source`."""
    for key, param in source.named_parameters():
        setattr(module, key, nn.Parameter(split_parameter(module, key, param.detach()).clone()))


def copy_input(block: nn.Module, share: tuple[str, ...] = ()) -> nn.Module:
    """The block itself, with f before it; its attributes named in `share` count heads or widths: divided by tp_size."""
    def copy_hidden_states(_, args, kwargs):
        if args:
            return (CopyToTensorParallel.apply(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": CopyToTensorParallel.apply(kwargs["hidden_states"])}

    block.register_forward_pre_hook(copy_hidden_states, with_kwargs=True)
    return divide(block, share)


def divide(block: nn.Module, share: tuple[str, ...]) -> nn.Module:
    for name in share:
        setattr(block, name, getattr(block, name) // pgm.process_group_manager.tp_world_size)
    return block


COLUMN = partial(ColumnParallelLinear, copy_input=False)  # f is before the block, once for all that read its input
LLAMA = {
    "self_attn": copy_input, "self_attn.q_proj": COLUMN, "self_attn.k_proj": COLUMN, "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": RowParallelLinear,
    "mlp": copy_input, "mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": RowParallelLinear,
}
TP_MODULES = {  # class of a decoder layer -> where in it -> what replaces that
    "GPT2Block": {
        "attn": partial(divide, share=("num_heads", "split_size")),
        "attn.c_attn": partial(ColumnParallelConv1D, fused=3), "attn.c_proj": RowParallelConv1D,
        "mlp.c_fc": ColumnParallelConv1D, "mlp.c_proj": RowParallelConv1D,
    },
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": LLAMA | {"self_attn.q_norm": SharedByHeads, "self_attn.k_norm": SharedByHeads},
    "OPTDecoderLayer": {
        "self_attn": partial(copy_input, share=("num_heads",)),
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

    Raises NotImplementedError for a model that the table does not have, ValueError where tp_size does not divide the
    heads, the key/value heads or the MLP's width. Comes before PipelineStage, which then takes the stage's part.
    """
    tp_size, model_name = pgm.process_group_manager.tp_world_size, PipelineTemplate.get_model_name(model)
    if model_name == "model.Llama" or tp_size == 1:
        return tensor_parallel.apply_tensor_parallel(model)
    layers = [module for module in model.modules() if type(module).__name__ in TP_MODULES]
    if not layers:
        known = ", ".join(["model.Llama", *TP_MODULES])
        raise NotImplementedError(f"Tensor parallelism for {model_name} is not implemented, but for models of these "
                                  f"decoder layers: {known}. Use tp_size 1")
    for name in SIZES:
        if (size := getattr(model.config, name, None)) is not None and size % tp_size:
            raise ValueError(f"{name}={size} cannot be split over tp_size={tp_size}: use a tp_size that divides {size}")
    for layer in layers:
        for place, replace in TP_MODULES[type(layer).__name__].items():
            parent, _, key = place.rpartition(".")
            setattr(layer.get_submodule(parent), key, replace(layer.get_submodule(place)))
    return model
