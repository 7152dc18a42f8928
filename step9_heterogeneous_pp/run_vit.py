"""ViT learns to tell circles, squares and triangles apart, on one machine beside a pipeline of three.

    torchrun --standalone --nproc_per_node 4 run_vit.py
    torchrun --standalone --nproc_per_node 4 run_vit.py --model_name_or_path google/vit-base-patch16-224 \
        --learning_rate 3e-5

The images are drawn here: a shape at a place, of a size and in colours by chance, with noise.
"""

import torch

from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
from run_common import class_loss, clear_errors, load_model, parse_args, train

TOY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32,
           patch_size=8, num_labels=3)


class Shapes:
    """Item i: an image (3, size, size) and its class. Drawn from `seed` and i: the same on all ranks."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        kind, chance = i % 3, torch.rand(10, generator=generator).tolist()
        radius = (0.2 + 0.2 * chance[0]) * self.size
        x0, y0 = (radius + share * (self.size - 2 * radius) for share in chance[1:3])
        y, x = torch.meshgrid(torch.arange(self.size) - y0, torch.arange(self.size) - x0, indexing="ij")
        inside = {0: x**2 + y**2 < radius**2, 1: torch.maximum(x.abs(), y.abs()) < 0.85 * radius,
                  2: (y < 0.8 * radius) & (2 * x.abs() - y < 0.9 * radius)}[kind]
        colours = torch.tensor(chance[4:10]).view(2, 3, 1, 1)
        image = torch.where(inside, colours[0], colours[1])  # (3, size, size)
        return image + 0.05 * torch.randn(image.shape, generator=generator) - 0.5, kind


def stack(items: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, kinds = zip(*items)
    return {"pixel_values": torch.stack(images), "targets": torch.tensor(kinds)}  # (B, 3, size, size), (B,)


def main():
    args = parse_args(__doc__)
    plugin = HeterogeneousParallelPlugin(microbatch_size=args.microbatch_size, precision=args.precision,
                                         device=args.device)
    from transformers import ViTForImageClassification  # here: it takes seconds

    model, weights = load_model(ViTForImageClassification, TOY, args)

    # Edit these: layers of each stage, which pipelines there are, how many micro-batches each takes.
    layers = model.config.num_hidden_layers
    one_stage = PipelineTemplate.from_layers_per_stage(model, [layers])
    three_stages = PipelineTemplate.from_layers_per_stage(model, [layers // 4, layers // 4, layers - layers // 4 * 2])
    plugin.set_pipelines([one_stage, three_stages], num_microbatches={one_stage: 2, three_stages: 6})

    dataset = Shapes(model.config.image_size, args.seed)
    train(plugin, model, weights, dataset, stack, class_loss, args, new_modules=("classifier",))


if __name__ == "__main__":
    with clear_errors():
        main()
