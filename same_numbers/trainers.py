"""Ten trainers that are not of this repository's steps, each right, and with one published fault: what the verdict is
tried with, and examples of where the Recorder's two lines go.

    python -m same_numbers.trainers ddp one/                                                # the trusted run
    torchrun --nproc_per_node 2 -m same_numbers.trainers ddp many/ --fault
    python -m same_numbers one/ many/

In one process all but `trainer`, `accelerate` and `lora` are the plain loop. A step reads 8 samples, in 4 micro-batches
in one process and in 2 on each of two replicas.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import same_numbers

STEPS, VOCAB, WIDTH, LENGTH = 3, 60, 32, 16
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A residual network of tokens. A pipeline's stage keeps some of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        for layer in (self.embedding, *self.blocks.values(), self.norm, self.head):
            x = x if layer is None else layer(x)
        return x


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def micro_batches(step: int, replica: int = 0, replicas: int = 1) -> list:
    """(inputs, targets), both (2, T), of the micro-batches of a replica."""
    tokens = torch.randint(VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens[replica::replicas].split(2)]


def adam(params):
    return torch.optim.AdamW([{"params": [p for p in params if hasattr(p, "placements") is kind]}
                              for kind in {hasattr(p, "placements") for p in params}], lr=1e-2)


def loop(model, optimizer, recorder, replicas=1, before=lambda i, last: None, after=lambda: None,
         steps=range(STEPS), replica=None):
    """Gradient accumulation. before(i, last) precedes each micro-batch, after() follows the last one."""
    for step in steps:
        optimizer.zero_grad()
        batches = micro_batches(step, RANK % replicas if replica is None else replica, replicas)
        total = 0.0
        for i, (inputs, targets) in enumerate(batches):
            before(i, i == len(batches) - 1)
            loss = loss_of(model(inputs), targets) / len(batches)
            loss.backward()
            total += loss.detach()
        after()
        recorder.step(loss=total)
        optimizer.step()


def plain(folder, fault):
    model = Model()
    optimizer = adam([*model.parameters()])
    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder))


def ddp(folder, fault):
    """Fault: gradients are averaged after the first micro-batch (picotron)."""
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = adam([*model.parameters()])

    def before(i, last):
        model.require_backward_grad_sync = i == 0 if fault else last  # what no_sync() sets

    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder), WORLD, before)


def fsdp2(folder, fault):
    """Fault: the optimizer is made before fully_shard() replaces the parameters (huggingface/accelerate#3256)."""
    from torch.distributed.fsdp import fully_shard

    model = Model()
    early = adam([*model.parameters()])
    for module in (*model.blocks.values(), model):
        fully_shard(module)
    optimizer = early if fault else adam([*model.parameters()])
    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder), WORLD,
         lambda i, last: model.set_requires_gradient_sync(last))


def tp(folder, fault):
    """DTensor, with sequence parallelism. Fault: the gradients of the norms, each rank's of its own part of the tokens,
    are not summed (pytorch/torchtitan#1681)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)

    model, plan = Model(), {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1))}
    norms = {} if fault else {"norm": SequenceParallel(), "blocks.*.norm": SequenceParallel(use_local_output=True)}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan | norms)
    optimizer = adam([*model.parameters()])
    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder))


def fsdp_tp(folder, fault):
    """fully_shard over the replicas, DTensor in the blocks. Fault: each rank clips by the norm of its own shards
    (pytorch/xla#4796)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Model(), init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = adam([*model.parameters()])

    def clip_by_own_norm():
        shards = [param.grad.to_local() for param in model.parameters()]
        norm = torch.cat([shard.flatten() for shard in shards]).norm()
        for shard in shards if fault else ():
            shard.mul_(0.1 / norm)

    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder), mesh["dp"].size(), after=clip_by_own_norm,
         replica=mesh["dp"].get_local_rank())


def pipeline(folder, fault):
    """torch.distributed.pipelining. Fault: gradients are not divided by the number of micro-batches
    (pytorch/torchtitan#2972)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, last = Model(), RANK == WORLD - 1
    if RANK == 0:
        model.blocks.pop("1"), setattr(model, "norm", None), setattr(model, "head", None)
    else:
        model.blocks.pop("0"), setattr(model, "embedding", None)
    schedule = Schedule1F1B(PipelineStage(model, RANK, WORLD, torch.device("cpu")), 4, loss_of, scale_grads=not fault)
    optimizer = adam([*model.parameters()])
    recorder = same_numbers.Recorder(model, optimizer, folder)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = map(torch.cat, zip(*micro_batches(step)))
        losses = []
        schedule.step(*[inputs] * (RANK == 0), **dict(target=targets, losses=losses) if last else {})
        recorder.step(loss=sum(losses) / len(losses) if last else None)
        optimizer.step()


def accelerate(folder, fault):
    """Hugging Face's Accelerator. Fault: the loss is divided by the number of micro-batches, as backward() does, too
    (huggingface/accelerate#106)."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 // WORLD)
    model = Model()
    model, optimizer = accelerator.prepare(model, adam([*model.parameters()]))
    recorder = same_numbers.Recorder(model, optimizer, folder)
    for step in range(STEPS):
        for inputs, targets in micro_batches(step, RANK, WORLD):
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss / accelerator.gradient_accumulation_steps if fault else loss)
                if accelerator.sync_gradients:
                    recorder.step()
                optimizer.step()
                optimizer.zero_grad()


class WithLoss(Model):
    """As Trainer calls models."""

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        losses = F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": losses / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


def trainer(folder, fault):
    """Hugging Face's Trainer, on samples of unlike lengths. Fault: the mean over micro-batches of means over tokens
    (huggingface/transformers#34191)."""
    import transformers

    samples = []
    for step in range(STEPS):
        for inputs, targets in micro_batches(step):
            for i in range(2):
                labels = targets[i].where(torch.arange(LENGTH) < 3 + (5 * len(samples) + 3) % 13, -100)
                samples.append({"input_ids": inputs[i], "labels": labels})

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(samples)

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            self.recorder = same_numbers.Recorder(model, optimizer, folder)

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.recorder.step()

    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD, max_steps=STEPS, use_cpu=True,
        max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
        remove_unused_columns=False)
    running = InOrder(WithLoss(), args, train_dataset=samples, callbacks=[Callback()])
    running.model_accepts_loss_kwargs = not fault
    running.train()


def all_reduce(model, divide=True):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= WORLD if divide else 1


def by_hand(folder, fault):
    """A hand-written all-reduce. Fault: a sum over replicas where the mean is meant (NovaSky-AI/SkyRL#1420)."""
    model = Model()
    optimizer = adam([*model.parameters()])
    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder), WORLD,
         after=lambda: all_reduce(model, divide=not fault))


def lora(folder, fault):
    """peft, with frozen weights. Fault: each rank draws its own start (pytorch/torchtitan#166)."""
    import peft

    model = Model()
    torch.manual_seed(RANK if fault else 1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "down"], init_lora_weights="gaussian"))
    optimizer = adam([param for param in model.parameters() if param.requires_grad])
    loop(model, optimizer, same_numbers.Recorder(model, optimizer, folder), WORLD,
         after=lambda: WORLD > 1 and all_reduce(model))


def resumed(folder, fault):
    """DistributedDataParallel, which goes on from a checkpoint after the first step. Fault: without the optimizer's
    moments."""
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = adam([*model.parameters()])
    loop(model, optimizer, same_numbers.Recorder([], optimizer, folder), WORLD, steps=[0])
    saved = model.state_dict(), optimizer.state_dict()
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = adam([*model.parameters()])
    model.load_state_dict(saved[0])
    if not fault:
        optimizer.load_state_dict(saved[1])
    recorder = same_numbers.Recorder(model, optimizer, folder, steps=2, first_step=2)
    loop(model, optimizer, recorder, WORLD, steps=[1, 2])


KINDS = {each.__name__: each for each in (
    plain, ddp, fsdp2, tp, fsdp_tp, pipeline, accelerate, trainer, by_hand, lora, resumed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder")
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    alone = args.kind if args.kind in ("trainer", "lora") else "plain"
    KINDS[args.kind if WORLD > 1 else alone](args.folder, args.fault)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
