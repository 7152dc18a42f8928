"""Wrong and right answers to the exercises of step 8."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "one_f_one_b": Versions(
        wrong=[
            museum("deadlock", "deadlock: no stage can go on"),
            museum("few", "does F2, but the micro-batches are 0 to 1"),
            Wrong("no cool-down", "range(num_microbatches - warm_up, num_microbatches)", "range(0)", "never does B"),
            Wrong("the warm-up of four stages", "num_stages - stage - 1", "4 - stage - 1",
                  "5 stages, 20 micro-batches"),
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
            Wrong("the pipeline is that of all tp ranks", "stages = self.ranks[self.dp_rank, :, self.tp_rank]",
                  "stages = self.ranks[self.dp_rank].flatten()", "the ranks of pp_backward_group"),
            Wrong("the ends are the whole pipeline", "stages[:: max(pp_size - 1, 1)]", "stages",
                  "the ranks of pp_ends_group"),
            museum("peers", "pp_next_rank"),
            Wrong("one group for both directions", "self.pp_backward_group = make_group(stages)",
                  "self.pp_backward_group = self.pp_group", "whether the two groups"),
            Wrong("a neighbour is a tensor", "stages[self.pp_rank - 1].item()", "stages[self.pp_rank - 1]",
                  "tensor(0)"),
        ]),
}
