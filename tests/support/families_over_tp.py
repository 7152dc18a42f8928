"""Decoder families of step 9 over a tp group, in two stages, against the plain model.

`torchrun ... families_over_tp.py OUT CASE...`, where a CASE is a toy of families.py, as in gpt2 or gpt2-tied, or
qwen3-float32-norms: with the library's own norms, which round to float32. Every rank chains both stages in its own
process, so that only tensor parallelism communicates. Rank 0 writes to OUT/errors.json, for each case: the largest
difference of the loss, of any gradient on any rank, and between the gradients of what is whole on each rank.
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from families import (
    PipelineStage, PipelineTemplate, hf_tensor_parallel, load_weights, pgm, tensor_parallel, toy, toy_batch, toy_loss,
    toy_on_meta)
from huggingface import float64_throughout


def reference(name: str, tied: bool):
    model, batch = toy(name, tied), toy_batch(name)
    loss = toy_loss(model(**batch, use_cache=False), batch)
    loss.backward()
    return model, loss.detach()


def stages_over_tp(name: str, tied: bool, source: str) -> list[PipelineStage]:
    stages = []
    for i in range(2):
        model = hf_tensor_parallel.apply_tensor_parallel(toy_on_meta(name, tied))
        stages.append(PipelineStage(model, PipelineTemplate.from_layers_per_stage(model, [1, 2]), i))
        load_weights(stages[-1], source)
    return stages


def compare(case: str, folder: str) -> list[float]:
    name, tied = case.removesuffix("-tied").removesuffix("-float32-norms"), case.endswith("-tied")
    whole, expected = reference(name, tied)
    if os.environ["RANK"] == "0":
        toy(name, tied).save_pretrained(folder)
    dist.barrier()
    stages = stages_over_tp(name, tied, folder)
    batch = toy_batch(name)
    loss = toy_loss(stages[1](stages[0](**batch), **batch), batch)
    loss.backward()
    gradients = {n: p.grad for stage in stages for n, p in stage.model.named_parameters(remove_duplicate=False)}
    if tied:
        embedding, head = stages[0].tied
        gradients[embedding] = gradients[embedding] + gradients.pop(head)
    worst, unlike, params = 0.0, 0.0, dict(whole.named_parameters())
    assert gradients.keys() == params.keys(), gradients.keys() ^ params.keys()
    for n, param in params.items():
        module, _, key = n.rpartition(".")
        owner = next(m for stage in stages for other, m in stage.model.named_modules() if other == module)
        part = tensor_parallel.split_parameter(owner, key, param.grad)
        worst = max(worst, (gradients[n] - part).abs().max().item())
        if part.shape == param.shape:
            other = gradients[n].clone()
            dist.broadcast(other, 0)
            unlike = max(unlike, (other - gradients[n]).abs().max().item())
    errors = torch.tensor([(loss - expected).abs().item(), worst, unlike], dtype=torch.float64)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.tolist()


def main(out: str, cases: list[str]) -> None:
    pgm.init_process_group("gloo")
    pgm.setup_process_group_manager([1], dist.get_world_size())
    errors = {}
    for case in cases:
        with contextlib.nullcontext() if case.endswith("-float32-norms") else float64_throughout():
            errors[case] = compare(case, os.path.join(out, case))
    if dist.get_rank() == 0:
        with open(os.path.join(out, "errors.json"), "w") as file:
            json.dump(errors, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
