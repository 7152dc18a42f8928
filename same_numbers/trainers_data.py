"""Trainers that divide samples over replicas, and published faults of such code, each a line beside the right one.
trainers.py starts them."""

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


def accumulate(model, fault="", before=lambda i, is_last: None, after=lambda is_last: None, **which):
    """loss_of() of train(): before(i, is_last) precedes a micro-batch, after(is_last) follows its forward."""
    def loss_of(step):
        found, losses = batches(step, *[0] * (fault == "samples"), **which), []
        for i, inputs, targets in found:
            is_last = i == found[-1][0]
            before(i, is_last)
            losses.append(mean_loss(model(inputs), targets))
            after(is_last)
            (losses[-1] if fault == "undivided" else losses[-1] / len(found)).backward()
        return total(sum(losses).detach()) / len(found) / world()
    return loss_of


def ddp(run: Run):
    """DistributedDataParallel. Its forward reads the flag that no_sync() sets.

    flag: the flag is set after forward, which has read it (karpathy/build-nanogpt#30)
    """
    model = Model(1)
    if world() == 1:
        return train(run, model, accumulate(model))
    model = nn.parallel.DistributedDataParallel(model)

    def set_flag(*args):
        model.require_backward_grad_sync = args[-1]

    return train(run, model, accumulate(model, **{"after" if run.fault == "flag" else "before": set_flag}))


def recompute(mlp, fault):
    """Makes an MLP have dropout, and compute its forward again in backward."""
    def run(x):
        x = F.gelu(mlp.up(x))
        return mlp.down(x * torch.empty_like(x).bernoulli_(0.9))

    mlp.forward = lambda x, *collectives: checkpoint(
        run, x, use_reentrant=False, preserve_rng_state=fault != "recompute")


def replicas(run: Run):
    """All ranks hold all weights. Gradients are averaged once, when the last micro-batch's have been added.

    hook: a hook averages the last micro-batch's gradient, not the sum (huggingface/picotron#39)
    stale: the last bucket is read before its all-reduce has ended (arXiv 2506.09280)
    undivided: the loss is not divided by the number of micro-batches (huggingface/trl#2617)
    sum: a sum over replicas where the mean is meant (NovaSky-AI/SkyRL#1420)
    seeds: each rank draws its own start (pytorch/torchtitan#166)
    samples: the loader does not ask for its rank (k2-fsa/icefall#1616)
    rate: the scheduler moves on once for each rank (huggingface/accelerate#963)
    recompute: recomputing draws another dropout mask (allenai/OLMo-core#828)
    """
    fault = run.fault
    model = Model(1, seed=rank() if fault == "seeds" else 0)
    optimizer, is_last_one = adam(model), False
    recompute(model.layers["0"].mlp, fault)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)

    def before(i, is_last):
        nonlocal is_last_one
        is_last_one = is_last
        torch.manual_seed(i)  # each micro-batch has its own dropout

    for param in model.parameters() if fault == "hook" else ():
        param.register_hook(lambda grad: total(grad) / world() if is_last_one else grad)

    def after():
        if fault != "hook":
            sum_gradients(model, lambda name: not (fault == "stale" and name == "embedding.weight"),
                          1 if fault == "sum" else world())

    def update():
        optimizer.step()
        for _ in range(world() if fault == "rate" else 1):
            scheduler.step()

    return train(run, model, accumulate(model, fault, before), after, optimizer=optimizer, update=update)


def padded(run: Run):
    """Samples of unlike lengths. The mean is over the targets of all ranks, so these add summands.

    own_count: each rank divides by its own number of targets (huggingface/transformers#34242)
    averaged: divided by the targets of all ranks, and averaged, too (huggingface/transformers#37474)
    """
    model, fault = Model(1), run.fault

    def loss_of(step):
        found, losses = [], []
        for i, inputs, targets in batches(step):
            lengths = 2 + (5 * i + 3 * torch.arange(2)) % 11
            found.append((inputs, targets.where(torch.arange(targets.shape[1]) < lengths[:, None], -100)))
        mine = sum((targets != -100).sum() for _, targets in found)
        count = mine * world() if fault == "own_count" else total(mine)
        for inputs, targets in found:
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count)
            losses[-1].backward()
        return total(sum(losses).detach())

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world() if fault == "averaged" else 1))


def contrastive(run: Run):
    """Pairs of vectors, of a sample's two halves. Each has to find its partner among those of all ranks.

    own_samples: in-batch negatives are a rank's own (huggingface/sentence-transformers#3415)
    no_grad: other ranks' vectors come without a gradient (NVIDIA-NeMo/Automodel#2283)
    """
    model, fault = Model(1), run.fault
    model.head = nn.Identity()

    def loss_of(step):
        sample = own(pairs(step, 12)[0], dim=0)
        queries, keys = (F.normalize(model(half).mean(1), dim=-1) for half in sample.chunk(2, 1))
        partners = torch.arange(len(queries))
        if fault != "own_samples":
            keys = collective(gathered, own if fault == "no_grad" else scattered, dim=0)(keys)
            partners += rank() * len(queries)
        loss = F.cross_entropy(queries @ keys.T * 10, partners)
        loss.backward()
        return total(loss.detach()) / world()

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world()))


def sharded(run: Run):
    """ZeRO 1: each rank updates some of the weights, and sends them to the others.

    early: the optimizer was made before the weights were replaced (huggingface/accelerate#3256)
    shard: the last rank's shard is not sent to the others (arXiv 2506.09280)
    own_norm: each rank clips by the norm of its own shard (pytorch/xla#4796)
    """
    model, fault = Model(1), run.fault
    early, model = model, copy.deepcopy(model)  # as an engine replaces weights
    params = [*model.parameters()]
    mine = params[rank() :: world()]
    optimizer = torch.optim.AdamW([*(early if fault == "early" else model).parameters()][rank() :: world()], lr=1e-2)

    def after():
        sum_gradients(model, divisor=world())
        squares = sum(param.grad.square().sum() for param in mine)
        return clip(params, squares if fault == "own_norm" else total(squares))

    def update():
        optimizer.step()
        for i, param in enumerate(params if world() > 1 else ()):
            if fault != "shard" or i % world() < world() - 1:
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
    """Ranks have rows of each matrix's momentum. Muon needs the whole matrix.

    rows: each rank orthogonalises its own rows (MoonshotAI/Moonlight#27)
    """
    model = Model(1)
    momenta = {param: torch.zeros_like(own(param.data, 0)) for param in model.layers.parameters() if param.ndim == 2}

    def update():
        for param, momentum in momenta.items():
            momentum.mul_(0.95).add_(own(param.grad, 0))
            rows = orthogonal(momentum) if run.fault == "rows" else own(orthogonal(gathered(momentum, dim=0)), 0)
            param.data -= 0.02 * gathered(rows, dim=0)

    return train(run, model, accumulate(model), lambda: sum_gradients(model, divisor=world()), update=update)


def resumed(run: Run):
    """Goes on from a checkpoint after the first step. One process is never stopped.

    moments: the optimizer's moments are lost (KempnerInstitute/KempnerForge#114)
    data: the data begin anew (KempnerInstitute/KempnerForge#51)
    """
    def go_on(model, optimizer, steps, first_step):
        return train(run, model, accumulate(model), lambda: sum_gradients(model, divisor=world()),
                     optimizer=optimizer, steps=steps, first_step=first_step)

    model, again = Model(1), Model(1, seed=1)
    optimizer, new = adam(model), adam(again)
    if world() == 1:
        return go_on(model, optimizer, range(run.steps), 1)
    losses = go_on(model, optimizer, [0], 1)
    again.load_state_dict(model.state_dict())
    if run.fault != "moments":
        new.load_state_dict(optimizer.state_dict())
    return losses + go_on(again, new, range(0 if run.fault == "data" else 1, run.steps), 2)


def local(run: Run):
    """DiLoCo, of one inner step: each rank goes on by itself, and an outer optimizer follows the mean of the ways.

    sign: the outer step goes back instead of on (pytorch/torchtitan#1507)
    """
    model = Model(1)
    start = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def update():
        inner.step()
        for old, param in zip(start.parameters(), model.parameters()):
            way = total(param.detach() - old.detach()) / world()
            old.grad = way if run.fault == "sign" else -way
        outer.step()
        model.load_state_dict(start.state_dict())

    return train(run, model, accumulate(model), optimizer=inner, update=update,
                 gradient=lambda param: param.grad / world())


TRAINERS = {each.__name__: each for each in (ddp, replicas, padded, contrastive, sharded, muon, resumed, local)}
