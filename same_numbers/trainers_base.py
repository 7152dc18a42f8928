"""What the trainers of trainers_model.py and trainers_data.py share: a small transformer, collectives, and the loop.

Each trainer runs in one process, where collectives do nothing, and on 2, 3 or 4 ranks. B: samples of a micro-batch, T:
tokens, D: width, H: heads, E: experts, V: vocabulary.
"""

import functools
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import same_numbers

VOCAB, WIDTH, HEAD, LENGTH, EXPERTS = 48, 24, 2, 12, 12


class Run(NamedTuple):
    fault: str  # "" is the right version
    folder: pathlib.Path
    steps: int = 3


def faults(trainer: Callable) -> dict[str, tuple[str, str]]:
    """name -> (what is wrong, where it was published), of a trainer's docstring."""
    return {name: (words, source) for name, words, source in
            re.findall(r"^(\w+): (.+) \((\S+#\d+|arXiv \S+)\)$", inspect.getdoc(trainer), re.M)}


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def same(x):
    return x


def total(x, op=dist.ReduceOp.SUM):
    """The sum over ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    if world() > 1:
        dist.all_reduce(x, op)
    return x


def own(x, dim=1):
    """This rank's part along a dimension."""
    return x.chunk(world(), dim)[rank()]


def gathered(x, dim=1):
    """The parts of all ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world())]
    if world() > 1:
        dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim) if world() > 1 else x


def scattered(x, dim=1):
    """This rank's part of the sum: a reduce-scatter."""
    return own(total(x), dim)


class Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def collective(there: Callable, back: Callable, **dim) -> Callable:
    """One of the functions above in forward, and the one that belongs to it in backward."""
    there, back = (functools.partial(each, **dim if each not in (same, total) else {}) for each in (there, back))
    return lambda x: Collective.apply(x, there, back)


def row_parallel(leave, x, linear):
    """What ranks add up has the bias once."""
    return linear(x) if leave is same else leave(F.linear(x, linear.weight)) + linear.bias


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.row_parallel = row_parallel

    def forward(self, x, enter, leave):
        return self.row_parallel(leave, F.gelu(self.up(enter(x))), self.down)


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers. `balance` is the loss that spreads them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 5) for _ in range(2))
        self.first, self.counted, self.balance = 0, same, 0.0

    def forward(self, x, enter, leave):
        probabilities = self.router(x).softmax(-1)  # (B, T, E), of this rank's own tokens
        weight, choice = probabilities.max(-1)
        chosen = F.one_hot(choice, EXPERTS).to(x)
        self.balance = EXPERTS * (self.counted(chosen.mean((0, 1))) * probabilities.mean((0, 1))).sum()
        x, chosen = enter(x), enter(chosen)[..., self.first : self.first + len(self.up)]
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up)) * chosen[..., None]
        return leave(torch.einsum("bteh,ehd->btd", hidden, self.down)) * weight[..., None]


class Block(nn.Module):
    """What ranks divide they enter and leave by a pair of collectives; `around` fetches keys and values."""

    def __init__(self, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), mlp()
        self.enter = self.leave = self.enter_mlp = self.leave_mlp = self.around = same

    def forward(self, x, positions):
        h = self.enter(self.norm1(x))
        q, k, v = (each(h).unflatten(-1, (-1, HEAD)).transpose(1, 2)  # (B, H, T, HEAD)
                   for each in (self.q, self.k, self.v))
        q, k, v = self.q_norm(q), self.around(self.k_norm(k)), self.around(v)
        distance = positions[:, None] - torch.arange(k.shape[2])
        scores = (q @ k.transpose(2, 3) - 0.1 * distance).masked_fill(distance < 0, -torch.inf).softmax(-1)  # ALiBi
        x = x + row_parallel(self.leave, (scores @ v).transpose(1, 2).flatten(2), self.out)
        return x + self.mlp(self.norm2(x), self.enter_mlp, self.leave_mlp)


class Model(nn.Module):
    """`first` is the position of its first token. A part is None where another stage of a pipeline has it."""

    def __init__(self, layers=2, mlp=Mlp, seed=0, first=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.first = nn.Embedding(VOCAB, WIDTH), first
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleDict({str(i): Block(mlp) for i in range(layers)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        positions = self.first + torch.arange(x.shape[1])
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, positions)
        return x if self.head is None else self.head(self.norm(x))


def cut(model, dims: dict[str, int]) -> dict[str, tuple]:
    """Leaves this rank its part, along a dimension, of each parameter whose name ends so. Returns Recorder's parts."""
    parts = {}
    for name, param in model.named_parameters():
        for dim in [dim for end, dim in dims.items() if re.search(f"{end}$", name)]:
            parts[name] = name, {dim: (rank() * param.shape[dim] // world(), param.shape[dim])}
            param.data = own(param.data, dim).clone()
    return parts


def pairs(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), both (samples, T). A model can learn three of four tokens from the one before."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (samples, LENGTH + 1), generator=generator)
    follows = torch.randint(4, tokens.shape, generator=generator) > 0
    for i in range(LENGTH):
        tokens[:, i + 1] = torch.where(follows[:, i + 1], (5 * tokens[:, i] + 1) % VOCAB, tokens[:, i + 1])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adam(model):
    """With a group for DTensors."""
    groups = [[], []]
    for param in model.parameters():
        groups[hasattr(param, "placements")].append(param)
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)


def sum_gradients(model, of: Callable = lambda name: True, divisor: float = 1) -> None:
    for name, param in model.named_parameters():
        if of(name):
            param.grad = total(param.grad) / divisor


def clip(params, squares):
    """By half, which is less than any norm here. Returns the norm."""
    norm = squares.sqrt()
    for param in params:
        param.grad.mul_(0.5 / (norm + 1e-6))
    return norm


def train(run: Run, model, loss_of: Callable, after: Callable = lambda: None, *, optimizer=None, steps=None,
          update: Callable | None = None, **options) -> list[float | None]:
    """loss_of(step) goes forward and backward and returns the step's loss. after() completes the gradients and returns
    their norm, if it has clipped. Returns the losses."""
    optimizer, losses = optimizer or adam(model), []
    recorder = same_numbers.Recorder(model, optimizer, run.folder, modules="blocks", **options)
    for step in steps or range(run.steps):
        model.zero_grad()
        loss = loss_of(step)
        recorder.step(norm=after(), loss=loss)
        (update or optimizer.step)()
        losses.append(None if loss is None else float(loss))
    return losses
