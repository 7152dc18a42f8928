"""What a user would pick instead: our step-1 model (or Hugging Face's) trained with PyTorch's own parallelism.

    torchrun --nproc_per_node 4 tools/maintain/peers.py ddp --model_name DIR --tokens FILE --out JSON

Minimal scripts for benchmark.py to run beside ours: same weights, same samples in the same optimizer step, same
fused AdamW, no clipping. Rank 0, or in a pipeline the rank that computes the loss, prints a line a step and writes
{"losses": [one a step], "grad_norm": of the last step}.

Hugging Face's tensor parallelism trains on gloo, but its from_pretrained asks for accelerate, so that its plan is
applied here by the functions which from_pretrained calls. Its pipeline parallelism (transformers 5.23) is no peer: it
sends hidden states without autograd, so that backward() ends with "element 0 of tensors does not require grad and does
not have a grad_fn" on every stage but the last, and no gradient would travel back.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
from launch import Help, modules_of
from torch.distributed.tensor import DTensor

with modules_of(1):
    from model import Llama, cross_entropy, init_weights, get_cos_sin
    from utils import load_config

SAMPLES, SEQ_LEN, LEARNING_RATE, SEED = 32, 128, 3e-4, 42


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("kind", choices=sorted(PEERS), help="which of them")
    parser.add_argument("--model_name", required=True, help="a directory with config.json")
    parser.add_argument("--tokens", required=True, help="int32 ids, as the loader of step 3 caches them")
    parser.add_argument("--out", required=True, help="the JSON to write: losses, and the last gradient norm")
    parser.add_argument("--steps", type=int, default=7, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, on each data-parallel rank")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    config = load_config(args.model_name, num_attention_heads=None)
    with torch.device("meta"):
        model = Llama(config)
    init_weights(model, SEED, torch.device("cpu"))
    step, optimizer = PEERS[args.kind](model, args)
    tokens, losses = np.memmap(args.tokens, dtype=np.int32, mode="r"), []
    for k in range(args.steps):
        loss = step(global_batch(tokens, k))
        losses.append(None if loss is None else loss.item())
        reports = loss is not None and (dist.get_rank() == 0 or args.kind in SCHEDULES)
        if reports:
            print(f"step {k + 1}/{args.steps} | loss {loss:.4f}", flush=True)
    norm = gradient_norm(optimizer, args.kind in SCHEDULES)  # after the loop: a collective would change the times
    if reports:
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "grad_norm": norm}, file)
    dist.destroy_process_group()
    os._exit(0)  # torch's stages keep gloo's threads, which may abort the process while Python ends


def gradient_norm(optimizer: torch.optim.Optimizer, is_pipeline: bool) -> float:
    """Of what the optimizer has just applied. Ranks of a pipeline hold different parameters, other ranks hold all."""
    total = torch.zeros(())
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        grad = param.grad
        total += (grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum()
    if is_pipeline:
        dist.all_reduce(total)
    return total.sqrt().item()


def global_batch(tokens: np.ndarray, k: int) -> torch.Tensor:
    """The samples of optimizer step k: (32, T + 1)."""
    first = k * SAMPLES * SEQ_LEN
    return torch.from_numpy(tokens[first : first + SAMPLES * SEQ_LEN + 1].astype(np.int64)).unfold(
        0, SEQ_LEN + 1, SEQ_LEN)


def accumulate(forward, samples: torch.Tensor, num_microbatches: int, sync=None) -> torch.Tensor:
    """Forward and backward of each micro-batch; `sync(is_last)` is a context around it. Returns the mean loss."""
    total = 0.0
    for i, batch in enumerate(samples.chunk(num_microbatches)):
        if sync is not None:
            sync(i == num_microbatches - 1)
        loss = cross_entropy(forward(batch[:, :-1].contiguous()), batch[:, 1:].contiguous()) / num_microbatches
        loss.backward()
        total += loss.detach()
    return total


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def by_kind(params) -> list[dict]:
    """Groups for the optimizer, since one fused update cannot mix tensors and DTensors."""
    params = list(params)
    groups = [{"params": [p for p in params if isinstance(p, DTensor) is kind]} for kind in (True, False)]
    return [group for group in groups if group["params"]]


def data_parallel(model, args):
    """DistributedDataParallel; all micro-batches but the last without communication."""
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, size = adamw(model.parameters()), dist.get_world_size()

    def step(samples):
        mine = samples.view(SAMPLES // size, size, -1)[:, dist.get_rank()]
        optimizer.zero_grad()
        total = accumulate(parallel, mine, args.microbatches,
                           lambda is_last: setattr(parallel, "require_backward_grad_sync", is_last))
        dist.all_reduce(total)
        optimizer.step()
        return total / size

    return step, optimizer


def fully_sharded(model, args):
    """fully_shard on each layer and on the whole. The kind zero2 keeps the weights between forward and backward."""
    from torch.distributed.fsdp import fully_shard

    for layer in (*model.decoder_layers, model):
        fully_shard(layer, reshard_after_forward=args.kind == "fsdp")
    optimizer, size = adamw(model.parameters()), dist.get_world_size()

    def step(samples):
        mine = samples.view(SAMPLES // size, size, -1)[:, dist.get_rank()]
        optimizer.zero_grad()
        total = accumulate(model, mine, args.microbatches)
        dist.all_reduce(total)
        optimizer.step()
        return total / size

    return step, optimizer


def tensor_parallel(model, args):
    """torch.distributed.tensor.parallel as its tutorial shows: embedding, layers and projection, loss in parallel.

    The kind dtensor-sp divides the tokens between them, too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between = Shard(1) if args.kind == "dtensor-sp" else Replicate()
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "final_proj": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
    for i in range(len(model.decoder_layers)):
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"decoder_layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.out_proj", "mlp.down_proj"):
            plan[f"decoder_layers.{i}.{name}"] = RowwiseParallel(output_layouts=between)
        if args.kind == "dtensor-sp":
            for name in ("input_layernorm", "post_attention_layernorm"):
                plan[f"decoder_layers.{i}.{name}"] = plan["final_norm"] = SequenceParallel()
            for name, others in (("attention", 2), ("mlp", 0)):  # cos and sin
                plan[f"decoder_layers.{i}.{name}"] = PrepareModuleInput(
                    input_layouts=(between, *others * [None]), desired_input_layouts=(Replicate(), *others * [None]))
    if args.kind == "dtensor-sp":  # the model makes these for as many tokens as it sees
        angles = get_cos_sin(SEQ_LEN, model.config.head_dim, torch.float32, torch.device("cpu"),
                             **model.config.rope_parameters)
        for layer in model.decoder_layers:
            layer.register_forward_pre_hook(lambda layer, args: (args[0], *angles))
    parallelize_module(model, mesh, plan)
    optimizer = adamw(by_kind(model.parameters()))

    def step(samples):
        optimizer.zero_grad()
        with loss_parallel():
            total = accumulate(model, samples, args.microbatches)
        optimizer.step()
        return total.full_tensor()

    return step, optimizer


SCHEDULES = {  # kind -> class, stages a rank
    "gpipe": ("ScheduleGPipe", 1), "1f1b": ("Schedule1F1B", 1), "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "zb": ("ScheduleInterleavedZeroBubble", 1), "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2)}


def pipeline(model, args):
    """torch.distributed.pipelining: each rank holds one or two stages, all of equally many layers.

    Of p ranks, rank r holds the stages r and r + p; for ZBV, whose stages go to the last rank and back, the second is
    2p - 1 - r, and the first rank computes the loss.
    """
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    schedule_class, stages_a_rank = SCHEDULES[args.kind]
    num_stages = size * stages_a_rank
    mine = [rank, num_stages - 1 - rank] if args.kind == "zbv" else list(range(rank, num_stages, size))
    modules = [Stage(model, stage, num_stages) for stage in mine]
    stages = [pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
              for module, stage in zip(modules, mine)]
    schedule = getattr(pipelining, schedule_class)(
        stages[0] if args.kind in ("gpipe", "1f1b") else stages, args.microbatches, loss_fn=cross_entropy)
    optimizer = adamw(torch.nn.ModuleList(modules).parameters())

    def step(samples):
        optimizer.zero_grad()
        inputs = (samples[:, :-1].contiguous(),) if 0 in mine else ()
        losses = []
        if num_stages - 1 in mine:
            schedule.step(*inputs, target=samples[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return step, optimizer


class Stage(torch.nn.Module):
    """Some layers of the model; the first stage embeds, the last projects."""

    def __init__(self, model, stage: int, num_stages: int):
        super().__init__()
        self.config = model.config
        self.embedding = model.embedding if stage == 0 else None
        per_stage = len(model.decoder_layers) // num_stages
        self.decoder_layers = model.decoder_layers[stage * per_stage : (stage + 1) * per_stage]
        self.final_norm, self.final_proj = (
            (model.final_norm, model.final_proj) if stage == num_stages - 1 else (None, None))

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        cos, sin = get_cos_sin(x.size(1), self.config.head_dim, x.dtype, x.device, **self.config.rope_parameters)
        for layer in self.decoder_layers:
            x = layer(x, cos, sin)
        return x if self.final_proj is None else self.final_proj(self.final_norm(x))


def hugging_face(model, args):
    """LlamaForCausalLM with our weights, in one process or split over the ranks as its own tp_plan says."""
    from huggingface import their_name
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(args.model_name, attn_implementation="sdpa")
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict({their_name(name): weight for name, weight in model.state_dict().items()})
    if args.kind == "hf-tp":
        from transformers.distributed import DistributedConfig, initialize_distributed_mesh

        split = DistributedConfig(tp_plan="auto")
        theirs = theirs.maybe_distribute_model(theirs, split, initialize_distributed_mesh(split)[1])
    if args.compile:
        for layer in theirs.model.layers:
            layer.compile()
    optimizer = adamw(by_kind(theirs.parameters()))

    def step(samples):
        optimizer.zero_grad()
        total = accumulate(lambda input_ids: theirs(input_ids=input_ids, use_cache=False).logits, samples,
                           args.microbatches)
        optimizer.step()
        return total

    return step, optimizer


PEERS = {"ddp": data_parallel, "fsdp": fully_sharded, "zero2": fully_sharded, "dtensor": tensor_parallel,
         "dtensor-sp": tensor_parallel, "hf": hugging_face, "hf-tp": hugging_face, **dict.fromkeys(SCHEDULES, pipeline)}

if __name__ == "__main__":
    main()
