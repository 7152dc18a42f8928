"""Trainers that divide a model over ranks, by hand. trainers.py starts them, tools/museum has faults of such code."""

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


def clipped(model, parts):
    """Clips by the norm of all gradients, in which what all ranks hold whole counts once."""
    squares = sum(param.grad.square().sum() / (1 if name in parts else world())
                  for name, param in model.named_parameters())
    return clip(model.parameters(), total(squares))


def own_tokens():
    """Recorder's tokens."""
    return own(torch.arange(LENGTH), 0).tolist(), LENGTH


def embed(weight, ids):
    """A rank has some rows of the embedding. Others add the vectors of their tokens."""
    local = ids - rank() * len(weight)
    is_mine = (local >= 0) & (local < len(weight))
    return collective(total, same)(F.embedding(local * is_mine, weight) * is_mine[..., None])


def vocab_parallel_loss(logits, targets):
    """logits: (B, T, V/tp)."""
    logits = logits - total(logits.detach().amax(-1, keepdim=True), dist.ReduceOp.MAX)
    local, add = targets - rank() * logits.shape[-1], collective(total, same)
    is_mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, (local * is_mine)[..., None])[..., 0] * is_mine
    return (add(logits.exp().sum(-1)).log() - add(picked)).mean()


def tp(run: Run):
    """Heads, the MLP's hidden numbers and the vocabulary are divided. f precedes each divided layer, g follows it."""
    model = Model()
    parts = cut(model, {"[qkv].weight": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1,
                        "embedding.weight": 0, "head.weight": 0})
    head, model.embedding.forward = model.head.forward, lambda ids: embed(model.embedding.weight, ids)
    f, g = collective(same, total), collective(total, same)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = f, g, f, g
    model.head.forward = lambda x: head(f(x))

    def after():  # each rank has used the norms inside heads for its own heads
        sum_gradients(model, lambda name: "q_norm" in name or "k_norm" in name)
        return clipped(model, parts)

    return train(run, model, accumulate(model, vocab_parallel_loss), after, parts=parts.get)


def sp(run: Run):
    """Tensor and sequence parallelism, with experts: between divided layers, a rank has some tokens. Gradients of what
    sees a rank's own tokens are summed."""
    model = Model(mlp=Experts)
    parts = cut(model, {"[qkv].weight": 0, "up": 2, "out.weight": 1, "down": 1})
    enter, leave = collective(gathered, scattered), collective(scattered, gathered)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = enter, leave, enter, leave
    embedding, norm = model.embedding.forward, model.norm.forward
    model.embedding.forward = lambda x: collective(own, gathered)(embedding(x))
    model.norm.forward = lambda x: collective(gathered, own)(norm(x))

    def sees_own_tokens(name):
        return any(each in name for each in ("norm", "router", "out.bias"))

    return train(run, model, accumulate(model), lambda: sum_gradients(model, sees_own_tokens), parts=parts.get,
                 tokens=own_tokens())


def cp(run: Run):
    """Each rank has some tokens of each sample. Queries are its own, keys and values come from all."""
    model = Model(first=rank() * LENGTH // world())
    for layer in model.layers.values():
        layer.around = collective(gathered, scattered, dim=2)

    def part(inputs, targets):
        return own(inputs), own(targets)

    return train(run, model, accumulate(model, part=part), lambda: sum_gradients(model, divisor=world()),
                 tokens=own_tokens())


def pp(run: Run):
    """torch.distributed.pipelining, of the four parts below; the head's weight is the embedding's."""
    model, is_first, is_last = Model(), rank() == 0, rank() == world() - 1
    mine = {*["embedding", "0", "1", "head"][rank() * 4 // world() : (rank() + 1) * 4 // world()]}
    model.head.weight = model.embedding.weight
    [model.layers.pop(name) for name in "01" if name not in mine]
    model.embedding = model.embedding if is_first else None
    model.norm, model.head = (model.norm, model.head) if is_last else (None, None)
    if world() > 1:
        schedule = ScheduleGPipe(PipelineStage(model, rank(), world(), torch.device("cpu")), MICRO_BATCHES, mean_loss)

    def loss_of(step):
        inputs, targets = map(torch.cat, zip(*[pairs(step * MICRO_BATCHES + i, 2) for i in range(MICRO_BATCHES)]))
        losses = []
        schedule.step(*[inputs] * is_first, **dict(target=targets, losses=losses) if is_last else {})
        return sum(losses).detach() / MICRO_BATCHES if is_last else None

    def after():
        tied = [module.weight for module in (model.embedding, model.head) if module is not None]
        if world() > 1:
            both = total(tied[0].grad if tied else torch.zeros(VOCAB, WIDTH))
            if tied:
                tied[0].grad = both
        squares = sum((param.grad.square().sum() for param in model.parameters()
                       if is_last or not any(param is each for each in tied)), torch.zeros(()))
        return clip(model.parameters(), total(squares))

    return train(run, model, loss_of if world() > 1 else accumulate(model), after)


def ep(run: Run):
    """Each rank has some of the experts and some of the samples. Tokens travel to their experts and back."""
    model = Model(mlp=Experts)
    parts = cut(model, {"mlp.up": 0, "mlp.down": 0})
    enter, leave = collective(gathered, scattered, dim=0), collective(scattered, gathered, dim=0)
    for layer in model.layers.values():
        layer.enter_mlp, layer.leave_mlp = enter, leave
        layer.mlp.first = rank() * len(layer.mlp.up)
        layer.mlp.counted = lambda share: total(share) / world()  # of the tokens of all ranks

    def loss_of(step):
        inputs, targets = (each[rank() :: world()] for each in pairs(step, 12))
        loss = mean_loss(model(inputs), targets) + 0.1 * sum(each.mlp.balance for each in model.layers.values())
        loss.backward()
        return total(loss.detach()) / world()

    def after():
        sum_gradients(model, lambda name: name not in parts)  # an expert has the sum over the tokens of all ranks
        for param in model.parameters():
            param.grad /= world()
        return clipped(model, parts)

    return train(run, model, loss_of, after, parts=parts.get)


TRAINERS = {each.__name__: each for each in (tp, sp, cp, pp, ep)}
