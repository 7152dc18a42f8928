"""Trainers that divide samples over replicas, by hand or by DistributedDataParallel: what is summed when, losses, starts,
data, sharded optimizers, and the published faults of such code. Each fault is one line, beside the right one.

    python -m same_numbers.trainers replicas one/                                           # the trusted run
    torchrun --nproc_per_node 2 -m same_numbers.trainers replicas many/ --fault hook
    python -m same_numbers one/ many/
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from same_numbers.trainers_base import (
    VOCAB, WIDTH, Fault, Mlp, Model, Run, adam, clip, collective, gathered, mean_loss, own, rank, same, scattered,
    tokens, total, train, world)

MICRO_BATCHES = 12  # of two samples, over all ranks
MEAN = "whose mean is right: are some summands never averaged"
FAULTS = {
    "ddp": {
        "flag": Fault("no_sync()'s flag is set after forward, which has read it", "karpathy/build-nanogpt#30", "all",
                      MEAN)},
    "replicas": {
        "hook": Fault("a hook averages the last micro-batch's gradient, not the sum", "huggingface/picotron#39", "all",
                      MEAN),
        "stale": Fault("the last bucket is read before its all-reduce has ended", "arXiv 2506.09280", "embedding", MEAN),
        "undivided": Fault("the loss is not divided by the number of micro-batches", "huggingface/trl#2617", "all",
                           "times too large = the number of.*micro-batches"),
        "sum": Fault("a sum over replicas where the mean is meant", "NovaSky-AI/SkyRL#1420", "all",
                     "times too large = the number of.*(replicas|ranks)"),
        "seeds": Fault("each rank draws its own start", "pytorch/torchtitan#166", "start", "seed"),
        "samples": Fault("the loader does not ask for its rank", "k2-fsa/icefall#1616", "samples", "does the loader ask"),
        "rate": Fault("the scheduler moves on once for each rank", "huggingface/accelerate#963", "changed",
                      "learning rate was.*scheduler"),
        "recompute": Fault("recomputing draws another dropout mask", "allenai/OLMo-core#828", "",
                           "loss is right: look at backward")},
    "padded": {
        "own_count": Fault("each rank divides by its own number of targets", "huggingface/transformers#34242", "all",
                           "count .* times.*padding|tokens"),
        "averaged": Fault("divided by the targets of all ranks, and averaged, too", "huggingface/transformers#37474",
                          "all", "times too small = the number of.*(replicas|ranks)")},
    "contrastive": {
        "own_samples": Fault("in-batch negatives are a rank's own", "huggingface/sentence-transformers#3415", "",
                             "loss is wrong|samples"),
        "no_grad": Fault("other ranks' vectors come without a gradient", "NVIDIA-NeMo/Automodel#2283", "",
                         "loss is right: look at backward")},
    "sharded": {
        "early": Fault("the optimizer was made before the weights were replaced", "huggingface/accelerate#3256",
                       "changed", "the optimizer does not hold"),
        "shard": Fault("the last owner's weights are not sent to the others", "arXiv 2506.09280", "changed",
                       "drift|never|unlike"),
        "own_norm": Fault("each rank clips by the norm of its own shards", "pytorch/xla#4796", "", "its own")},
    "muon": {
        "rows": Fault("each rank orthogonalises its own rows", "MoonshotAI/Moonlight#27", "changed",
                      "whole|matrices|Muon|not as they should")},
    "resumed": {
        "moments": Fault("the optimizer's moments are lost", "KempnerInstitute/KempnerForge#114", "changed", "moments"),
        "data": Fault("the data begin anew", "KempnerInstitute/KempnerForge#51", "samples",
                      "does a resumed run begin its data anew")},
    "local": {
        "sign": Fault("the outer step goes back instead of on", "pytorch/torchtitan#1507", "changed", "sign")},
}


def batches(step: int, fault: str = "") -> list[tuple]:
    """(number, inputs, targets) of this rank's micro-batches."""
    first = 0 if fault == "samples" else rank()
    both = [(i, tokens(step * MICRO_BATCHES + i, 2)) for i in range(first, MICRO_BATCHES, world())]
    return [(i, each[:, :-1], each[:, 1:]) for i, each in both]


def average(model, fault="") -> None:
    for param in model.parameters():
        param.grad = total(param.grad) / (1 if fault == "sum" else world())


def accumulate(model, fault="", before=lambda i, is_last: None):
    """A step's loss, after forward and backward of this rank's micro-batches."""
    def loss_of(step):
        found, whole = batches(step, fault), 0.0
        for i, inputs, targets in found:
            before(i, is_last := i + world() >= MICRO_BATCHES)
            out = model(inputs)
            if fault == "flag":
                model.require_backward_grad_sync = is_last
            loss = mean_loss(out, targets) / (1 if fault == "undivided" else len(found))
            loss.backward()
            whole += loss.detach() / (len(found) if fault == "undivided" else 1)
        return total(whole) / world()
    return loss_of


def ddp(run: Run):
    """DistributedDataParallel. Its forward reads the flag that no_sync() sets."""
    model = Model(1)
    if world() == 1:
        return train(run, model, accumulate(model))
    model = nn.parallel.DistributedDataParallel(model)

    def before(i, is_last):
        if run.fault != "flag":
            model.require_backward_grad_sync = is_last

    return train(run, model, accumulate(model, run.fault, before))


class Dropped(nn.Module):
    """Recomputes in backward, with dropout whose mask belongs to the micro-batch."""

    def __init__(self, mlp, fault):
        super().__init__()
        self.up, self.down, self.fault, self.seed = mlp.up, mlp.down, fault, 0

    def run(self, x):
        return self.down(F.gelu(self.up(x)) * torch.empty_like(x.repeat(1, 1, 2)).bernoulli_(0.9))

    def forward(self, x, enter, leave):
        torch.manual_seed(self.seed)
        return checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=self.fault != "recompute")


def replicas(run: Run):
    """All ranks hold all weights. Gradients are averaged once, when the last micro-batch's have been added."""
    fault = run.fault
    model = Model(1, seed=rank() if fault == "seeds" else 0)
    dropped = model.layers["0"].mlp = Dropped(model.layers["0"].mlp, fault)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    is_last = False

    def before(i, last):
        nonlocal is_last
        dropped.seed, is_last = i, last

    if fault == "hook" and world() > 1:
        for param in model.parameters():
            param.register_hook(lambda grad: total(grad) / world() if is_last else grad)

    def after():
        own_grad = model.embedding.weight.grad
        if fault != "hook":
            average(model, fault)
        if fault == "stale":
            model.embedding.weight.grad = own_grad

    def update():
        optimizer.step()
        for _ in range(world() if fault == "rate" else 1):
            scheduler.step()

    return train(run, model, accumulate(model, fault, before), after, optimizer=optimizer, update=update)


def padded(run: Run):
    """Samples of unlike lengths. The mean is over the targets of all ranks' micro-batches, so ranks add summands."""
    model, fault = Model(1), run.fault

    def loss_of(step):
        found, whole = [], 0.0
        for i, inputs, targets in batches(step):
            lengths = 2 + (5 * i + 3 * torch.arange(2)) % 11
            found.append((inputs, targets.where(torch.arange(targets.shape[1]) < lengths[:, None], -100)))
        mine = sum((targets != -100).sum() for _, targets in found)
        count = mine * world() if fault == "own_count" else total(mine)
        for inputs, targets in found:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count
            loss.backward()
            whole += loss.detach()
        return total(whole)

    def after():
        for param in model.parameters():
            param.grad = total(param.grad) / (world() if fault == "averaged" else 1)

    return train(run, model, loss_of, after)


def contrastive(run: Run):
    """Pairs of vectors, from the two halves of a sample. Each one's partner has to be found among those of all ranks."""
    model, fault = Model(1), run.fault
    model.head = nn.Identity()

    def loss_of(step):
        both = own(tokens(step, 12), dim=0)
        queries, keys = (F.normalize(model(half).mean(1), dim=-1) for half in both[:, :12].chunk(2, 1))
        partners = torch.arange(len(queries))
        if fault != "own_samples":
            keys = collective(gathered, own if fault == "no_grad" else scattered, dim=0)(keys)
            partners += rank() * len(queries)
        loss = F.cross_entropy(queries @ keys.T * 10, partners)
        loss.backward()
        return total(loss.detach()) / world()

    return train(run, model, loss_of, lambda: average(model))


def sharded(run: Run):
    """ZeRO 1: each rank updates some of the weights, and sends them to the others."""
    model, fault = Model(1), run.fault
    early = [*model.parameters()] if fault == "early" else []
    if world() > 1:
        for module in [*model.modules()]:  # as an engine does that puts weights into one buffer
            for name, param in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(param.detach().clone()))
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": (early or params)[rank() :: world()]}], lr=1e-2)

    def after():
        average(model)
        squares = sum(param.grad.square().sum() for param in params[rank() :: world()])
        norm = (squares if fault == "own_norm" else total(squares)).sqrt()
        clip([param.grad for param in params], norm)
        return norm

    def update():
        optimizer.step()
        for i, param in enumerate(params if world() > 1 else ()):
            if fault != "shard" or i % world() < world() - 1:
                dist.broadcast(param.data, i % world())

    return train(run, model, accumulate(model), after, optimizer=optimizer, update=update)


def orthogonal(x):
    """Newton and Schulz's iteration, for a matrix whose singular values shall all be near 1."""
    x = x / x.norm()
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x


def muon(run: Run):
    """Ranks have rows of each matrix's momentum. Muon needs the whole matrix."""
    model = Model(1)
    matrices = {name: torch.zeros_like(own(param.data, 0)) for name, param in model.layers.named_parameters()
                if param.ndim == 2}

    def update():
        for name, momentum in matrices.items():
            param = model.layers.get_parameter(name)
            momentum.mul_(0.95).add_(own(param.grad, 0))
            rows = orthogonal(momentum) if run.fault == "rows" else own(orthogonal(gathered(momentum, dim=0)), 0)
            param.data -= 0.02 * gathered(rows, dim=0)

    return train(run, model, accumulate(model), lambda: average(model), update=update)


def resumed(run: Run):
    """Goes on from a checkpoint after the first step."""
    model = Model(1)
    optimizer = adam(model)
    one = train(run, model, accumulate(model), lambda: average(model), optimizer=optimizer, steps=[0])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = Model(1, seed=1)
    optimizer = adam(model)
    model.load_state_dict(saved[0])
    if run.fault != "moments":
        optimizer.load_state_dict(saved[1])
    steps = range(0 if run.fault == "data" else 1, run.steps)
    return one + train(run, model, accumulate(model), lambda: average(model), optimizer=optimizer, first_step=2,
                       steps=steps)


def local(run: Run):
    """DiLoCo, of one inner step: each rank goes on by itself, and an outer optimizer follows the mean of the ways."""
    model = Model(1)
    start = [param.detach().clone() for param in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)

    def update():
        inner.step()
        for old, param in zip(start, model.parameters()):
            way = total(param.detach() - old) / world()
            old.grad = way if run.fault == "sign" else -way
        outer.step()
        for old, param in zip(start, model.parameters()):
            param.data.copy_(old)

    return train(run, model, accumulate(model), optimizer=inner, update=update,
                 gradient=lambda param: param.grad / world())


TRAINERS = {each.__name__: each for each in (
    ddp, replicas, padded, contrastive, sharded, muon, resumed, local)}
