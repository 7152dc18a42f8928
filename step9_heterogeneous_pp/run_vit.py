"""ViT learns which third of an image is bright, on one machine beside a pipeline of three.

    torchrun --standalone --nproc_per_node 4 run_vit.py
    torchrun --standalone --nproc_per_node 4 run_vit.py --model_name_or_path google/vit-base-patch16-224
"""

import functools
from collections.abc import Callable

import torch

from pipeline_template import PipelineTemplate
from run_common import run

TOY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32,
           patch_size=8, num_labels=3)


def draw(numbers: list[int], size: int, seed: int) -> dict[str, torch.Tensor]:
    """Images of noise, (B, 3, size, size). Image i is brighter in the third i % 3 of its width, which is its class."""
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in numbers]
    images = torch.stack([torch.randn(3, size, size, generator=generator) for generator in generators])
    for image, i in zip(images, numbers):
        image[:, :, i % 3 * size // 3 : (i % 3 + 1) * size // 3] += 1
    return {"pixel_values": images, "target_ids": torch.tensor(numbers) % 3}


def images(args, config, count: int) -> tuple[range, Callable]:
    return range(count), functools.partial(draw, size=config.image_size, seed=args.seed)


def pipelines(model):
    """Edit these: the layers of each stage, the pipelines, and how many micro-batches each of them takes."""
    layers = model.config.num_hidden_layers
    one_stage = PipelineTemplate.from_layers_per_stage(model, [layers])
    three_stages = PipelineTemplate.from_layers_per_stage(model, [layers // 4, layers // 4, layers - layers // 4 * 2])
    return [one_stage, three_stages], {one_stage: 2, three_stages: 6}


if __name__ == "__main__":
    run(__doc__, "ViTForImageClassification", TOY, pipelines, ("classifier",), data=images)
