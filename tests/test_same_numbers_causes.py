"""same_numbers: faults whose causes follow from what a recording knows of ranks: counts, stages, meshes, layers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from museum.checks import verdict
from museum.trainers import record
from same_numbers.trainers_base import (
    Experts, Model, Run, adam, clip, mean_loss, pairs, rank, sum_gradients, total, train, world,
)
from same_numbers.trainers_data import accumulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Held(list):
    def zero_grad(self):
        [module.zero_grad() for module in self]


def stages(run: Run):
    """Two stages on each rank, of four, and four micro-batches: the Recorder has a list of modules."""
    model, ranks = Model(layers=4), world()
    torch.manual_seed(0)
    if ranks == 1:
        return train(run, model, microbatches_of(model, run.fault))
    names = [("embedding", "0"), ("1",), ("2",), ("3", "head")]
    held = Held(Model(layers=4) for _ in (0, 1))
    for module, mine in zip(held, names[rank() :: 2]):
        [module.layers.pop(name) for name in "0123" if name not in mine]
        module.embedding = module.embedding if "embedding" in mine else None
        module.norm, module.head = (module.norm, module.head) if "head" in mine else (None, None)
    optimizer = torch.optim.AdamW([param for module in held for param in module.parameters()], lr=1e-2)

    def loss_of(step):
        losses = []
        for i in range(4):
            inputs, targets = pairs(step * 4 + i, 2)
            x, seen = inputs, []
            for stage in range(4):  # hand over to the other rank after each stage
                if stage % 2 == rank():
                    seen.append((x if x is inputs else x.requires_grad_(), held[stage // 2](x)))
                    x = seen[-1][1].detach().clone()
                x = x if x is not inputs else torch.zeros(2, 12, 24)
                dist.broadcast(x, stage % 2) if stage < 3 else None
            grad = torch.zeros(2, 12, 24)
            for stage in reversed(range(4)):
                if stage % 2 == rank():
                    x, out = seen.pop()
                    if stage == 3:
                        losses.append(mean_loss(out, targets) / (1 if run.fault else 4))
                        losses[-1].backward()
                    else:
                        out.backward(grad)
                    grad = x.grad.clone() if stage else grad
                dist.broadcast(grad, stage % 2) if stage else None
        return sum(losses).detach() / (4 if run.fault else 1) if losses else None

    return train(run, held, loss_of, optimizer=optimizer)


def microbatches_of(model, fault):
    def loss_of(step):
        losses = []
        for i in range(4):
            inputs, targets = pairs(step * 4 + i, 2)
            losses.append(mean_loss(model(inputs), targets) / 4)
            losses[-1].backward()
        return sum(losses).detach()
    return loss_of


def counts(run: Run):
    """Ranks with 5 and 11 samples. The mean over samples is meant, `mean` is that over ranks."""
    model = Model(1)

    def loss_of(step):
        inputs, targets = pairs(step, 16)
        mine = slice(None) if world() == 1 else slice(0, 5) if rank() == 0 else slice(5, 16)
        loss = mean_loss(model(inputs[mine]), targets[mine])
        share = 1 / world() if run.fault else len(inputs[mine]) / 16
        (loss * share).backward()
        return total(loss.detach() * share)

    return train(run, model, loss_of, lambda: sum_gradients(model))


def batchnorm(run: Run):
    """BatchNorm, of all samples or, `own`, of a rank's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(48, 24), nn.Flatten(), nn.Linear(288, 24), nn.BatchNorm1d(24), nn.Linear(24, 48))

    def loss_of(step):
        inputs, targets = pairs(step, 8)
        mine = slice(None) if not run.fault else slice(rank(), None, world())
        loss = F.cross_entropy(model(inputs[mine]), targets[mine, 0])
        loss.backward()
        return total(loss.detach()) / world()

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world()))


def experts(run: Run):
    """The norm that leaves all experts out."""
    model = Model(mlp=Experts)

    def after():
        sum_gradients(model, divisor=world())
        return clip(model.parameters(), sum(param.grad.square().sum() for name, param in model.named_parameters()
                                            if not run.fault or not name.endswith(("mlp.up", "mlp.down"))))

    return train(run, model, accumulate(model), after)


def mesh(run: Run):
    """FSDP2 over the two rows of a 2 x 2 mesh, whose columns share the MLPs. `sum`: the sum over dp, not the mean."""
    model, which = Model(), {}
    if world() > 1:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        which = {"replica": grid["dp"].get_local_rank(), "replicas": 2}
        parallelize_module(model, grid["tp"], {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()})
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=grid["dp"])
            module.set_gradient_divide_factor(1.0) if run.fault else None
    return train(run, model, accumulate(model, **which))


class Twice(nn.Module):
    """A model that calls itself through its wrapper, as Lightning's do: a forward in a forward is one micro-batch."""

    def __init__(self, model):
        super().__init__()
        self.model, self.wrapper = model, [self]

    def forward(self, x, again=True):
        return self.wrapper[0](x, False) if again else self.model(x[0])


def nested(run: Run):
    """Token ids in a list, a forward in a forward, and `undivided`: a loss that is not divided by 6 micro-batches."""
    model = Model(1)
    outer = Twice(model) if world() > 1 else model
    which = {"replica": 0} if run.fault == "samples" else {}
    losses = accumulate(lambda x: outer([x]) if world() > 1 else model(x), **which)
    divisor = world() / 6 if run.fault == "undivided" else world()
    return train(run, outer, losses, lambda: sum_gradients(model, divisor=divisor), optimizer=adam(model))


def untied(run: Run):
    """FSDP2 on meta weights, which unties what was tied."""
    model = Model(1)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone()) if run.fault else model.embedding.weight
    return train(run, model, accumulate(model), lambda: sum_gradients(model, divisor=world()))


CASES = {  # trainer, fault, ranks: words
    (stages, "undivided", 2): "4 times too large = the number of micro-batches: is the loss divided",
    (counts, "mean", 2): "ranks read 5, 11 samples: is the mean over ranks taken where the mean over samples is meant?",
    (batchnorm, "own", 2): "each rank normalises by its own samples",
    (experts, "norm", 2): "it fits where what is of layers.*.mlp.up and layers.*.mlp.down is left out",
    (mesh, "sum", 4): "2 times too large = the number of ranks along dp",
    (nested, "undivided", 2): "6 times too large = the number of micro-batches",
    (nested, "samples", 2): "samples: 12 of 24 are read by nobody",
    (untied, "lost", 2): "embedding.weight is tied in one run, and two parameters in the other",
}


def found(folder, trainer, fault: str, ranks: int) -> str:
    """The first line on a trainer's fault, where nothing is said of the right one."""
    record(1, [(trainer, folder / "one")], 1)
    record(ranks, [(trainer, folder / "right"),
                   (lambda run: trainer(run._replace(fault=fault)), folder / "wrong")], 1)
    assert not verdict(folder / "one", folder / "right").alarm
    said = verdict(folder / "one", folder / "wrong")
    return said.alarm and said.saw.partition("\n")[0]


@pytest.mark.parametrize("trainer, fault, ranks", CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_what_a_recording_knows_names_the_cause(trainer, fault, ranks, tmp_path):
    assert CASES[trainer, fault, ranks] in found(tmp_path, trainer, fault, ranks)


def silent(run: Run):
    """A loss that one rank has lost: it shows 0, the other one the whole."""
    model = Model(1)
    losses = accumulate(model)

    def loss_of(step):
        loss = losses(step)
        return loss * 0 if run.fault and rank() == 1 else loss

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world()))


def test_a_loss_of_zero_is_one_unless_the_rank_has_no_last_stage(tmp_path):
    line = found(tmp_path, silent, "lost", 2)
    assert "loss, of gradients that are right" in line and "2 times too small = the number of" in line


def shown(run: Run):
    """modules= by name, a zigzag of tokens: each of two ranks has a first and a last quarter."""
    model = Model()
    numbers = torch.arange(12) if world() == 1 else torch.cat([torch.arange(12).chunk(4)[i] for i in (rank(), 3 - rank())])
    model.layers = nn.ModuleDict({"0": nn.Linear(24, 24), "1": nn.Linear(24, 24)})
    model.forward = lambda x: model.head(model.norm(model.layers["1"](model.layers["0"](model.embedding(x)).tanh())))
    if run.fault == "forward" and rank() == 1:
        model.layers["1"].register_forward_hook(lambda module, args, output: output + 0.1)
    if run.fault == "backward" and rank() == 1:
        model.layers["0"].register_forward_hook(lambda module, args, output: output.register_hook(
            lambda grad: grad.flip(1)) and None)

    def loss_of(step):
        inputs, targets = (each[:, numbers] for each in pairs(step, 6))
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        return total(loss.detach()) / world()

    return train(run, model, loss_of, lambda: sum_gradients(model, divisor=world()), tokens=(numbers.tolist(), 12))


@pytest.mark.parametrize("fault, words", [
    ("forward", "first wrong in forward: the output of layers.1, of all 6 samples, by 0."),
    ("backward", "forward is right everywhere, the gradient is first wrong at the output of layers.0, of all 6 samples")])
def test_outputs_of_tokens_that_ranks_divide_show_where(fault, words, tmp_path):
    assert words in found(tmp_path, shown, fault, 2)
