"""Step 14: tokens divided between the blocks (sequence parallelism)."""

import torch

from catalogue import exercise


def hidden_states(rank: int, tokens: int) -> torch.Tensor:
    """(2, tokens, 3): thousands say the sample, tens the token, and a power of ten the rank."""
    sample, token, width = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (2, tokens, 3)),
                                          indexing="ij")
    return (1000 * sample + 10 * token + width + 1) * 10.0 ** (5 * rank)


@exercise("14", "sequence_parallel.gather_tokens", hints=(
    "all_gather wants one flat tensor, in which each rank's tokens are one piece: (tp, B, T/tp, D), contiguous.",
    "parts = x.new_empty(tp, *x.shape); parts[tp_rank] = x; then gather parts.flatten(), which is a view, and wait.",
    "parts is (tp, B, T/tp, D), and (B, T, D) is needed: the ranks come behind the samples, before flattening the two "
    "dims of tokens."))
def gather_tokens(attempt):
    """Gather the tokens of all tp ranks, in the order of ranks.

    Rank r of tp ranks has x (B, T/tp, D): of each of B samples, the r-th part of the tokens. All ranks need (B, T, D).
    A sample's tokens come from all ranks, but a rank's message contains tokens of all samples:

        rank 0 has   s0: t0 t1      rank 1 has   s0: t2 t3        both need   s0: t0 t1 t2 t3
                     s1: t0 t1                   s1: t2 t3                    s1: t0 t1 t2 t3

    You may call all_gather(full, sizes, group), which returns a handle: `full` is a flat tensor of sum(sizes) numbers
    that contains this rank's sizes[r] numbers at their place, and after the handle's wait() those of all ranks. Use one
    message to each rank. `grid = pgm.process_group_manager` has tp_rank, tp_world_size and tp_group.
    """
    for size in (2, 3, 4):
        def program(modules, rank):
            attempt.grid(modules, tp=size)
            return modules.sequence_parallel.gather_tokens(hidden_states(0, 2 * size)[:, 2 * rank : 2 * rank + 2])

        got, world = attempt.run(size, program)
        for rank in range(size):
            attempt.same(got[rank], hidden_states(0, 2 * size), f"the tokens of all {size} ranks, as (sample, token, "
                         "number)", rank)
    # Each of the 4 ranks has to receive the 3/4 of the tokens that it does not have.
    attempt.score("bytes that a rank sends, of 384 bytes of hidden states on 4 ranks",
                  max(world.num_bytes(rank) for rank in range(4)), 3 / 4 * 384)


@exercise("14", "sequence_parallel.scatter_tokens", hints=(
    "Bring x into the shape (tp, B, T/tp, D): then parts[i] is what rank i needs. unflatten(1, (tp, -1)) and "
        "transpose.",
    "A transposed tensor is not flat in memory: call contiguous() before flatten(), so that shard i is parts[i].",
    "After handle.wait(), add up the summands and give the sum the shape of parts[0]."))
def scatter_tokens(attempt):
    """Sum hidden states over the tp ranks, so that each rank gets its own tokens only.

    Each of tp ranks has a summand x (B, T, D) of all tokens. Rank r needs the sum over the ranks of the r-th part of
    each sample's tokens, (B, T/tp, D). It is the other half of an all-reduce, and the backward of gather_tokens:

        rank 0   s0: a0 a1 a2 a3      rank 1   s0: b0 b1 b2 b3       rank 0 needs   s0: a0+b0  a1+b1
                 s1: a4 a5 a6 a7               s1: b4 b5 b6 b7                      s1: a4+b4  a5+b5

    You may call reduce_scatter(full, sizes, group), which returns a handle and a list of tensors: `full` is a flat
    tensor that consists of one shard for each rank, of sizes[i] numbers for rank i. After the handle's wait(), the
    tensors in the list are the summands of this rank's shard. `grid = pgm.process_group_manager` has tp_rank,
    tp_world_size and tp_group.
    """
    for size in (2, 3, 4):
        def program(modules, rank):
            attempt.grid(modules, tp=size)
            return modules.sequence_parallel.scatter_tokens(hidden_states(rank % 2, 2 * size))

        total = sum(hidden_states(rank % 2, 2 * size) for rank in range(size))
        got, world = attempt.run(size, program)
        for rank in range(size):
            attempt.same(got[rank], total[:, 2 * rank : 2 * rank + 2], f"the sums of its tokens over {size} ranks, as "
                         "(sample, token, number)", rank)
    # The summands of the 3/4 of the tokens that are others' have to leave each rank.
    attempt.score("bytes that a rank sends, of 384 bytes of hidden states on 4 ranks",
                  max(world.num_bytes(rank) for rank in range(4)), 3 / 4 * 384)


@exercise("14", "sequence_parallel.sum_norm_gradients", hints=(
    "The norms' weights are the parameters with param.dim() == 1, and model.gradient(param) is what has to be summed.",
    "One message: torch.cat the gradients, call all_reduce, and split the sum into pieces of the same sizes.",
    "Write each piece back with gradient.copy_(piece): the optimizer reads the memory of these very tensors."))
def norm_gradients(attempt):
    """Sum over the tp ranks those gradients to which each rank has summands of its own tokens only.

    The weights of the norms are on every tp rank, whole, but a rank has seen the r-th part of the tokens. So each holds
    a part of their gradient, where all need the sum:

        rank 0   gradient of its tokens    [2, 0, 1]  \\
                                                       >   both need [3, 4, 1]
        rank 1   gradient of its tokens    [1, 4, 0]  /

    The model has two or more such vectors a layer, and its other parameters are matrices, whose gradients are complete.
    Change the gradients in place, with as few messages as you can.

    model.module.parameters() are the parameters. model.gradient(param) is the tensor that this rank holds of a gradient
    and that the optimizer reads: all of it, or with ZeRO a flat piece of it, which may be empty. all_reduce(tensor)
    sums a tensor over the tp ranks, in place, and the tensor has to be contiguous.
    """
    common = " --num_hidden_layers 2 --max_tokens 128 --max_grad_norm 0 --gradient_accumulation_steps "
    one = attempt.train(1, common + "4", ours=True)
    for size, flags in ((2, "--tp_size 2"), (4, "--tp_size 2 --dp_size 2 --zero 1")):
        flags += " --sequence_parallel"
        accumulation = common + str(8 // size)
        got = attempt.train(size, flags + accumulation)
        norms = [name for name in one.gradients[0][0] if "norm" in name]
        for rank in range(size if "--zero" not in flags else 0):
            for name in norms:
                attempt.same(got.gradients[rank][0][name], one.gradients[0][0][name], f"{flags}: the gradient of "
                    f"{name}, "
                             "compared with one process", rank)
        for step in range(2):
            attempt.same(got.rows[step]["grad_norm"], one.rows[step]["grad_norm"],
                         f"{flags}: the gradient norm of step {step + 1}, compared with one process")
        if "--zero" not in flags:
            ours = attempt.train(size, flags + accumulation, ours=True)
            sent = [sum(event.kind != "receive" for event in run.world.events) for run in (got, ours)]
            attempt.score("messages a step for the norms of 2 layers", 1 + (sent[0] - sent[1]) / (2 * size), 1)
