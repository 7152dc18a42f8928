"""What a user would pick instead: our step-1 model (or Hugging Face's) trained with PyTorch's own parallelism.

    torchrun --nproc_per_node 4 tools/maintain/peers.py ddp --model_name DIR --tokens FILE --out JSON

For measure_course.py to run beside ours: same weights, same samples in the same optimizer step, same fused AdamW, no
clipping. tools/with_torch.py is the training; here are further ways to divide it.

Hugging Face's pipeline parallelism (transformers 5.23) is no peer: it sends hidden states without autograd, so that
backward() ends with "element 0 of tensors does not require grad and does not have a grad_fn" on every stage but the
last, and no gradient would travel back.
"""

import argparse
import itertools
import os
import pathlib
import sys

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

import torch
import torch.distributed as dist
from with_torch import accumulate, add_flags, cut, initial_model, make_mesh, mean_over, parallel, run_pipeline, train

from lab.launch import Help, modules_of

with modules_of(3):
    from dataloader import TokenSamples
    from model import cross_entropy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("kind", choices=sorted(PEERS), help="which of them")
    parser.add_argument("--tokens", required=True, help="int32 ids, as the loader of step 3 caches them")
    parser.add_argument("--device", default="cpu", help="of Hugging Face's model")
    parser.add_argument("--compile", action="store_true", help="Hugging Face's layers")
    add_flags(parser)
    parser.set_defaults(dtype="float32")  # of activations; parameters are float32
    args = parser.parse_args()
    size = int(os.environ["WORLD_SIZE"])
    make, axis = PEERS[args.kind]
    mesh = make_mesh(**{name: size if name == axis else 1 for name in ("dp", "pp", "tp")})
    samples = TokenSamples(args.tokens, args.seq_len, args.steps * args.samples)
    train(*make(initial_model(args.model_name, torch.float32), mesh, args), mesh, samples, args, args.device)
    dist.destroy_process_group()
    os._exit(0)  # torch's stages keep gloo's threads, which may abort the process while Python ends


def distributed_data_parallel(model, mesh, args):
    """All micro-batches but the last without communication."""
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    size = dist.get_world_size()

    def forward_backward(samples):
        mine, later = samples.view(len(samples) // size, size, -1)[:, dist.get_rank()], itertools.count(1)

        def forward(input_ids):
            model.require_backward_grad_sync = next(later) == args.microbatches
            return model(input_ids)

        return mean_over(mesh["dp"], accumulate(forward, mine, args.microbatches))

    return forward_backward, list(model.parameters())


def weights_kept(model, mesh, args):
    return parallel(model, mesh, args, keep_weights=True)


SCHEDULES = {  # kind -> class, stages a rank
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2), "zb": ("ScheduleInterleavedZeroBubble", 1),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2), "zbv": ("ScheduleZBVZeroBubble", 2)}


def pipeline(model, mesh, args):
    """torch.distributed.pipelining: each rank holds one or two stages, all of equally many layers.

    Of p ranks, rank r holds the stages r and r + p; for ZBV, whose stages go to the last rank and back, the second is
    2p - 1 - r, and the first rank computes the loss.
    """
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    schedule_class, stages_a_rank = SCHEDULES[args.kind]
    last = size * stages_a_rank - 1
    mine = [rank, last - rank] if args.kind == "zbv" else list(range(rank, last + 1, size))
    modules = torch.nn.ModuleList(cut(model, stage, last + 1) for stage in mine)
    schedule = getattr(pipelining, schedule_class)(
        [pipelining.PipelineStage(module, stage, last + 1, torch.device("cpu"))
         for module, stage in zip(modules, mine)], args.microbatches, loss_fn=cross_entropy)
    return lambda samples: run_pipeline(schedule, samples, 0 in mine, last in mine), list(modules.parameters())


def hugging_face(model, mesh, args):
    """LlamaForCausalLM with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lab.huggingface import their_name

    theirs = LlamaForCausalLM(LlamaConfig.from_pretrained(args.model_name, attn_implementation="sdpa"))
    theirs.load_state_dict({their_name(name): weight for name, weight in model.state_dict().items()})
    theirs.to(args.device)
    for layer in theirs.model.layers if args.compile else ():
        layer.compile()

    def forward(input_ids):
        with torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            return theirs(input_ids=input_ids, use_cache=False).logits

    return lambda samples: accumulate(forward, samples, args.microbatches), list(theirs.parameters())


PEERS = {  # kind -> what makes it, and the axis of its ranks
    "ddp": (distributed_data_parallel, "dp"), "fsdp": (parallel, "dp"), "zero2": (weights_kept, "dp"),
    "dtensor": (parallel, "tp"), "1f1b": (parallel, "pp"), "hf": (hugging_face, "dp"),
    **dict.fromkeys(SCHEDULES, (pipeline, "pp"))}

if __name__ == "__main__":
    main()
