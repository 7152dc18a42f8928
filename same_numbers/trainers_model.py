"""Trainers that divide a model over ranks, by hand: tensor, sequence, context, pipeline and expert parallelism, and the
published faults of such code. Each fault is one line, beside the right one.

    python -m same_numbers.trainers tp one/                                                 # the trusted run
    torchrun --nproc_per_node 2 -m same_numbers.trainers tp many/ --fault head_norms
    python -m same_numbers one/ many/
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from same_numbers.trainers_base import (
    LENGTH, VOCAB, WIDTH, Collective, Experts, Fault, Mlp, Model, Run, clip, collective, cut, gathered, mean_loss, own,
    rank, same, scattered, tokens, total, train, world)

MICRO_BATCHES = 3  # of two samples, on each rank
SUM = "whose sum is right.*(tp|sequence|heads|part)"
FAULTS = {
    "tp": {
        "head_norms": Fault("gradients of norms inside heads are not summed", "NVIDIA-NeMo/RL#3716", "[qk]_norm", SUM),
        "gathered": Fault("a vocabulary-parallel loss is given whole logits: log tp too large",
                          "NVIDIA/Megatron-LM#7452", "", "loss is wrong|log"),
        "mask": Fault("the mask of a vocabulary-parallel embedding ends a token early", "arXiv 2506.09280", "embedding",
                      "forward|embedding|loss is wrong"),
        "bias": Fault("each rank adds the bias before the sum", "awslabs/slapo#10", "", "loss is wrong|forward|bias"),
        "bias_mean": Fault("each rank adds a tp-th of the bias, so its gradient is a tp-th",
                           "pytorch/torchtitan#4332", "bias", "times too small"),
        "f": Fault("backward of a column-parallel layer's input is not summed", "pytorch/torchtitan#1805", "norm|embed",
                   "sum over tp|part|backward"),
        "g": Fault("backward of a row-parallel layer's output is summed, too", "tenstorrent/tt-metal#31748", "",
                   "times too large|one sum too many"),
        "counted": Fault("the norm counts what all ranks hold once for each", "NVIDIA-NeMo/RL#3788", "norm",
                         "counted once for each"),
        "own_norm": Fault("each rank clips by the norm of its own part", "pytorch/torchtitan#596", "", "its own")},
    "sp": {
        "norms": Fault("gradients of norms, which see a rank's own tokens, are not summed", "NVIDIA/Megatron-LM#1446",
                       "norm", SUM),
        "router": Fault("nor are those of the router", "pytorch/torchtitan#4054", "router", SUM)},
    "cp": {
        "labels": Fault("labels are shifted after the cut", "NVIDIA-BioNeMo/bionemo-recipes#1449", "",
                        "loss is wrong.*targets"),
        "positions": Fault("each rank counts its positions from 0", "NVIDIA/Megatron-LM#5243", "",
                           "loss is wrong.*positions"),
        "scale": Fault("the means of ranks are added", "NVIDIA/Megatron-LM#906", "", "times too large.*ranks"),
        "ring": Fault("backward keeps the gradients of keys and values that other ranks have used",
                      "huggingface/diffusers#14265", "", "loss is right: look at backward")},
    "pp": {
        "twice": Fault("two stages have the layer between them", "arXiv 2506.09280", "layers", "twice|two|loss is wrong"),
        "never": Fault("no stage has the last layer", "NVIDIA/Megatron-LM#1304", "layers", "absent|no rank|never"),
        "tied": Fault("gradients of a tied weight are not summed between first and last stage",
                      "NVIDIA/Megatron-LM#844", "embedding", "tied"),
        "scale": Fault("gradients are not divided by the number of micro-batches", "pytorch/torchtitan#2972", "",
                       "micro-batches"),
        "own_norm": Fault("each stage clips by the norm of its own gradients", "pytorch/torchtitan#596", "", "its own")},
    "ep": {
        "times": Fault("experts' gradients are ep times too large", "pytorch/pytorch#160285", "mlp",
                       "times too large.*ranks"),
        "group": Fault("experts' gradients are averaged with those of other experts", "deepspeedai/DeepSpeed#6546",
                       "mlp", "group|other|mixed|part"),
        "balance": Fault("the balancing loss counts a rank's own tokens", "arXiv 2501.11873", "router|norm|all",
                         "loss is wrong|own"),
        "own_norm": Fault("the norm leaves out the experts of other ranks", "NVIDIA/Megatron-LM#2263", "norm|all",
                      "its own")},
}


def batch(step: int, i: int) -> tuple:
    both = tokens(step * MICRO_BATCHES + i, 2)
    return both[:, :-1], both[:, 1:]


def accumulate(model, loss_of=mean_loss):
    """Of the plain loop: a step's loss, after forward and backward of its micro-batches."""
    def run(step):
        losses = [loss_of(model(inputs), targets) / MICRO_BATCHES
                  for inputs, targets in (batch(step, i) for i in range(MICRO_BATCHES))]
        sum(losses).backward()
        return sum(losses).detach()
    return run


def clipped(model, parts, fault="") -> torch.Tensor:
    """Clips by the norm of all gradients. What all ranks hold counts once."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    counts = {name: 1 if name in parts or fault in ("counted", "own_norm") else world() for name in grads}
    squares = sum(grad.square().sum() / counts[name] for name, grad in grads.items())
    norm = (squares if fault == "own_norm" else total(squares)).sqrt()
    clip(grads.values(), norm)
    return norm


class VocabParallel(torch.nn.Module):
    """A rank has some rows of the embedding, and others add the vectors of their tokens."""

    def __init__(self, whole, fault):
        super().__init__()
        self.weight, self.fault, self.sum = whole.weight, fault, collective(total, same)

    def forward(self, ids):
        local, rows = ids - rank() * len(self.weight), len(self.weight)
        if self.fault == "mask":
            rows -= world() > 1
        is_mine = (local >= 0) & (local < rows)
        return self.sum(F.embedding(local * is_mine, self.weight) * is_mine[..., None])


def vocab_parallel_loss(logits, targets):
    """logits: (B, T, V/tp)."""
    logits = logits - total(logits.detach().amax(-1, keepdim=True), dist.ReduceOp.MAX)
    sums = collective(total, same)(logits.exp().sum(-1))
    local = targets - rank() * logits.shape[-1]
    is_mine = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, (local * is_mine)[..., None])[..., 0] * is_mine
    return (sums.log() - collective(total, same)(picked)).mean()


def bias_on_each_rank(fault):
    def add_bias(leave, x, linear):
        return leave(F.linear(x, linear.weight, linear.bias if fault == "bias" else linear.bias / world()))
    return add_bias


def tp(run: Run):
    """Heads, the MLP's hidden numbers and the vocabulary are divided. f precedes each divided layer, g follows it."""
    model, fault = Model(), run.fault
    parts = cut(model, {"[qkv].weight": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1,
                        "embedding.weight": 0, "head.weight": 0})
    model.embedding = VocabParallel(model.embedding, fault)

    f = collective(same, same if fault == "f" else total)
    g = collective(total, total if fault == "g" else same)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = f, g, f, g
        if fault in ("bias", "bias_mean"):
            layer.mlp.add_bias = bias_on_each_rank(fault)
    head = model.head.forward
    model.head.forward = lambda x: head(f(x))
    if fault == "gathered":
        model.head.forward = lambda x: collective(gathered, own, dim=2)(head(f(x)))

    def after():
        for name, param in model.named_parameters():
            if ("q_norm" in name or "k_norm" in name) and fault != "head_norms":
                param.grad = total(param.grad)  # each rank has used them for its own heads
        return clipped(model, parts, fault)

    return train(run, model, accumulate(model, vocab_parallel_loss), after, parts=parts.get)


def sp(run: Run):
    """Tensor parallelism with sequence parallelism, and experts: between the divided layers, a rank has some tokens."""
    model = Model(mlp=Experts)
    parts = cut(model, {"[qkv].weight": 0, "up": 2, "out.weight": 1, "down": 1})
    enter, leave = collective(gathered, scattered), collective(scattered, gathered)
    for layer in model.layers.values():
        layer.enter, layer.leave, layer.enter_mlp, layer.leave_mlp = enter, leave, enter, leave
    embedding, norm = model.embedding.forward, model.norm.forward
    model.embedding.forward = lambda x: collective(own, gathered)(embedding(x))
    model.norm.forward = lambda x: collective(gathered, own)(norm(x))

    def after():
        for name, param in model.named_parameters():
            if "norm" in name and run.fault != "norms" or "router" in name and run.fault != "router":
                param.grad = total(param.grad)
            elif "out.bias" in name:
                param.grad = total(param.grad)  # added to a rank's own tokens

    return train(run, model, accumulate(model), after, parts=parts.get)


def cp(run: Run):
    """Each rank has some tokens of each sample. Queries are its own, keys and values come from all."""
    model, fault, own_part = Model(), run.fault, LENGTH // world()
    model.first = 0 if fault == "positions" else rank() * own_part
    for layer in model.layers.values():
        layer.around = collective(gathered, own if fault == "ring" else scattered, dim=2)

    def loss_of(step):
        whole = 0.0
        for i in range(MICRO_BATCHES):
            inputs, targets = map(own, batch(step, i))
            if fault == "labels" and world() > 1:
                targets = inputs.roll(-1, dims=1)
            loss = mean_loss(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
            whole += loss.detach()
        return total(whole) / world()

    def after():
        for param in model.parameters():
            param.grad = total(param.grad) / (1 if fault == "scale" else world())

    return train(run, model, loss_of, after)


def stage(fault: str) -> set[str]:
    """The layers of this stage. The first one has the embedding, too, and the last one the head."""
    units = ["embedding", "0", "1", "head"]
    mine = {*units[rank() * 4 // world() : (rank() + 1) * 4 // world()]}
    if fault == "twice" and rank() < 2:
        mine.add("0")
    return mine - {"1"} if fault == "never" else mine


def pp(run: Run):
    """A stage receives what the one before sends; all forwards, then all backwards. The head is the embedding, tied."""
    model, fault = Model(), run.fault
    mine, is_first, is_last = stage(fault), rank() == 0, rank() == world() - 1
    model.head.weight = model.embedding.weight
    for name in "01":
        if name not in mine:
            model.layers.pop(name)
    if not is_first:
        model.embedding = None
    if not is_last:
        model.norm = model.head = None

    def loss_of(step):
        outs, whole = [], 0.0
        for i in range(MICRO_BATCHES):
            inputs, targets = batch(step, i)
            if not is_first:
                inputs = torch.empty(*inputs.shape, WIDTH, requires_grad=True)
                dist.recv(inputs.data, rank() - 1)
            out = model(inputs)
            if is_last:
                out = mean_loss(out, targets) / (1 if fault == "scale" else MICRO_BATCHES)
                whole += out.detach() / (MICRO_BATCHES if fault == "scale" else 1)
            else:
                dist.send(out.detach(), rank() + 1)
            outs.append((inputs, out))
        for inputs, out in outs:
            grad = None
            if not is_last:
                grad = torch.empty_like(out)
                dist.recv(grad, rank() + 1)
            out.backward(grad)
            if not is_first:
                dist.send(inputs.grad, rank() - 1)
        return whole if is_last else None

    def after():
        if world() > 1 and (is_first or is_last) and fault != "tied":
            tied = model.embedding.weight if is_first else model.head.weight
            other = torch.empty_like(tied)
            for sends in (is_first, is_last):  # one after the other
                dist.send(tied.grad, world() - 1 - rank()) if sends else dist.recv(other, world() - 1 - rank())
            tied.grad += other
        squares = sum(param.grad.square().sum() for name, param in model.named_parameters()
                      if is_last or world() == 1 or name != "embedding.weight")
        norm = (squares if fault == "own_norm" else total(squares)).sqrt()
        clip([param.grad for param in model.parameters()], norm)
        return norm

    return train(run, model, loss_of, after)


def ep(run: Run):
    """Each rank has some of the experts and some of the samples. Tokens travel to their experts and back."""
    model, fault = Model(mlp=Experts), run.fault
    parts = cut(model, {"mlp.up": 0, "mlp.down": 0})
    for layer in model.layers.values():
        layer.enter_mlp, layer.leave_mlp = collective(gathered, scattered, dim=0), collective(scattered, gathered, dim=0)
        layer.mlp.first = rank() * len(layer.mlp.up)
        if fault != "balance":
            layer.mlp.counted = lambda share: total(share) / world()  # of the tokens of all ranks

    def loss_of(step):
        both = tokens(step, 12)[rank() :: world()]
        loss = mean_loss(model(both[:, :-1]), both[:, 1:])
        loss = loss + 0.1 * sum(layer.mlp.balance for layer in model.layers.values())
        loss.backward()
        return total(loss.detach()) / world()

    def after():
        for name, param in model.named_parameters():
            if name not in parts or fault == "group":
                param.grad = total(param.grad) / world()
            elif fault != "times":
                param.grad /= world()  # it has the sum over the tokens of all ranks
        return clipped(model, parts, fault)

    return train(run, model, loss_of, after, parts=parts.get)


TRAINERS = {each.__name__: each for each in (tp, sp, cp, pp, ep)}
