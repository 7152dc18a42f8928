"""Trainers that divide a model over ranks, by hand, and published faults of such code, each a line beside the right
one. trainers.py starts them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from same_numbers.trainers_base import (
    LENGTH, VOCAB, WIDTH, Experts, Model, Run, clip, collective, cut, gathered, mean_loss, own, pairs, rank, same,
    scattered, sum_gradients, total, train, world)

MICRO_BATCHES = 3  # of two samples, on each rank


def accumulate(model, loss_of=mean_loss, part=lambda *both: both):
    """loss_of() of train(): forward and backward of the micro-batches, of which a rank may see a part."""
    def run(step):
        losses = []
        for i in range(MICRO_BATCHES):
            inputs, targets = part(*pairs(step * MICRO_BATCHES + i, 2))
            losses.append(loss_of(model(inputs), targets) / MICRO_BATCHES)
            losses[-1].backward()
        return total(sum(losses).detach()) / world()
    return run


def clipped(model, parts, fault=""):
    """Clips by the norm of all gradients, in which what all ranks hold whole counts once."""
    squares = sum(param.grad.square().sum() / (1 if name in parts or fault in ("counted", "own_norm") else world())
                  for name, param in model.named_parameters())
    return clip(model.parameters(), squares if fault == "own_norm" else total(squares))


def own_tokens():
    """Recorder's tokens."""
    return own(torch.arange(LENGTH), 0).tolist(), LENGTH


def embed(weight, ids, fault):
    """A rank has some rows of the embedding. Others add the vectors of their tokens."""
    local, rows = ids - rank() * len(weight), len(weight) - 1 if fault == "mask" else len(weight)
    is_mine = (local >= 0) & (local < rows)
    return collective(total, same)(F.embedding(local * is_mine, weight) * is_mine[..., None])


def vocab_parallel_loss(logits, targets):
    """logits: (B, T, V/tp)."""
    logits = logits - total(logits.detach().amax(-1, keepdim=True), dist.ReduceOp.MAX)
    local, add = targets - rank() * logits.shape[-1], collective(total, same)
    is_mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, (local * is_mine)[..., None])[..., 0] * is_mine
    return (add(logits.exp().sum(-1)).log() - add(picked)).mean()


def tp(run: Run):
    """Heads, the MLP's hidden numbers and the vocabulary are divided. f precedes each divided layer, g follows it.

    head_norms: gradients of norms inside heads are not summed (NVIDIA-NeMo/RL#3716)
    gathered: a vocabulary-parallel loss is given whole logits: log tp too large (NVIDIA/Megatron-LM#7452)
    mask: a vocabulary-parallel embedding's mask ends a token early (arXiv 2506.09280)
    bias: each rank adds the bias before the sum (awslabs/slapo#10)
    bias_mean: each rank adds a tp-th of the bias, so its gradient is a tp-th (pytorch/torchtitan#4332)
    f: the gradient of a divided layer's input is not summed (pytorch/torchtitan#1805)
    g: the gradient of a divided layer's output is summed, too (tenstorrent/tt-metal#31748)
    counted: the norm counts what all ranks hold once for each (NVIDIA-NeMo/RL#3788)
    own_norm: each rank clips by the norm of its own part (pytorch/torchtitan#596)
    """
    model, fault = Model(), run.fault
    parts = cut(model, {"[qkv].weight": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1,
                        "embedding.weight": 0, "head.weight": 0})
    head, model.embedding.forward = model.head.forward, lambda ids: embed(model.embedding.weight, ids, fault)
    f = collective(same, same if fault == "f" else total)
    g = collective(total, total if fault == "g" else same)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = f, g, f, g
        if fault == "bias":
            layer.mlp.row_parallel = lambda leave, x, linear: leave(linear(x))
        if fault == "bias_mean":
            layer.mlp.row_parallel = lambda leave, x, linear: leave(F.linear(x, linear.weight, linear.bias / world()))
    model.head.forward = lambda x: head(f(x))
    if fault == "gathered":
        model.head.forward = lambda x: collective(gathered, own, dim=2)(head(f(x)))

    def after():
        if fault != "head_norms":  # each rank has used them for its own heads
            sum_gradients(model, lambda name: "q_norm" in name or "k_norm" in name)
        return clipped(model, parts, fault)

    return train(run, model, accumulate(model, vocab_parallel_loss), after, parts=parts.get)


def sp(run: Run):
    """Tensor and sequence parallelism: between divided layers, a rank has some tokens. With experts.

    norms: gradients of norms, which see a rank's own tokens, are not summed (NVIDIA/Megatron-LM#1446)
    router: nor are those of the router (pytorch/torchtitan#4054)
    """
    model = Model(mlp=Experts)
    parts = cut(model, {"[qkv].weight": 0, "up": 2, "out.weight": 1, "down": 1})
    enter, leave = collective(gathered, scattered), collective(scattered, gathered)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = enter, leave, enter, leave
    embedding, norm = model.embedding.forward, model.norm.forward
    model.embedding.forward = lambda x: collective(own, gathered)(embedding(x))
    model.norm.forward = lambda x: collective(gathered, own)(norm(x))

    def sees_own_tokens(name):
        return ("out.bias" in name or "norm" in name and run.fault != "norms"
                or "router" in name and run.fault != "router")

    return train(run, model, accumulate(model), lambda: sum_gradients(model, sees_own_tokens), parts=parts.get,
                 tokens=own_tokens())


def cp(run: Run):
    """Each rank has some tokens of each sample. Queries are its own, keys and values come from all.

    labels: labels are shifted after the cut (NVIDIA-BioNeMo/bionemo-recipes#1449)
    positions: each rank counts its positions from 0 (NVIDIA/Megatron-LM#5243)
    scale: the gradients of the ranks' means are added (NVIDIA/Megatron-LM#906)
    ring: backward leaves out what other ranks did with a rank's keys and values (huggingface/diffusers#14265)
    """
    model, fault = Model(first=0 if run.fault == "positions" else rank() * LENGTH // world()), run.fault
    for layer in model.layers.values():
        layer.around = collective(gathered, own if fault == "ring" else scattered, dim=2)

    def part(inputs, targets):
        inputs, targets = own(inputs), own(targets)
        return inputs, inputs.roll(-1, dims=1) if fault == "labels" else targets

    return train(run, model, accumulate(model, part=part),
                 lambda: sum_gradients(model, divisor=1 if fault == "scale" else world()), tokens=own_tokens())


def pp(run: Run):
    """torch.distributed.pipelining, of the four parts below; the head's weight is the embedding's.

    twice: two stages have the layer between them (arXiv 2506.09280)
    never: no stage has the last layer (NVIDIA/Megatron-LM#1304)
    tied: a tied weight's gradients are not summed between first and last stage (NVIDIA/Megatron-LM#844)
    scale: gradients are not divided by the number of micro-batches (pytorch/torchtitan#2972)
    own_norm: each stage clips by the norm of its own gradients (pytorch/torchtitan#596)
    """
    model, fault, is_first, is_last = Model(), run.fault, rank() == 0, rank() == world() - 1
    mine = {*["embedding", "0", "1", "head"][rank() * 4 // world() : (rank() + 1) * 4 // world()]}
    mine |= {"0"} if fault == "twice" and rank() < 2 else set()
    mine -= {"1"} if fault == "never" else set()
    model.head.weight = model.embedding.weight
    [model.layers.pop(name) for name in "01" if name not in mine]
    model.embedding = model.embedding if is_first else None
    model.norm, model.head = (model.norm, model.head) if is_last else (None, None)
    if world() > 1:
        schedule = ScheduleGPipe(PipelineStage(model, rank(), world(), torch.device("cpu")), MICRO_BATCHES, mean_loss,
                                 scale_grads=fault != "scale")

    def loss_of(step):
        inputs, targets = map(torch.cat, zip(*[pairs(step * MICRO_BATCHES + i, 2) for i in range(MICRO_BATCHES)]))
        losses = []
        schedule.step(*[inputs] * is_first, **dict(target=targets, losses=losses) if is_last else {})
        return sum(losses).detach() / MICRO_BATCHES if is_last else None

    def after():
        tied = [module.weight for module in (model.embedding, model.head) if module is not None]
        if world() > 1 and fault != "tied":
            both = total(tied[0].grad if tied else torch.zeros(VOCAB, WIDTH))
            if tied:
                tied[0].grad = both
        squares = sum((param.grad.square().sum() for param in model.parameters()
                       if is_last or fault == "own_norm" or not any(param is each for each in tied)), torch.zeros(()))
        return clip(model.parameters(), squares if fault == "own_norm" else total(squares))

    return train(run, model, loss_of if world() > 1 else accumulate(model), after)


def ep(run: Run):
    """Each rank has some of the experts and some of the samples. Tokens travel to their experts and back.

    times: experts' gradients are ep times too large (pytorch/pytorch#160285)
    group: experts' gradients are averaged with those of other experts (deepspeedai/DeepSpeed#3521)
    balance: the balancing loss counts a rank's own tokens (arXiv 2501.11873)
    own_norm: the norm leaves out the experts of other ranks (deepspeedai/DeepSpeed#5259)
    """
    model, fault = Model(mlp=Experts), run.fault
    parts = cut(model, {"mlp.up": 0, "mlp.down": 0})
    enter, leave = collective(gathered, scattered, dim=0), collective(scattered, gathered, dim=0)
    for layer in model.layers.values():
        layer.enter_mlp, layer.leave_mlp = enter, leave
        layer.mlp.first = rank() * len(layer.mlp.up)
        if fault != "balance":
            layer.mlp.counted = lambda share: total(share) / world()  # of the tokens of all ranks

    def loss_of(step):
        inputs, targets = (each[rank() :: world()] for each in pairs(step, 12))
        loss = mean_loss(model(inputs), targets) + 0.1 * sum(each.mlp.balance for each in model.layers.values())
        loss.backward()
        return total(loss.detach()) / world()

    def after():
        sum_gradients(model, lambda name: name not in parts or fault == "group", world())
        for name in parts if fault not in ("times", "group") else ():
            model.get_parameter(name).grad /= world()  # it has the sum over the tokens of all ranks
        return clipped(model, parts, fault)

    return train(run, model, loss_of, after, parts=parts.get)


TRAINERS = {each.__name__: each for each in (tp, sp, cp, pp, ep)}
