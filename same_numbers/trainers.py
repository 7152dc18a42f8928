"""Trainers of PyTorch's own parts, each right, and with published faults: what the verdict is tried with, and examples
of where the Recorder's two lines go. By hand: trainers_model.py and trainers_data.py.

    python -m same_numbers.trainers fsdp2 one/                                              # the trusted run
    torchrun --nproc_per_node 2 -m same_numbers.trainers fsdp2 many/ --fault early
    python -m same_numbers one/ many/
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from same_numbers import trainers_data, trainers_model
from same_numbers.trainers_base import Model, Run, adam, faults, train, world
from same_numbers.trainers_data import accumulate


def fsdp2(run: Run):
    """fully_shard() over replicas. With 4 ranks these are two, in whose MLPs two ranks share the work by DTensor.

    early: the optimizer is made before fully_shard() replaces the parameters (huggingface/accelerate#3256)
    own_norm: each rank clips by the norm of its own shards (pytorch/xla#4796)
    """
    model, which, tp_size = Model(), {}, 2 if world() == 4 else 1
    early = adam(model)
    if world() > 1:
        mesh = init_device_mesh("cpu", (world() // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
        which = {"replica": mesh["dp"].get_local_rank(), "replicas": mesh["dp"].size()}
        plan = {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan if tp_size > 1 else {})
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh["dp"])

    def before(i, is_last):
        if world() > 1:
            model.set_requires_gradient_sync(is_last)

    def after():
        shards = [param.grad.to_local() for param in model.parameters()] if run.fault == "own_norm" else []
        norm = sum(shard.square().sum() for shard in shards) ** 0.5
        for shard in shards:
            shard.mul_(0.1 / norm)

    return train(run, model, accumulate(model, before=before, **which), after,
                 optimizer=early if run.fault == "early" else adam(model))


def dtensor(run: Run):
    """Tensor and sequence parallelism by a plan.

    norms: the gradients of the norms, each rank's of its own tokens, are not summed (pytorch/torchtitan#1681)
    """
    model, plan = Model(), {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        **{f"layers.*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"},
        **{f"layers.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "mlp.down")},
        **{f"layers.*.{name}_norm": SequenceParallel(sequence_dim=1, use_local_output=True) for name in "qk"}}
    if run.fault != "norms":
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("layers.*.norm1", "layers.*.norm2", "norm")}
    if world() > 1:
        parallelize_module(model, init_device_mesh("cpu", (world(),)), plan)
    return train(run, model, trainers_model.accumulate(model))


TRAINERS = {"fsdp2": fsdp2, "dtensor": dtensor} | trainers_model.TRAINERS | trainers_data.TRAINERS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=TRAINERS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fault", default="", help="one of those in the trainer's docstring")
    parser.add_argument("--dtype", default="float64")
    args = parser.parse_args()
    known = faults(TRAINERS[args.kind])
    if args.fault and args.fault not in known:
        parser.error(f"--fault {args.fault} is none of {args.kind}: use {' or '.join(known) or 'none'}")
    torch.set_default_dtype(getattr(torch, args.dtype))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    TRAINERS[args.kind](Run(args.fault, args.folder))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
