"""Step 12: gradients, averages and updates divided over the replicas (ZeRO)."""

import contextlib
import copy
import json
import pathlib
import tempfile

import torch

from catalogue import exercise
from lab.launch import ROOT


def numbers(rank: int, count: int) -> torch.Tensor:
    """1, 2, 3, ... times 10^rank: the digits of a sum show whose summands are in it."""
    return torch.arange(1.0, count + 1, dtype=torch.float64) * 10**rank


@exercise("12", "zero.reduce_scatter", hints=(
    "full.split(sizes) gives the shards, as views. Rank r keeps its own part r, and sends part i to rank i.",
    "Exchange wants one tensor for each rank: sent[i] is part i, and received[i] is a new tensor of the size of your "
    "own part.",
    "What belongs into the list of summands are the n - 1 received tensors and your own part of `full`. Nothing is "
    "added here: they are not there yet."), wrong=[
    ("its own part is forgotten", "received[rank + 1 :] + received[: rank + 1]",
     "received[rank + 1 :] + received[:rank]", "the sum of its shard"),
    ("all ranks send the same part", "Exchange(parts, received, group)",
     "Exchange([parts[rank]] * len(parts), received, group)", "the sum of its shard"),
    ("what is received has the size of the sender's part", "[torch.empty_like(parts[rank]) for _ in sizes]",
     "[torch.empty_like(part) for part in parts]", "numbers of torch.float64 to rank")])
def reduce_scatter(attempt):
    """Let shard r of a flat tensor be summed on rank r, with messages only.

    Each of n ranks has a flat tensor `full` of N numbers, here a bucket's gradients. It consists of n shards, and
    `sizes` says how many numbers each has. Rank r needs the sum of shard r over all ranks, and nothing else:

        sizes = [2, 1]     rank 0   | a0 a1 | a2 |     ->    rank 0   a0 + b0, a1 + b1
                           rank 1   | b0 b1 | b2 |           rank 1   a2 + b2

    Return two things: a handle, whose wait() is called later, while backward computes; and a list of tensors of
    sizes[r] numbers, which are there after that wait() and whose sum is the result. The caller adds them up.

    You may call Exchange(sent, received, group): sent[i] goes to rank i, and received[i] is filled by what comes from
    it; what stands at this rank's own place is not touched. The Exchange is a handle. group.rank() and group.size()
    are this rank and n. NCCL's own reduce-scatter needs no place in your version.
    """
    for sizes in ([3, 3], [4, 1, 2], [3, 3, 3, 3]):
        def program(modules, rank):
            group = attempt.grid(modules, dp=len(sizes)).dp_group
            handle, summands = modules.zero.reduce_scatter(numbers(rank, sum(sizes)), [*sizes], group)
            handle.wait()
            attempt.require(isinstance(summands, (list, tuple)), f"rank {rank}: the summands have to be a list of "
                            f"tensors, and they are {type(summands).__name__}")
            return sum(summands)

        totals = sum(numbers(rank, sum(sizes)) for rank in range(len(sizes))).split(sizes)
        got, world = attempt.run(len(sizes), program)
        for rank, total in enumerate(totals):
            attempt.same(got[rank], total, f"the sum of its shard, with shards of {sizes} numbers", rank)
    # Of each shard that a rank does not own, its summand has to leave it, in a message of the shard's size at least.
    most = max(world.num_bytes(rank) for rank in range(4))
    attempt.score("bytes that a rank sends, of a tensor of 96 bytes on 4 ranks", most, 3 / 4 * 96)


@exercise("12", "zero.ShardedBucket.__init__", hints=(
    "torch.cat of the flattened weights gives the buffer. Then each param.data becomes a view of its part of it.",
    "Shard r ends at the number len(weights) * (shares of the ranks up to r) // (all shares): from one such bound to "
    "the next is sizes[r].",
    "The shard is nn.Parameter(a part of self.weights.split(self.sizes)). A copy would be updated, too, but the "
    "weights would not."), blank=("self.weights = ", "for param, part", "bounds = ", "self.sizes = ", "self.shard = "),
    wrong=[
    ("the shard is a copy", "self.weights.split(self.sizes)[group.rank()])",
     "self.weights.split(self.sizes)[group.rank()].clone())", "weights after 4 steps"),
    ("the parameters stay where they were", "param.data = part.view_as(param)", "part.view_as(param)",
     "weights after 4 steps"),
    ("equal shares", "len(self.weights) * sum(shares[:rank]) // sum(shares)", "len(self.weights) * rank // len(shares)",
     "where the shares [4, 2, 1] mean")])
def sharded_adamw(attempt):
    """Give each rank a shard of the weights, which AdamW updates instead of them.

    A bucket has the parameters `params` (a list). `shares` has a positive number for each rank of `group`: with 4, 2, 1
    rank 0 owns four sevenths of the bucket's numbers, up to rounding. A shard begins and ends anywhere:

        params         |  bias  |          weight            |
        self.weights   |  .  .  |  .  .  .  .  .  .  .  .  . |     one flat tensor, which the parameters are views of
        shards         |  rank 0                | 1     | 2  |     of self.sizes[0], self.sizes[1], ... numbers

    Set three attributes. self.weights: this flat tensor, in the order of `params`, with the values that they have now.
    self.sizes: a list of the number of numbers in each rank's shard. self.shard: an nn.Parameter, this rank's shard.
    The optimizer gets self.shard as its parameter, and self.wait() gives it a gradient. After the optimizer's step,
    all_gather(self.weights, self.sizes, group) sends the shards around. The model computes with the parameters.

    group.rank() is this rank. A parameter takes its values from another tensor with param.data = ....
    """
    template = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    samples = torch.randn(4, 3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for shares in ([1, 1], [4, 2, 1]):  # samples are (step, rank, samples, width)
        def program(modules, rank):
            attempt.grid(modules, dp=len(shares))
            model = modules.zero.Zero(copy.deepcopy(template), 1, [*shares])
            optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
            for step in samples:
                model.zero_grad()
                model(step[rank]).square().mean().backward()
                model.finish_gradient_sync()
                optimizer.step()
                model.gather_weights()
            weights = {name: param.detach().clone() for name, param in model.module.named_parameters()}
            return weights, [bucket.shard.numel() for bucket in model.buckets]

        alone = copy.deepcopy(template)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for step in samples:
            optimizer.zero_grad()
            alone(step[: len(shares)]).square().mean().backward()
            optimizer.step()
        got, _ = attempt.run(len(shares), program)
        for rank, (weights, _) in enumerate(got):
            attempt.same(weights, {name: param.detach() for name, param in alone.named_parameters()},
                         f"weights after 4 steps, compared with one process (shares {shares})", rank)
        for sizes in zip(*(shards for _, shards in got)):  # of a bucket, by rank
            ideal = [sum(sizes) * share / sum(shares) for share in shares]
            attempt.require(all(abs(size - want) <= len(shares) for size, want in zip(sizes, ideal)),
                            f"shards of {[*sizes]} numbers, where the shares {shares} mean "
                            f"{[round(want, 1) for want in ideal]}, up to rounding")


@contextlib.contextmanager
def float64_by_default():
    """The norm of an empty list has torch's default dtype, and ranks must not sum numbers of unlike ones."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@exercise("12", "zero.Zero.clip_grad_norm", hints=(
    "Go through self.module.named_parameters(): self.gradient(param) is what this rank owns of its gradient.",
    "Two kinds must not be counted twice: on the tp ranks, what is whole on each; on the stages, a tied embedding.",
    "A module's tp_dims names the parameters that tensor parallelism splits. All others count if grid.tp_rank == 0. "
    "embedding.weight counts if grid.pp_is_first_stage."), blank=("split = ", "for name, param"), wrong=[
    ("the norms' weights count on each tp rank", "(grid.tp_rank == 0 or param in split)", "True",
     "--tp_size 2 --zero 1: the gradient norm"),
    ("only tp rank 0 counts", "(grid.tp_rank == 0 or param in split)", "grid.tp_rank == 0",
     "--tp_size 2 --zero 1: the gradient norm"),
    ("copies", "with tied embeddings: the gradient norm")])
def norm_over_shards(attempt):
    """Choose what each rank counts in the norm of gradients that are divided.

    The norm of all gradients is the root of the sum of all squares, each counted once. Each rank appends tensors to the
    list `norms`; the lines after yours sum the squares of all numbers in it, and then over all ranks. Of a parameter,

        dp ranks   own different numbers, which self.gradient(param) returns: flat, and often none
        tp ranks   hold different parts of some parameters, and the same whole of all others: RMSNorm's weights
        stages     hold different layers. But a tied embedding is on the first and on the last stage, under the name
                   "embedding.weight", with the same gradient on both

    self.module.named_parameters() yields the full names and the parameters, self.module.modules() the modules. Where
    parameters are split, their module has a dictionary `tp_dims`. Its keys are the names of these parameters within the
    module, such as "weight": getattr(module, "weight") is the parameter. `grid` has tp_rank and pp_is_first_stage,
    which is true where there is no pipeline.
    """
    config = json.loads(pathlib.Path(ROOT, "assets", "tiny_llama", "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder, float64_by_default():
        pathlib.Path(folder, "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        tied = f" --model_name {folder}"
        for size, flags, extra in ((2, "--dp_size 2 --zero_shares 3,1", ""), (4, "--dp_size 2 --tp_size 2", ""),
                                   (4, "--dp_size 2 --pp_size 2", tied)):
            common = f" --max_tokens 128 --num_hidden_layers 2{extra} --gradient_accumulation_steps "
            one = attempt.train(1, common + "4", ours=True)
            got = attempt.train(size, f"{flags} --zero 1{common}2")
            which = f"{flags} --zero 1" + " with tied embeddings" * bool(extra)
            for step in range(2):
                attempt.same(got.rows[step]["grad_norm"], one.rows[step]["grad_norm"],
                             f"{which}: the gradient norm of step {step + 1}, compared with one process", None)
