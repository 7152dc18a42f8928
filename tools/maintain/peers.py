"""What a user would pick instead: our step-1 model (or Hugging Face's) trained with PyTorch's own parallelism.

    torchrun --nproc_per_node 4 tools/maintain/peers.py ddp --model_name DIR --tokens FILE --out JSON

Minimal scripts for measure_course.py to run beside ours: same weights, same samples in the same optimizer step, same
fused AdamW, no clipping. Rank 0, or in a pipeline the rank that computes the loss, prints a line a step and writes
{"losses": [one a step], "seconds": [one a step], "memory_gb": at the peak, "grad_norm": of the last step}.

Hugging Face's pipeline parallelism (transformers 5.23) is no peer: it sends hidden states without autograd, so that
backward() ends with "element 0 of tensors does not require grad and does not have a grad_fn" on every stage but the
last, and no gradient would travel back.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from launch import Help, modules_of
from torch.distributed.tensor import DTensor

with modules_of(1):
    from model import Llama, cross_entropy, init_weights, get_cos_sin
    from utils import load_config, peak_memory_gb

SEED = 42


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("kind", choices=sorted(PEERS), help="which of them")
    parser.add_argument("--model_name", required=True, help="a directory with config.json")
    parser.add_argument("--tokens", required=True, help="int32 ids, as the loader of step 3 caches them")
    parser.add_argument("--out", required=True, help="the JSON to write: losses, and the last gradient norm")
    parser.add_argument("--steps", type=int, default=7, help="optimizer steps")
    parser.add_argument("--samples", type=int, default=32, help="of a step")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, on each data-parallel rank")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="AdamW's")
    parser.add_argument("--device", default="cpu", help="of Hugging Face's model")
    parser.add_argument("--dtype", default="float32", help="of Hugging Face's activations, by autocast")
    parser.add_argument("--compile", action="store_true", help="Hugging Face's layers")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(*PEERS[args.kind](initial_model(args.model_name), args), args)
    dist.destroy_process_group()
    os._exit(0)  # torch's stages keep gloo's threads, which may abort the process while Python ends


def initial_model(name: str) -> Llama:
    with torch.device("meta"):
        model = Llama(load_config(name, num_attention_heads=None))
    init_weights(model, SEED, torch.device("cpu"))
    return model


def train(forward_backward, params, args) -> None:
    """`forward_backward(samples)`: of a step; the mean loss, or None on a stage that does not compute it."""
    kinds = [[param for param in params if isinstance(param, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in kinds if group],  # one update cannot mix them
                                  lr=args.learning_rate, fused=True)
    tokens, per_step = np.memmap(args.tokens, dtype=np.int32, mode="r"), args.samples * args.seq_len
    losses, seconds = [], []
    for k in range(args.steps):
        start = time.perf_counter()
        ids = torch.from_numpy(tokens[k * per_step : (k + 1) * per_step + 1].astype(np.int64)).to(args.device)
        optimizer.zero_grad()
        loss = forward_backward(ids.unfold(0, args.seq_len + 1, args.seq_len))  # (samples, T + 1)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the optimizer's kernels are only queued until now
        seconds.append(time.perf_counter() - start)
        reports = loss is not None and (dist.get_rank() == 0 or args.kind in SCHEDULES)
        if reports:
            print(f"step {k + 1}/{args.steps} | loss {loss:.4f}", flush=True)
    found = {"losses": losses, "seconds": seconds, "memory_gb": peak_memory_gb()}
    norm = gradient_norm(params, args.kind in SCHEDULES)  # after the loop: a collective would change the times
    if reports:
        with open(args.out, "w") as file:
            json.dump({**found, "grad_norm": norm}, file)


def gradient_norm(params: list[torch.Tensor], is_pipeline: bool) -> float:
    """Of what the optimizer has just applied. Ranks of a pipeline hold different parameters, other ranks hold all."""
    whole = (param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad for param in params)
    total = torch.stack([grad.square().sum() for grad in whole]).sum()
    if is_pipeline:
        dist.all_reduce(total)
    return total.sqrt().item()


def accumulate(forward, samples: torch.Tensor, num_microbatches: int, before=lambda is_last: None) -> torch.Tensor:
    """Forward and backward of each micro-batch, and what comes before. Returns the mean loss."""
    total = 0.0
    for i, batch in enumerate(samples.chunk(num_microbatches)):
        before(i == num_microbatches - 1)
        loss = cross_entropy(forward(batch[:, :-1].contiguous()), batch[:, 1:].contiguous()) / num_microbatches
        loss.backward()
        total += loss.detach()
    return total


def data_parallel(model, args):
    """DistributedDataParallel, all micro-batches but the last without communication; or fully_shard on each layer and
    on the whole, of which the kind zero2 keeps the weights between forward and backward."""
    if args.kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in (*model.decoder_layers, model):
            fully_shard(layer, reshard_after_forward=args.kind == "fsdp")
    size = dist.get_world_size()

    def forward_backward(samples):
        total = accumulate(model, samples.view(len(samples) // size, size, -1)[:, dist.get_rank()], args.microbatches,
                           lambda is_last: setattr(model, "require_backward_grad_sync", is_last))  # DDP's
        dist.all_reduce(total)
        return total / size

    return forward_backward, list(model.parameters())


def tensor_parallel(model, args):
    """torch.distributed.tensor.parallel as its tutorial shows: embedding, layers and projection, loss in parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()),
            "final_proj": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"decoder_layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.out_proj", "mlp.down_proj"):
        plan[f"decoder_layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)

    def forward_backward(samples):
        with loss_parallel():
            return accumulate(model, samples, args.microbatches).full_tensor()

    return forward_backward, list(model.parameters())


SCHEDULES = {  # kind -> class, stages a rank
    "1f1b": ("Schedule1F1B", 1), "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
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
    modules = torch.nn.ModuleList(Stage(model, stage, num_stages) for stage in mine)
    stages = [pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
              for module, stage in zip(modules, mine)]
    schedule = getattr(pipelining, schedule_class)(
        stages[0] if args.kind == "1f1b" else stages, args.microbatches, loss_fn=cross_entropy)

    def forward_backward(samples):
        inputs, losses = (samples[:, :-1].contiguous(),) if 0 in mine else (), []
        last = dict(target=samples[:, 1:].contiguous(), losses=losses) if num_stages - 1 in mine else {}
        schedule.step(*inputs, **last)
        return torch.stack(losses).mean() if losses else None

    return forward_backward, list(modules.parameters())


class Stage(torch.nn.Module):
    """Some layers of the model; the first stage embeds, the last projects."""

    def __init__(self, model, stage: int, num_stages: int):
        super().__init__()
        self.config, per_stage = model.config, len(model.decoder_layers) // num_stages
        self.decoder_layers = model.decoder_layers[stage * per_stage : (stage + 1) * per_stage]
        self.embedding = model.embedding if stage == 0 else torch.nn.Identity()
        self.final = (torch.nn.Sequential(model.final_norm, model.final_proj) if stage == num_stages - 1
                      else torch.nn.Identity())

    def forward(self, x):
        x = self.embedding(x)
        cos, sin = get_cos_sin(x.size(1), self.config.head_dim, x.dtype, x.device, **self.config.rope_parameters)
        for layer in self.decoder_layers:
            x = layer(x, cos, sin)
        return self.final(x)


def hugging_face(model, args):
    """LlamaForCausalLM with our weights."""
    from huggingface import their_name
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig.from_pretrained(args.model_name, attn_implementation="sdpa"))
    theirs.load_state_dict({their_name(name): weight for name, weight in model.state_dict().items()})
    theirs.to(args.device)
    for layer in theirs.model.layers if args.compile else ():
        layer.compile()

    def forward(input_ids):
        with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            return theirs(input_ids=input_ids, use_cache=False).logits

    def forward_backward(samples):
        return accumulate(forward, samples, args.microbatches)

    return forward_backward, list(theirs.parameters())


PEERS = {"ddp": data_parallel, "fsdp": data_parallel, "zero2": data_parallel, "dtensor": tensor_parallel,
         "hf": hugging_face, **dict.fromkeys(SCHEDULES, pipeline)}

if __name__ == "__main__":
    main()
