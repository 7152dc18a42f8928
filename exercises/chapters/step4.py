"""Step 4: tensor parallelism."""

import torch

from catalogue import exercise


@exercise("4", "tensor_parallel.all_reduce", hints=(
    "In each round, exchange with one partner, and add: `dist.isend`, `dist.recv`, then wait for the send.",
    "The partner at distance d (1, 2, 4, ...) is tp_rank ^ d: the rank whose number differs in one bit.",
    "Combine with torch.add or torch.maximum, with out=tensor: the sum is needed in place."),
    blank=("received = ", "for distance"))
def recursive_doubling(attempt):
    """Sum a tensor over the tp ranks in log2(n) rounds instead of 2 (n - 1).

    All ranks exchange their value with a partner at distance 1 and add, then with one at distance 2, then 4:

        rank      0     1     2     3
        start     a     b     c     d
        d = 1    a+b   a+b   c+d   c+d
        d = 2     a+b+c+d on each

    `op` is dist.ReduceOp.SUM or MAX. You may call dist.isend(tensor, group=grid.tp_group, group_dst=partner) and
    dist.recv(tensor, group=grid.tp_group, group_src=partner), whose partner is a tp rank.
    """
    for size in (2, 4, 8):
        def program(modules, rank):
            attempt.grid(modules, tp=size)
            one, two = torch.arange(3.0) + rank, torch.arange(3.0) * (-1) ** rank
            modules.tensor_parallel.all_reduce(one)
            modules.tensor_parallel.all_reduce(two, modules.tensor_parallel.dist.ReduceOp.MAX)
            return {"the sum": one, "the maximum": two}

        world = attempt.both(size, program, f"{size} ranks")
        attempt.messages_only(world)
    attempt.score("rounds of two all-reduces over 8 ranks", world.rounds, 6)
