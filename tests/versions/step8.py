"""Wrong and right answers to the exercises of step 8; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "one_f_one_b": Versions(
        wrong=[
            Wrong("the warm-up is one too short on some stages only", "min(num_stages - stage - 1, num_microbatches)",
                  "min(stage, num_microbatches)", "deadlock: no stage can go on"),
            Wrong("few micro-batches are forgotten", "min(num_stages - stage - 1, num_microbatches)",
                  "num_stages - stage - 1", "does F2, but the micro-batches are 0 to 1"),
            Wrong("no cool-down", "range(num_microbatches - warm_up, num_microbatches)", "range(0)", "never does B"),
        ],
        right='''
def one_f_one_b(stage, num_stages, num_microbatches):
    for i in range(num_microbatches):  # all forward, all backward: as quick, but with more alive
        yield Action("F", i)
    for i in range(num_microbatches):
        yield Action("B", i)
'''),
    "stages_in_the_grid": Versions(
        wrong=[
            Wrong("tp varies fastest in a reshape", "columns = self.ranks.transpose(1, 2).reshape",
                  "columns = self.ranks.reshape", "the ranks of pp_group"),
            Wrong("the ends are the whole column", "ends = [ranks[:: max(pp_size - 1, 1)] for ranks in columns]",
                  "ends = columns", "the ranks of pp_ends_group"),
            Wrong("the neighbours are the next numbers", "else stages[self.pp_rank + 1]", "else self.global_rank + 1",
                  "pp_next_rank"),
        ],
        right='''
def __init__(self, dp_size, pp_size, tp_size):
    self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
    self.ranks = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)
    self.dp_rank, self.pp_rank, self.tp_rank = (self.ranks == self.global_rank).nonzero().flatten().tolist()
    self.dp_world_size, self.pp_world_size, self.tp_world_size = dp_size, pp_size, tp_size
    columns = [[dp * pp_size * tp_size + pp * tp_size + tp for pp in range(pp_size)]
               for dp in range(dp_size) for tp in range(tp_size)]
    ends = [sorted({column[0], column[-1]}) for column in columns]
    self.pp_group, _ = dist.new_subgroups_by_enumeration(columns, timeout)
    self.pp_ends_group, _ = dist.new_subgroups_by_enumeration(ends, timeout)
    self.pp_prev_rank = self.global_rank - tp_size if self.pp_rank > 0 else None
    self.pp_next_rank = self.global_rank + tp_size if self.pp_rank < pp_size - 1 else None

    def describe():
        return ""
    self.describe = describe
'''),
}
