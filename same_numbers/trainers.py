"""Trainers of PyTorch's and other people's parts, each right, and with a published fault: what the verdict is tried with,
and examples of where the Recorder's two lines go. By hand: trainers_model.py and trainers_data.py.

    python -m same_numbers.trainers fsdp2 one/                                              # the trusted run
    torchrun --nproc_per_node 2 -m same_numbers.trainers fsdp2 many/ --fault early
    python -m same_numbers one/ many/
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

import same_numbers
from same_numbers import trainers_data, trainers_model
from same_numbers.trainers_base import LENGTH, Model, Run, adam, faults, mean_loss, rank, sum_gradients, train, world
from same_numbers.trainers_data import MICRO_BATCHES, accumulate, batches


def fsdp2(run: Run):
    """fully_shard().

    early: the optimizer is made before fully_shard() replaces the parameters (huggingface/accelerate#3256)
    """
    from torch.distributed.fsdp import fully_shard

    model = Model()
    early = adam(model)
    for module in (*model.layers.values(), model) if world() > 1 else ():
        fully_shard(module)
    return train(run, model, accumulate(model, before=lambda i, is_last: world() > 1 and
                                        model.set_requires_gradient_sync(is_last)),
                 optimizer=early if run.fault == "early" else adam(model))


def dtensor(run: Run):
    """Tensor and sequence parallelism by a plan.

    norms: the gradients of the norms, each rank's of its own tokens, are not summed (pytorch/torchtitan#1681)
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)

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


def fsdp_tp(run: Run):
    """fully_shard() over the replicas, DTensor in the MLPs.

    own_norm: each rank clips by the norm of its own shards (pytorch/xla#4796)
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, replica, replicas = Model(), 0, 1
    if world() > 1:
        mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("dp", "tp"))
        replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
        parallelize_module(model, mesh["tp"], {
            "layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()})
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh["dp"])

    def after():
        shards = [param.grad.to_local() for param in model.parameters()] if run.fault else []
        norm = torch.cat([shard.flatten() for shard in shards]).norm() if shards else 0
        for shard in shards:
            shard.mul_(0.1 / norm)

    return train(run, model, accumulate(model, replica=replica, replicas=replicas), after)


def accelerate(run: Run):
    """Hugging Face's Accelerator.

    twice: the loss is divided by the number of micro-batches, as backward() does, too (huggingface/accelerate#106)
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES // world())
    model = Model(1)
    model, optimizer = accelerator.prepare(model, adam(model))
    recorder = same_numbers.Recorder(model, optimizer, run.folder)
    for step in range(run.steps):
        for _, inputs, targets in batches(step):
            with accelerator.accumulate(model):
                loss = mean_loss(model(inputs), targets)
                accelerator.backward(loss / accelerator.gradient_accumulation_steps if run.fault else loss)
                if accelerator.sync_gradients:
                    recorder.step()
                optimizer.step()
                optimizer.zero_grad()
    return []


class WithLoss(Model):
    """As Trainer calls models."""

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        losses = F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": losses / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


def trainer(run: Run):
    """Hugging Face's Trainer, on samples of unlike lengths.

    means: the mean over micro-batches of means over tokens (huggingface/transformers#34191)
    """
    import transformers

    samples = []
    for step in range(run.steps):
        for _, inputs, targets in batches(step, 0, 1):
            for i in range(2):
                labels = targets[i].where(torch.arange(LENGTH) < 2 + (5 * len(samples) + 3) % 11, -100)
                samples.append({"input_ids": inputs[i], "labels": labels})

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(samples)

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            self.recorder = same_numbers.Recorder(model, optimizer, run.folder)

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.recorder.step()

    args = transformers.TrainingArguments(
        str(run.folder), per_device_train_batch_size=2, gradient_accumulation_steps=MICRO_BATCHES // world(),
        max_steps=run.steps, use_cpu=True, max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
        learning_rate=1e-2, remove_unused_columns=False)
    running = InOrder(WithLoss(1), args, train_dataset=samples, callbacks=[Callback()])
    running.model_accepts_loss_kwargs = run.fault != "means"
    running.train()
    return []


def lora(run: Run):
    """peft, with frozen weights.

    seeds: each rank draws its own start (pytorch/torchtitan#166)
    """
    import peft

    model = Model(1)
    torch.manual_seed(rank() if run.fault else 1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "q"], init_lora_weights="gaussian"))
    return train(run, model, accumulate(model), lambda: sum_gradients(
        model, lambda name: model.get_parameter(name).requires_grad, world()))


FRAMEWORKS = {each.__name__: each for each in (fsdp2, dtensor, fsdp_tp, accelerate, trainer, lora)}
TRAINERS = FRAMEWORKS | trainers_model.TRAINERS | trainers_data.TRAINERS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=TRAINERS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fault", default="", help="one of those in the trainer's docstring")
    parser.add_argument("--dtype", default="float64")
    args = parser.parse_args()
    known = faults(TRAINERS[args.kind])
    if args.fault and args.fault not in known:
        parser.error(f"--fault {args.fault} is none of {args.kind}: use {' or '.join(known)}")
    torch.set_default_dtype(getattr(torch, args.dtype))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    TRAINERS[args.kind](Run(args.fault, args.folder))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
