"""Step 2: ranks, groups and the first collectives."""

import torch

from catalogue import exercise


@exercise("2", "references:references.ring_all_reduce", hints=(
    "Cut the tensor into n parts with chunk: they are views, so changing one changes the tensor.",
    "Round k of the first n - 1: rank r sends part r - k to the rank after it, and adds what it receives to part "
    "r - k - 1. Afterwards rank r has the whole sum of part r + 1.",
    "The second n - 1 rounds send the finished parts around in the same way, and copy instead of adding."))
def ring_all_reduce(attempt):
    """Sum a tensor over all ranks with messages to the next rank only.

    Each of n ranks has a tensor of N numbers. Afterwards each has the sum of all of them, in the same tensor. The ranks
    form a ring: rank r sends to rank r + 1, and the last one to rank 0.

        part of N/n numbers:   0    1    2                     after n - 1 rounds, each rank has one finished sum,
            rank 0            a0   a1   a2    --> rank 1       and after n - 1 further ones all of them
            rank 1            b0   b1   b2    --> rank 2
            rank 2            c0   c1   c2    --> rank 0

    You may call dist.isend(tensor, rank), dist.recv(tensor, rank), dist.get_rank() and dist.get_world_size(). A send is
    done only when the other side receives: if all ranks begin with dist.send, they wait for each other for ever.
    """
    for size in (2, 3, 4):
        def program(modules, rank):
            numbers = torch.arange(12.0) + 100 * rank
            modules.references.ring_all_reduce(numbers)
            return numbers

        total = sum(torch.arange(12.0) + 100 * rank for rank in range(size))
        got, world = attempt.run(size, program)
        for rank in range(size):
            attempt.same(got[rank], total, f"the sum over {size} ranks", rank)
        attempt.messages_only(world)
    most = max(world.num_bytes(rank) for rank in range(size))
    attempt.score("bytes that a rank sends, 4 ranks with 48 bytes each", most, 2 * 3 * 12)
