"""What a user would pick instead: our step-1 model (or Hugging Face's) trained with PyTorch's own parallelism.

    torchrun --nproc_per_node 4 tools/peers.py ddp --model_name DIR --tokens FILE --out JSON

Minimal scripts for tools/benchmark.py to run beside ours: same weights, same samples in the same optimizer step, same
fused AdamW, no clipping. Rank 0 or the last stage writes {"losses": [...], "step_seconds": [...]}, one number a step.
"""

import argparse
import json
import time

import numpy as np
import torch
import torch.distributed as dist
from launch import modules_of

with modules_of(1):
    from model import Llama, cross_entropy, init_weights, rotary_tables
    from utils import load_config

SAMPLES, SEQ_LEN, LEARNING_RATE, SEED = 32, 128, 3e-4, 42


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(PEERS))
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--tokens", required=True, help="int32 ids, as the loader of step 3 caches them")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    config = load_config(args.model_name, num_attention_heads=None)
    with torch.device("meta"):
        model = Llama(config)
    init_weights(model, SEED, torch.device("cpu"))
    step = PEERS[args.kind](model, args)
    tokens, losses, seconds = np.memmap(args.tokens, dtype=np.int32, mode="r"), [], []
    for k in range(args.steps):
        start = time.perf_counter()
        losses.append(step(global_batch(tokens, k)).item())
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == (dist.get_world_size() - 1 if args.kind in ("gpipe", "1f1b") else 0):
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "step_seconds": seconds}, file)
    dist.destroy_process_group()


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


def data_parallel(model, args):
    """DistributedDataParallel; micro-batches of one sample, all but the last without communication."""
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, size = adamw(model.parameters()), dist.get_world_size()

    def step(samples):
        mine = samples.view(SAMPLES // size, size, -1)[:, dist.get_rank()]
        optimizer.zero_grad()
        total = accumulate(parallel, mine, len(mine),
                           lambda is_last: setattr(parallel, "require_backward_grad_sync", is_last))
        dist.all_reduce(total)
        optimizer.step()
        return total / size

    return step


def tensor_parallel(model, args):
    """torch.distributed.tensor.parallel as its tutorial shows: embedding, layers and projection, loss in parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()),
            "final_proj": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(len(model.decoder_layers)):
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"decoder_layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.out_proj", "mlp.down_proj"):
            plan[f"decoder_layers.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    is_split = [type(param.data).__name__ == "DTensor" for param in model.parameters()]
    groups = [{"params": [p for p, split in zip(model.parameters(), is_split) if split is kind]}
              for kind in (True, False)]  # one fused update can't mix the two kinds
    optimizer = adamw(groups)

    def step(samples):
        optimizer.zero_grad()
        with loss_parallel():
            total = accumulate(model, samples, 8)
        optimizer.step()
        return total.full_tensor()

    return step


def pipeline(model, args):
    """torch.distributed.pipelining, a quarter of the layers a stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    stage_module = Stage(model, rank, size)
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args.kind](stage, 8, loss_fn=cross_entropy)
    optimizer = adamw(stage_module.parameters())

    def step(samples):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(samples[:, :-1].contiguous())
        elif rank == size - 1:
            schedule.step(target=samples[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


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
        base = self.config.rope_parameters["rope_theta"]
        cos, sin = rotary_tables(x.size(1), self.config.head_dim, base, x.dtype, x.device)
        for layer in self.decoder_layers:
            x = layer(x, cos, sin)
        return x if self.final_proj is None else self.final_proj(self.final_norm(x))


def hugging_face(model, args):
    """LlamaForCausalLM in one process, with our weights."""
    from huggingface import their_name
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig.from_pretrained(args.model_name, attn_implementation="sdpa"))
    theirs.load_state_dict({their_name(name): weight for name, weight in model.state_dict().items()})
    if args.compile:
        for layer in theirs.model.layers:
            layer.compile()
    optimizer = adamw(theirs.parameters())

    def step(samples):
        optimizer.zero_grad()
        total = accumulate(lambda input_ids: theirs(input_ids=input_ids, use_cache=False).logits, samples, 8)
        optimizer.step()
        return total

    return step


PEERS = {"ddp": data_parallel, "dtensor": tensor_parallel, "gpipe": pipeline, "1f1b": pipeline,
         "hf": hugging_face}

if __name__ == "__main__":
    main()
