"""A frozen base in 4 bits (QLoRA, Dettmers et al. 2023), in the format NF4 of the library bitsandbytes.

    a block of 64 numbers of a matrix  ->  for each number 4 bits, which of 16 fractions of the block's largest is
                                           nearest to it, and that largest, in float32: 4.5 bits a number

The matrices of decoder layers are packed: all linear layers there, except experts whose weights are one parameter.
Embeddings, norms and the head stay as they are. A matrix is unpacked for a moment where it is used, forward and
backward. A stage loads and packs one layer after the other, so it is never whole in the wider dtype.
"""

from collections.abc import Callable

import torch
import torch.nn as nn

from pipeline_template import names_of
from ranks.memory import return_freed_memory
from ranks.progress import progress

BLOCK = 64
PACKED_BYTES = 0.5 + 4 / BLOCK  # of a number


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's


@names_of("bitsandbytes")
def pack(layer: nn.Module, dtype: torch.dtype) -> None:
    """Packs all matrices of a decoder layer that are not packed yet. They multiply in `dtype`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in [*layer.named_modules()]:
        if not is_matrix(module) or isinstance(module, Linear4bit):
            continue
        weight = module.weight.data if isinstance(module, nn.Linear) else module.weight.data.T  # (out, in)
        packed = Linear4bit(weight.size(1), weight.size(0), bias=False, compute_dtype=dtype, device="meta")
        # Bytes that are stored as numbers of `dtype` leave the dtype of the model's parameters what it was.
        packed.weight = Params4bit(weight, requires_grad=False, blocksize=BLOCK, compress_statistics=False,
                                   quant_type="nf4", quant_storage=dtype, module=packed).to(weight.device)
        packed.bias = module.bias
        packed.support_avx512bf16_for_cpu = False  # evaluation would leave weights that can't be trained beside
        layer.set_submodule(name, packed)


def load_packed(stage, load: Callable, dtype: torch.dtype) -> None:
    """Gives a stage on the meta device its weights by load(stage), which takes them for the modules that it finds
    there: first those at the model's ends, then one decoder layer after the other, which is packed."""
    return_freed_memory()  # else the C library keeps what the layers took before they were packed
    model, layers = stage.model, stage.own_layers()
    modules = {name: model.get_submodule(name) for name in stage.template.modules_per_stage[stage.stage_index]}

    def keep(names) -> None:
        for name, module in modules.items():
            model.set_submodule(name, module if name in names else nn.Module())

    of_layers = [name for name, module in modules.items() if module in layers]
    keep(modules.keys() - of_layers)
    load(stage)
    for name in progress("packing layers", of_layers, by_all=True):
        keep([name])
        load(stage)
        pack(modules[name], dtype)
    keep(modules)
