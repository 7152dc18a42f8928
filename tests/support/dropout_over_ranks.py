"""Dropout in step 9's GPT-2: `dropout_over_ranks.py OUT stages` on six ranks, or `OUT recompute PRECISION` on
three or six.

stages: pipelines of two stages and of one, over two tp ranks. OUT/<rank>.json is its place, a digest of each mask on
activations that all tp ranks hold, and one of the gradient of each parameter that all hold.
recompute: the same pipelines over one tp rank or two. OUT/<rank>.json has the loss, the norm and a digest of each
gradient, without recomputing and with it.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import HeterogeneousParallelPlugin, PipelineTemplate, pgm, toy

SAMPLES = [{"input_ids": torch.arange(i, i + 12) % 90 + 3} for i in range(8)]


def loss_of(output, batch) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def configure(sizes: list[list[int]], tp_size: int = 2, precision: str = "float64", recompute: bool = False, **dropout):
    """The plugin, the model in train(), and the batches."""
    model = toy("gpt2", **dropout).train()
    plugin = HeterogeneousParallelPlugin(tp_size, microbatch_size=2, precision=precision, device="cpu",
                                         recompute=recompute)
    templates = [PipelineTemplate.from_layers_per_stage(model, layers) for layers in sizes]
    plugin.set_pipelines(templates, [4 // len(templates)] * len(templates))
    loader = plugin.prepare_dataloader(SAMPLES)
    model, _, loader = plugin.configure(model, torch.optim.SGD(model.parameters()), loader)
    return plugin, model.train(), iter(loader)


def stages() -> dict:
    plugin, model, batches = configure([[1, 2], [3]], embd_pdrop=0.3, resid_pdrop=0.3, attn_pdrop=0.3)
    masks, dropout = [], F.dropout

    def noted(x, p=0.5, training=True, inplace=False):
        out = dropout(x, p, training, inplace)
        masks.append(digest(out == 0) if training and p else "none")
        return out

    F.dropout = noted
    plugin.execute_pipeline(batches, model, loss_of, None)
    grid = pgm.process_group_manager
    whole = {name: digest(param.grad) for name, param in model.module.model.named_parameters()
             if not any(part in name for part in ("c_attn", "c_proj.weight", "c_fc"))}
    return {"place": [grid.dp_rank, grid.pp_rank, grid.tp_rank], "masks": masks, "gradients": whole,
            "generator": digest(torch.get_rng_state())}


def recompute(precision: str) -> list[dict]:
    results = []
    for again in (False, True):
        plugin, model, batches = configure([[1, 2], [3]], dist.get_world_size() // 3, precision, again,
                                           embd_pdrop=0.3, resid_pdrop=0.3, attn_pdrop=0.3)
        loss = plugin.execute_pipeline(batches, model, loss_of, None)
        norm = plugin.clip_grad_norm(model, 1.0)
        gradients = {name: digest(param.grad) for name, param in model.module.model.named_parameters()}
        results.append({"loss": loss.item(), "norm": norm.item(), "gradients": gradients})
    return results


if __name__ == "__main__":
    pgm.init_process_group("gloo")
    result = {"stages": stages, "recompute": recompute}[sys.argv[2]](*sys.argv[3:])
    with open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w") as file:
        json.dump(result, file)
    dist.destroy_process_group()
