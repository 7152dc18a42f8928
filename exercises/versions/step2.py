"""Wrong and right answers to the exercises of step 2."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "rank_to_coordinates": Versions(
        wrong=[
            Wrong("tp is counted last", "self.ranks = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)",
                  "self.ranks = torch.arange(self.world_size).view(tp_size, pp_size, dp_size).permute(2, 1, 0)",
                  "self.ranks with dp 2 x pp 2 x tp 2"),
            Wrong("coordinates stay tensors", ".nonzero().flatten().tolist()", ".nonzero().flatten()", "(int)"),
            Wrong("the coordinates in another order", "self.dp_rank, self.pp_rank, self.tp_rank = (",
                  "self.tp_rank, self.pp_rank, self.dp_rank = (", "its (dp_rank, pp_rank, tp_rank)"),
        ]),
    "groups_of_an_axis": Versions(
        wrong=[
            Wrong("the dp group is the tp group", "self.ranks[:, self.pp_rank, self.tp_rank]",
                  "self.ranks[self.dp_rank, self.pp_rank]", "its dp group with dp 2 x pp 1 x tp 3"),
            Wrong("pp groups reach over two blocks", "make_group(self.ranks[self.dp_rank, :, self.tp_rank])",
                  "make_group(self.ranks[:, :, self.tp_rank].flatten())", "its pp group with"),
            museum("creation", "have to make all groups, in the same order"),
            Wrong("half of the ranks make another axis first", "self.tp_group = make_group(",
                  "if self.dp_rank:\n        self.dp_group = make_group(self.ranks[:, self.pp_rank, self.tp_rank])\n"
                  "    self.tp_group = make_group(", "deadlock"),
            Wrong("the timeout is torch's", "ranks.tolist(), timeout, use", "ranks.tolist(), None, use",
                  "without `timeout`"),
        ]),
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
            Wrong("all ranks send first", "sending = dist.isend(outgoing, after)",
                  "sending = None; dist.send(outgoing, after)", "circle"),
            Wrong("12 numbers always", "tensor.chunk(size)", "tensor[:12].chunk(size)", "IndexError"),
            Wrong("rounds enough for 4 ranks", "range(2 * (size - 1))", "range(6)", "the sum over 5 ranks"),
            Wrong("the parts are copies of another dtype", "tensor.chunk(size)", "tensor.float().chunk(size)",
                  "the sum over 3 ranks"),
        ]),
}
