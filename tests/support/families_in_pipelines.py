"""Hugging Face's families in step 9's unlike pipelines against the plain model.

`torchrun ... families_in_pipelines.py OUT TP_SIZE CASE...`, where a CASE is a toy of families.py, as in gpt2 or
gpt2-tied, or gpt2-frozen, of which only a part is trained. Pipelines of two stages and of one, with 2 and 1
micro-batches of a step, through the plugin, which recomputes layers unless the toy is tied; before, each rank trains
some of the plain models, in its own process, with torch.optim and torch's clipping. Each rank writes OUT/<rank>.json:
for each case the largest difference of the losses of all steps, of any gradient of the first, which is clipped, and of
the gradients' norms of all steps. What each tp rank has as a whole has gradients of the same bits on all of them.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from families import (
    HeterogeneousParallelPlugin, PipelineTemplate, listed_modules, pgm, tensor_parallel, toy, toy_batch, toy_loss,
)
from lab.huggingface import float64_throughout

STEPS, MICROBATCH, NUM_MICROBATCHES = 5, 2, 3
MAX_GRAD_NORM = 0.1  # less than any norm of the first step
HEAD_ALONE = ("gpt2", "qwen3-tied")
ROWS = [0, 1, 2, 2, 0, 1]  # of toy_batch: the samples of a step, whose order changes from step to step


def toy_of(case: str) -> str:
    return case.removesuffix("-tied").removesuffix("-frozen")


def samples_of(case: str) -> list[dict[str, torch.Tensor]]:
    batch = toy_batch(toy_of(case))
    rows = [{key: value[i] for key, value in batch.items()} | {"targets": torch.tensor(i)} for i in range(3)]
    return [rows[(row + step) % 3] for step in range(STEPS) for row in ROWS]


def make(case: str) -> torch.nn.Module:
    """The toy; of gpt2-frozen nothing of the first stage trains, and of the second only part."""
    model = toy(toy_of(case), tied=case.endswith("-tied"))
    for n, param in model.named_parameters() if case.endswith("-frozen") else ():
        param.requires_grad_(".h.2." in n or "ln_f" in n)
    return model


def train_plain(case: str) -> tuple[list[float], list[float], dict]:
    """The losses of all steps, the norms of their gradients, and the clipped gradients of the first."""
    model, samples, losses, norms, gradients = make(case), samples_of(case), [], [], None
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i in range(NUM_MICROBATCHES):
            first = (step * NUM_MICROBATCHES + i) * MICROBATCH
            batch = torch.utils.data.default_collate(samples[first : first + MICROBATCH])
            inputs = {key: value for key, value in batch.items() if key != "targets"}
            loss = toy_loss(model(**inputs), batch) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        if gradients is None:
            gradients = {n: None if p.grad is None else p.grad.clone()
                         for n, p in model.named_parameters(remove_duplicate=False)}
        optimizer.step()
    if case == "mixtral":
        experts = gradients["model.layers.0.mlp.experts.down_proj"]
        assert 0 < sum(expert.any().item() for expert in experts) < len(experts), "some are to be reached, some not"
    assert norms[0] > MAX_GRAD_NORM, f"{case}: a norm of {norms[0]} is not clipped"
    return losses, norms, gradients


def train_all_plain(cases: list[str]) -> dict[str, tuple]:
    """What train_plain gives for each case, on every rank. Each trains its share of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = [None] * world_size
    dist.all_gather_object(shares, {case: train_plain(case) for case in cases[rank::world_size]})
    return {case: result for share in shares for case, result in share.items()}


def compare(case: str, tp_size: int, losses: list[float], norms: list[float], gradients: dict) -> list[float]:
    model = make(case)
    plugin = HeterogeneousParallelPlugin(tp_size=tp_size, microbatch_size=MICROBATCH, precision="fp64", device="cpu",
                                         recompute=not case.endswith("-tied"))
    two, one = (PipelineTemplate.from_layers_per_stage(model, sizes) for sizes in ([1, 2], [3]))
    if case in HEAD_ALONE:  # nothing of it is split: with tp, the second rank counts nothing in the norm
        first, layers, last = listed_modules(model)
        two = PipelineTemplate(two.model_name, [first + layers, last])
    plugin.set_pipelines([two, one], num_microbatches={two: 2, one: 1})
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    loader = plugin.prepare_dataloader(samples_of(case))
    model, optimizer, loader = plugin.configure(model, optimizer, loader)
    batches, off_loss, off_norm, off_gradient, whole = iter(loader), 0.0, 0.0, 0.0, {}
    for step in range(loader.steps_per_epoch):
        loss = plugin.execute_pipeline(batches, model, toy_loss, optimizer)
        norm = plugin.clip_grad_norm(model, MAX_GRAD_NORM)
        off_loss = max(off_loss, abs(loss.item() - losses[step]))
        off_norm = max(off_norm, abs(norm.item() - norms[step]))
        for n, param in model.module.model.named_parameters(remove_duplicate=False) if step == 0 else ():
            if gradients[n] is None:  # the loss does not use the parameter, or it is frozen
                assert param.grad is None or param.requires_grad and not param.grad.any(), f"{case}: {n}, {param.grad}"
                continue
            module, _, key = n.rpartition(".")
            part = tensor_parallel.split_parameter(model.module.model.get_submodule(module), key, gradients[n])
            off_gradient = max(off_gradient, (param.grad - part).abs().max().item())
            if part.shape == gradients[n].shape:
                whole[n] = param.grad.clone()
        optimizer.step()
    assert step == STEPS - 1
    others = [None] * tp_size
    dist.all_gather_object(others, whole, pgm.process_group_manager.tp_group)
    unlike = [n for other in others for n in whole if not torch.equal(whole[n], other[n])]
    assert not unlike, f"{case}: the gradients of {unlike} differ on the tp ranks, which all have the whole of them"
    return [off_loss, off_gradient, off_norm]


def main(out: str, tp_size: int, cases: list[str]) -> None:
    pgm.init_process_group("gloo")
    with float64_throughout():  # a norm that rounds to float32 makes 1e-8 of any 1e-16
        errors = {case: compare(case, tp_size, *plain) for case, plain in train_all_plain(cases).items()}
    with open(os.path.join(out, f"{dist.get_rank()}.json"), "w") as file:
        json.dump(errors, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
