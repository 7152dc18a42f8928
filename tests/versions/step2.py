"""Wrong and right answers to the exercises of step 2; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "rank_to_coordinates": Versions(
        wrong=[
            Wrong("tp is counted last", "self.ranks = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)",
                  "self.ranks = torch.arange(self.world_size).view(tp_size, pp_size, dp_size).permute(2, 1, 0)",
                  "self.ranks with dp 2 x pp 1 x tp 3"),
            Wrong("coordinates stay tensors", ".nonzero().flatten().tolist()", ".nonzero().flatten()", "(int)"),
            Wrong("the coordinates in another order", "self.dp_rank, self.pp_rank, self.tp_rank = (",
                  "self.tp_rank, self.pp_rank, self.dp_rank = (", "its (dp_rank, pp_rank, tp_rank)"),
        ],
        right='''
def __init__(self, dp_size, pp_size, tp_size):
    self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
    self.ranks = torch.zeros(dp_size, pp_size, tp_size, dtype=torch.int64)
    for rank in range(self.world_size):
        block, tp = divmod(rank, tp_size)
        dp, pp = divmod(block, pp_size)
        self.ranks[dp, pp, tp] = rank
        if rank == self.global_rank:
            self.dp_rank, self.pp_rank, self.tp_rank = dp, pp, tp
    self.dp_world_size, self.pp_world_size, self.tp_world_size = dp_size, pp_size, tp_size
'''),
    "groups_of_an_axis": Versions(
        wrong=[
            Wrong("dp groups are consecutive ranks", "self.ranks.permute(1, 2, 0).reshape", "self.ranks.reshape",
                  "its dp group with dp 2 x pp 1 x tp 3"),
            Wrong("pp groups reach over two blocks", "self.ranks.transpose(1, 2).reshape(-1, pp_size)",
                  "self.ranks.permute(2, 1, 0).reshape(-1, pp_size)", "its pp group with"),
            Wrong("a rank makes only the group that it is in",
                  "self.dp_group, _ = dist.new_subgroups_by_enumeration(replicas.tolist(), timeout)",
                  "self.dp_group = dist.new_group(self.ranks[:, self.pp_rank, self.tp_rank].tolist(), timeout)",
                  "have to make all groups, in the same order"),
        ],
        right='''
def __init__(self, dp_size, pp_size, tp_size):
    self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
    self.ranks = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)
    self.dp_rank, self.pp_rank, self.tp_rank = (self.ranks == self.global_rank).nonzero().flatten().tolist()
    self.dp_world_size, self.pp_world_size, self.tp_world_size = dp_size, pp_size, tp_size
    for axis in ("tp", "pp", "dp"):
        order = {"tp": (0, 1, 2), "pp": (0, 2, 1), "dp": (1, 2, 0)}[axis]
        lists = self.ranks.permute(order).flatten(0, 1)
        for ranks in lists.tolist():
            group = dist.new_group(ranks, timeout)
            if self.global_rank in ranks:
                setattr(self, f"{axis}_group", group)
'''),
    "broadcast": Versions(
        wrong=[
            Wrong("the source is always rank 0",
                  "(dist.get_rank() - source) % size", "dist.get_rank()", "choose another of these ranks"),
            Wrong("numbers beyond the last rank wrap around",
                  " and number + distance < size", "", "those ranks have ended"),
            Wrong("a rank sends before it has received",
                  "number < distance and", "number < 2 * distance and", "deadlock"),
        ],
        right='''
def broadcast(tensor, source):
    if dist.get_rank() == source:  # right, with n - 1 rounds
        for rank in range(dist.get_world_size()):
            if rank != source:
                dist.send(tensor, rank)
    else:
        dist.recv(tensor, source)
'''),
    "ring_all_reduce": Versions(
        wrong=[
            Wrong("the second half of the rounds is missing", "range(2 * (size - 1))", "range(size - 1)", "expected"),
            Wrong("a part is cleared before it is sent", "sending.wait()", "outgoing.zero_(); sending.wait()",
                  "changed a tensor while it was being sent"),
            Wrong("all ranks send first",
                  "sending = dist.isend(outgoing, after)", "sending = None; dist.send(outgoing, after)",
                  "circle"),
        ],
        right='''
def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, travelling = tensor.clone(), tensor.clone()
    for _ in range(size - 1):  # everything once around: right, but with size / 2 times the bytes
        received = torch.empty_like(tensor)
        sending = dist.isend(travelling, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        travelling = received
        whole += received
    tensor.copy_(whole)
'''),
}
