"""Step 2: ranks, groups and the first collectives."""

import itertools
import math
from unittest import mock

import torch
import torch.distributed as dist

from catalogue import exercise


@exercise("2", "process_group_manager.ProcessGroupManager.__init__", hints=(
    "torch.arange(n) has the ranks in order; view gives them three dimensions.",
    "A view of shape (dp_size, pp_size, tp_size) counts the last dimension first, as the rank does.",
    "(self.ranks == self.global_rank).nonzero() has the coordinates of this rank; or divide: divmod(rank, tp_size)."),
    blank=("self.ranks = ", "self.dp_rank, "), wrong=[
    ("tp is counted last", "self.ranks = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)",
     "self.ranks = torch.arange(self.world_size).view(tp_size, pp_size, dp_size).permute(2, 1, 0)",
     "self.ranks with dp 2 x pp 2 x tp 2"),
    ("coordinates stay tensors", ".nonzero().flatten().tolist()", ".nonzero().flatten()", "(int)"),
    ("the coordinates in another order", "self.dp_rank, self.pp_rank, self.tp_rank = (",
     "self.tp_rank, self.pp_rank, self.dp_rank = (", "its (dp_rank, pp_rank, tp_rank)")])
def rank_to_coordinates(attempt):
    """Find the place of this rank in the grid.

    The ranks 0 to world_size - 1 fill a grid of dp_size x pp_size x tp_size places. Consecutive ranks differ in the tp
    coordinate first, then in pp, then in dp:

        dp 2 x pp 3 x tp 2        dp 0:  tp 0  tp 1         dp 1:  tp 0  tp 1
                          pp 0              0     1                   6     7
                          pp 1              2     3                   8     9
                          pp 2              4     5                  10    11

    Set self.ranks, a tensor of shape (dp_size, pp_size, tp_size): self.ranks[dp, pp, tp] is the rank at that place. And
    set the coordinates of this rank, self.dp_rank, self.pp_rank and self.tp_rank, which are whole numbers (int). The
    rank of this process is self.global_rank. What follows makes the groups out of self.ranks.
    """
    for sizes in ((1, 1, 1), (2, 2, 2), (2, 1, 3), (2, 3, 2)):
        def program(modules, rank):
            modules.process_group_manager.dist = mock.Mock(wraps=dist, new_group=mock.Mock())  # groups come later
            grid = attempt.grid(modules, *sizes)
            coordinates = grid.dp_rank, grid.pp_rank, grid.tp_rank
            attempt.require(all(type(each) is int for each in coordinates), f"rank {rank}: dp_rank, pp_rank and "
                            f"tp_rank are {coordinates}: they have to be whole numbers (int)")
            return str(coordinates), str(torch.as_tensor(grid.ranks).tolist())

        name = "dp {} x pp {} x tp {}".format(*sizes)
        places = list(itertools.product(*map(range, sizes)))  # in the order of ranks
        got, _ = attempt.run(math.prod(sizes), program)
        for rank, (coordinates, ranks) in enumerate(got):
            attempt.same(coordinates, str(places[rank]), f"its (dp_rank, pp_rank, tp_rank) with {name}", rank)
            attempt.same(ranks, str(torch.arange(len(got)).view(sizes).tolist()), f"self.ranks with {name}", rank)


@exercise("2", "process_group_manager.ProcessGroupManager.__init__", hints=(
    "A rank needs three lists: of each axis, the ranks of the one group that it is in.",
    "Along its tp group, dp and pp stay those of this rank: self.ranks[self.dp_rank, self.pp_rank] are its ranks.",
    "For the other axes, a colon in the place of their own coordinate. dist.new_group takes a list, so call tolist()."),
    blank=("def make_group", "return dist.new_group", "self.tp_group = ", "self.pp_group = ", "self.dp_group = "),
    wrong=[
    ("the dp group is the tp group", "self.ranks[:, self.pp_rank, self.tp_rank]",
     "self.ranks[self.dp_rank, self.pp_rank]", "its dp group with dp 2 x pp 1 x tp 3"),
    ("pp groups reach over two blocks", "make_group(self.ranks[self.dp_rank, :, self.tp_rank])",
     "make_group(self.ranks[:, :, self.tp_rank].flatten())", "its pp group with"),
    ("creation", "have to make all groups, in the same order"),
    ("half of the ranks make another axis first", "self.tp_group = make_group(",
     "if self.dp_rank:\n        self.dp_group = make_group(self.ranks[:, self.pp_rank, self.tp_rank])\n"
     "    self.tp_group = make_group(", "deadlock"),
    ("the timeout is torch's", "ranks.tolist(), timeout, use", "ranks.tolist(), None, use", "without `timeout`")])
def groups_of_an_axis(attempt):
    """Make a process group along each axis of the grid.

    A group along an axis has the ranks that share the other two coordinates, in the order of their coordinate. Here a
    block is what one dp coordinate has:

                     tp 0   tp 1                 a tp group is a row            [0, 1] [2, 3] [4, 5] [6, 7]
        dp 0  pp 0      0      1                 a pp group is a column         [0, 2] [1, 3] [4, 6] [5, 7]
              pp 1      2      3                     within one block
        dp 1  pp 0      4      5                 a dp group is the same place   [0, 4] [1, 5] [2, 6] [3, 7]
              pp 1      6      7                     in every block

    Set self.tp_group, self.pp_group and self.dp_group to the three groups that this rank belongs to. You may call

        group = dist.new_group(ranks, timeout, use_local_synchronization=True)

    with a list of ranks. Without the last argument, all ranks would have to make all groups, in the same order, those
    without themselves too. With it, the members alone make a group, and wait for each other there.

    `timeout` is a global of the module. self.ranks[dp, pp, tp] is the rank at each place of the grid, and self.dp_rank,
    self.pp_rank and self.tp_rank are the coordinates of this one.
    """
    for sizes in ((1, 1, 1), (2, 1, 3), (2, 2, 2), (2, 3, 2)):
        name = "dp {} x pp {} x tp {}".format(*sizes)
        ranks = torch.arange(math.prod(sizes)).view(sizes)

        def program(modules, rank):
            new_group = mock.Mock(side_effect=dist.new_group)
            modules.process_group_manager.dist = mock.Mock(wraps=dist, new_group=new_group)
            grid = attempt.grid(modules, *sizes)
            for call in new_group.call_args_list:
                attempt.require(modules.process_group_manager.timeout in (*call.args, *call.kwargs.values()),
                                "a group is made without `timeout`: after a failure its ranks would wait for too long")
            return {axis: attempt.ranks_of(getattr(grid, f"{axis}_group")) for axis in ("tp", "pp", "dp")}

        got, _ = attempt.run(ranks.numel(), program)
        for rank, (dp, pp, tp) in enumerate(itertools.product(*map(range, sizes))):
            for axis, expected in (("tp", ranks[dp, pp]), ("pp", ranks[dp, :, tp]), ("dp", ranks[:, pp, tp])):
                attempt.same(got[rank][axis], str(expected.tolist()), f"its {axis} group with {name}", rank)


@exercise("2", "references:references.broadcast", hints=(
    "A rank that has received the tensor can send it on, while the source sends to the next one.",
    "Number the ranks from the source on: (rank - source) % size. Before round k, the first 2^k have the tensor.",
    "In that round, number i < 2^k sends to number i + 2^k, if that is less than size."), wrong=[
    ("the source is always rank 0", "(dist.get_rank() - source) % size", "dist.get_rank()",
     "choose another of these ranks"),
    ("numbers beyond the last rank wrap around", " and number + distance < size", "", "those ranks have ended"),
    ("a rank sends before it has received", "number < distance and", "number < 2 * distance and", "deadlock")])
def broadcast(attempt):
    """Give all ranks the tensor of one of them, in as few rounds as possible.

    Each rank has a tensor of the same shape. Afterwards all hold what `source` (a rank) had, in their own tensor.

        source 0, four ranks       0 --> 1  0 --> 2  0 --> 3       three rounds: one after the other
                                   or fewer, if others help

    In a round, each rank can send one message and receive one. You may call dist.send(tensor, rank), which returns when
    the other side receives, dist.recv(tensor, rank), dist.get_rank() and dist.get_world_size().
    """
    for size, source in ((2, 0), (3, 2), (5, 1), (6, 5), (8, 3)):
        def program(modules, rank):
            tensor = torch.arange(3.0) + 10 * rank
            modules.references.broadcast(tensor, source)
            return tensor

        got, world = attempt.run(size, program)
        attempt.messages_only(world)
        for rank in range(size):
            attempt.same(got[rank], torch.arange(3.0) + 10 * source, f"its tensor, with {size} ranks, source {source}",
                         rank)
    attempt.score("rounds over 8 ranks", world.rounds, 3)


@exercise("2", "references:references.ring_all_reduce", hints=(
    "Cut the tensor into n parts with chunk: they are views, so changing one changes the tensor.",
    "Round k of the first n - 1: rank r sends part r - k to the rank after it, and adds what it receives to part "
    "r - k - 1. Afterwards rank r has the whole sum of part r + 1.",
    "The second n - 1 rounds send the finished parts around in the same way, and copy instead of adding."), wrong=[
    ("the second half of the rounds is missing", "range(2 * (size - 1))", "range(size - 1)", "expected"),
    ("a part is cleared before it is sent", "sending.wait()", "outgoing.zero_(); sending.wait()",
     "changed a tensor while it was being sent"),
    ("all ranks send first", "sending = dist.isend(outgoing, after)", "sending = None; dist.send(outgoing, after)",
     "circle"),
    ("12 numbers always", "tensor.chunk(size)", "tensor[:12].chunk(size)", "IndexError"),
    ("rounds enough for 4 ranks", "range(2 * (size - 1))", "range(6)", "the sum over 5 ranks"),
    ("the parts are copies of another dtype", "tensor.chunk(size)", "tensor.float().chunk(size)",
     "the sum over 3 ranks")])
def ring_all_reduce(attempt):
    """Sum a tensor over all ranks with messages to the next rank only.

    Each of n ranks has a tensor of N numbers. Afterwards each has the sum of all of them, in the same tensor. The ranks
    form a ring: rank r sends to rank r + 1, and the last one to rank 0.

        part of N/n numbers:   0    1    2                     after n - 1 rounds, each rank has one finished sum,
            rank 0            a0   a1   a2    --> rank 1       and after n - 1 further ones all of them
            rank 1            b0   b1   b2    --> rank 2
            rank 2            c0   c1   c2    --> rank 0

    You may call dist.isend(tensor, rank), which returns a handle to wait() for, dist.recv(tensor, rank),
    dist.get_rank() and dist.get_world_size(). A send is done only when the other side receives: if all ranks begin with
    dist.send, they wait for each other for ever.
    """
    for size, count in ((2, 12), (3, 9), (5, 20), (4, 12)):
        numbers = [torch.arange(count, dtype=torch.float64 if size == 3 else torch.float32) + 100 * rank
                   for rank in range(size)]

        def program(modules, rank):
            mine = numbers[rank].clone()
            modules.references.ring_all_reduce(mine)
            return mine

        total = sum(numbers)
        got, world = attempt.run(size, program)
        for rank in range(size):
            attempt.same(got[rank], total, f"the sum over {size} ranks", rank)
        attempt.messages_only(world)
        for event in world.events:
            attempt.require(event.kind != "send" or event.peer == (event.rank + 1) % size,
                            f"rank {event.rank} sends to rank {event.peer} of {size}, which is not the next one")
    most = max(world.num_bytes(rank) for rank in range(size))
    attempt.score("bytes that a rank sends, 4 ranks with 48 bytes each", most, 2 * 3 * 12)
