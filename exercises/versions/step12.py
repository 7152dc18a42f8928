"""Wrong and right answers to the exercises of step 12."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "reduce_scatter": Versions(
        wrong=[
            Wrong("its own part is forgotten", "received[rank + 1 :] + received[: rank + 1]",
                  "received[rank + 1 :] + received[:rank]", "the sum of its shard"),
            Wrong("all ranks send the same part", "Exchange(parts, received, group)",
                  "Exchange([parts[rank]] * len(parts), received, group)", "the sum of its shard"),
            Wrong("what is received has the size of the sender's part", "[torch.empty_like(parts[rank]) for _ in "
                "sizes]",
                  "[torch.empty_like(part) for part in parts]", "numbers of torch.float64 to rank"),
        ],
        right='''
def reduce_scatter(full, sizes, group):
    class Done:
        def wait(self):
            pass

    dist.all_reduce(full, group=group)  # right, but with twice the bytes
    return Done(), [full.split(sizes)[group.rank()]]
'''),
    "sharded_adamw": Versions(
        wrong=[
            Wrong("the shard is a copy", "self.weights.split(self.sizes)[group.rank()])",
                  "self.weights.split(self.sizes)[group.rank()].clone())", "weights after 4 steps"),
            Wrong("the parameters stay where they were", "param.data = part.view_as(param)", "part.view_as(param)",
                  "weights after 4 steps"),
            Wrong("equal shares", "len(self.weights) * sum(shares[:rank]) // sum(shares)",
                  "len(self.weights) * rank // len(shares)", "where the shares [4, 2, 1] mean"),
        ]),
    "norm_over_shards": Versions(
        wrong=[
            Wrong("the norms' weights count on each tp rank", "(grid.tp_rank == 0 or param in split)", "True",
                  "--tp_size 2 --zero 1: the gradient norm"),
            Wrong("only tp rank 0 counts", "(grid.tp_rank == 0 or param in split)", "grid.tp_rank == 0",
                  "--tp_size 2 --zero 1: the gradient norm"),
            museum("copies", "with tied embeddings: the gradient norm"),
        ]),
}
