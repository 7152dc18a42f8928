"""Trainers that divide samples over replicas. trainers.py starts them, tools/museum has faults of such code."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from same_numbers.trainers_base import (
    Model, Run, adam, clip, collective, gathered, mean_loss, own, pairs, rank, scattered, sum_gradients, total, train,
    world)

MICRO_BATCHES = 12  # of two samples, over all ranks


def batches(step: int, replica: int | None = None, replicas: int | None = None) -> list[tuple]:
    """(number, inputs, targets) of this rank's micro-batches."""
    first, by = (rank() if replica is None else replica), replicas or world()
    return [(i, *pairs(step * MICRO_BATCHES + i, 2)) for i in range(first, MICRO_BATCHES, by)]


def accumulate(model, before=lambda i, is_last: None, **which):
    """loss_of() of train(): before(i, is_last) precedes a micro-batch."""
    def loss_of(step):
        found, losses = batches(step, **which), []
        for i, inputs, targets in found:
            before(i, i == found[-1][0])
            losses.append(mean_loss(model(inputs), targets) / len(found))
            losses[-1].backward()
        return total(sum(losses).detach()) / world()
    return loss_of


def ddp(run: Run):
    """DistributedDataParallel. Its forward reads the flag that no_sync() sets."""
    model = Model(1)
    if world() == 1:
        return train(run, model, accumulate(model))
    model = nn.parallel.DistributedDataParallel(model)

    def set_flag(i, is_last):
        model.require_backward_grad_sync = is_last

    return train(run, model, accumulate(model, set_flag))


def recompute(mlp):
    """Makes an MLP have dropout, and compute its forward again in backward."""
    def run(x):
        x = F.gelu(mlp.up(x))
        return mlp.down(x * torch.empty_like(x).bernoulli_(0.9))

    mlp.forward = lambda x, *collectives: checkpoint(run, x, use_reentrant=False)


def replicas(run: Run):
    """All ranks hold all weights. Gradients are averaged once, when the last micro-batch's have been added."""
    model = Model(1)
    optimizer = adam(model)
    recompute(model.layers["0"].mlp)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)

    def before(i, is_last):
        torch.manual_seed(i)  # each micro-batch has its own dropout

    def after():
        sum_gradients(model, divisor=world())

    def update():
        optimizer.step()
        scheduler.step()

    return train(run, model, accumulate(model, before), after, optimizer=optimizer, update=update)


def padded(run: Run):
    """Samples of unlike lengths. The mean is over the targets of all ranks, so these add summands."""
    model = Model(1)

    def loss_of(step):
        found, losses = [], []
        for i, inputs, targets in batches(step):
            lengths = 2 + (5 * i + 3 * torch.arange(2)) % 11
            found.append((inputs, targets.where(torch.arange(targets.shape[1]) < lengths[:, None], -100)))
        mine = sum((targets != -100).sum() for _, targets in found)
        count = total(mine)
        for inputs, targets in found:
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count)
            losses[-1].backward()
        return total(sum(losses).detach())

    return train(run, model, loss_of, lambda: sum_gradients(model))


def contrastive(run: Run):
    """Pairs of vectors, of a sample's two halves. Each has to find its partner among those of all ranks."""
    model = Model(1)
    model.head = nn.Identity()

    def loss_of(step):
        sample = own(pairs(step, 12)[0], dim=0)
        queries, keys = (F.normalize(model(half).mean(1), dim=-1) for half in sample.chunk(2, 1))
        keys = collective(gathered, scattered, dim=0)(keys)
        partners = rank() * len(queries) + torch.arange(len(queries))
        loss = F.cross_entropy(queries @ keys.T * 10, partners)
        loss.backward()
        return total(loss.detach()) / world()

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world()))


def sharded(run: Run):
    """ZeRO 1: each rank updates some of the weights, and sends them to the others."""
    model = Model(1)
    params = [*model.parameters()]
    mine = params[rank() :: world()]
    optimizer = torch.optim.AdamW(mine, lr=1e-2)

    def after():
        sum_gradients(model, divisor=world())
        return clip(params, total(sum(param.grad.square().sum() for param in mine)))

    def update():
        optimizer.step()
        for i, param in enumerate(params if world() > 1 else ()):
            dist.broadcast(param.data, i % world())

    return train(run, model, accumulate(model), after, optimizer=optimizer, update=update)


def orthogonal(x):
    """Newton and Schulz's iteration, which brings all singular values of a matrix near 1."""
    x = x / x.norm()
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x


def muon(run: Run):
    """Ranks have rows of each matrix's momentum. Muon needs the whole matrix."""
    model = Model(1)
    momenta = {param: torch.zeros_like(own(param.data, 0)) for param in model.layers.parameters() if param.ndim == 2}

    def update():
        for param, momentum in momenta.items():
            momentum.mul_(0.95).add_(own(param.grad, 0))
            rows = own(orthogonal(gathered(momentum, dim=0)), 0)
            param.data -= 0.02 * gathered(rows, dim=0)

    return train(run, model, accumulate(model), lambda: sum_gradients(model, divisor=world()), update=update)


def resumed(run: Run):
    """Goes on from a checkpoint after the first step. One process is never stopped."""
    def go_on(model, optimizer, steps, first_step):
        return train(run, model, accumulate(model), lambda: sum_gradients(model, divisor=world()),
                     optimizer=optimizer, steps=steps, first_step=first_step)

    model, again = Model(1), Model(1, seed=1)
    optimizer, new = adam(model), adam(again)
    if world() == 1:
        return go_on(model, optimizer, range(run.steps), 1)
    losses = go_on(model, optimizer, [0], 1)
    again.load_state_dict(model.state_dict())
    new.load_state_dict(optimizer.state_dict())
    return losses + go_on(again, new, range(1, run.steps), 2)


def local(run: Run):
    """DiLoCo, of one inner step: each rank goes on by itself, and an outer optimizer follows the mean of the ways."""
    model = Model(1)
    start = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def update():
        inner.step()
        for old, param in zip(start.parameters(), model.parameters()):
            old.grad = total(old.detach() - param.detach()) / world()
        outer.step()
        model.load_state_dict(start.state_dict())

    return train(run, model, accumulate(model), optimizer=inner, update=update,
                 gradient=lambda param: param.grad / world())


TRAINERS = {each.__name__: each for each in (ddp, replicas, padded, contrastive, sharded, muon, resumed, local)}
