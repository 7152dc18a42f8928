"""The parts of a causal language model, and how many parameters each has."""

import torch

from pipeline_template import PipelineTemplate


def parts_of(model: torch.nn.Module) -> tuple[int, int, int, int]:
    """Parameters of what is before the decoder layers, of one of these, and of what is behind; the number of layers."""
    names = PipelineTemplate.get_modules(model)
    sizes = [sum(param.numel() for param in model.get_submodule(name).parameters()) for name in names]
    layers = [k for k, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
    return sum(sizes[:layers[0]]), sizes[layers[0]], sum(sizes[layers[-1] + 1:]), len(layers)
