"""Step 8: one forward, one backward, and all three axes together."""

from catalogue import exercise
from schedule_attempt import picture, play_schedule, score_time_and_memory, train_with


@exercise("8", "pipeline_parallel.one_f_one_b", hints=(
    "Three phases: forwards only, then pairs of a forward and a backward, then backwards only. How many forwards does "
    "the first phase have on the last stage, and on the one before it?",
    "The warm-up has one forward for each later stage, p - s - 1, but no more than there are micro-batches.",
    "With w forwards in the warm-up: F of 0 to w - 1; then F of i and B of i - w for i from w to m - 1; then the B of "
    "the last w micro-batches."), wrong=[
    ("deadlock", "deadlock: no stage can go on"),
    ("few", "does F2, but the micro-batches are 0 to 1"),
    ("no cool-down", "range(num_microbatches - warm_up, num_microbatches)", "range(0)", "never does B"),
    ("the warm-up of four stages", "num_stages - stage - 1", "4 - stage - 1", "5 stages, 20 micro-batches")])
def one_f_one_b(attempt):
    """Order the micro-batches of a stage: warm-up, one forward, one backward, cool-down.

    `yield Action("F", i)` for the forward of micro-batch i, and `yield Action("B", i)` for its backward, in the order
    in which stage `stage` of `num_stages` does them. Four stages, five micro-batches:

        stage 0   F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4
        stage 1   .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4 .
        stage 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .  .
        stage 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .  .

    You write no dots: a stage waits by itself until what it needs has come. Each micro-batch goes forward and backward
    once, both in the order 0, 1, 2, .... There may be fewer micro-batches than stages. Stars are for the time of the
    whole, and for the activations that are alive: a micro-batch's from its F to its B.
    """
    schedule = attempt.function()
    for p, m in ((1, 3), (2, 4), (3, 5), (4, 2), (5, 20), (4, 12)):
        played = play_schedule(attempt, schedule, p, m)
        for stage, spans in enumerate(played.spans):
            for kind in "FB":
                order = [span.microbatch for span in spans if span.kind == kind]
                attempt.require(order == [*range(m)], f"stage {stage} of {p} does the {kind} of its micro-batches in "
                                                      f"the order {order}, and not 0, 1, 2, ...{picture(played)}")
        if m >= 12:
            score_time_and_memory(attempt, played, 2 * (m + p - 1), [p - s for s in range(p)],
                                  f"{p} stages, {m} micro-batches")
    train_with(attempt, "--pp_engine 1f1b")
    # The last stage waits p - 1 units, works 2 m, and its last gradient passes p - 1 stages. In the 2 (m + p - 1 - s)
    # units of stage s, each of m micro-batches is alive for 2 (p - s) at least: with p = 4 and m = 12, and with 5 and
    # 20, on average more than p - s - 1 are.


@exercise("8", "process_group_manager.ProcessGroupManager.__init__", hints=(
    "A pp group has the ranks that differ in pp only: a colon in its place, this rank's coordinates in the others.",
    "self.ranks[self.dp_rank, :, self.tp_rank] are the ranks of this pipeline. Both pp groups have all of them.",
    "The ends of a pipeline are its first and last rank, and one rank only where it has one stage: a slice with the "
    "step max(pp_size - 1, 1). The neighbours are beside self.pp_rank; item() makes an int of a tensor's number."),
    blank=("stages =", "self.pp_group =", "self.pp_backward_group =", "ends =", "self.pp_ends_group =",
           "self.pp_prev_rank =", "self.pp_next_rank ="), wrong=[
    ("the pipeline is that of all tp ranks", "stages = self.ranks[self.dp_rank, :, self.tp_rank]",
     "stages = self.ranks[self.dp_rank].flatten()", "the ranks of pp_backward_group"),
    ("the ends are the whole pipeline", "stages[:: max(pp_size - 1, 1)]", "stages", "the ranks of pp_ends_group"),
    ("peers", "pp_next_rank"),
    ("one group for both directions", "self.pp_backward_group = make_group(stages)",
     "self.pp_backward_group = self.pp_group", "whether the two groups"),
    ("a neighbour is a tensor", "stages[self.pp_rank - 1].item()", "stages[self.pp_rank - 1]", "tensor(0)")])
def stages_in_the_grid(attempt):
    """Find the ranks of a pipeline in the grid, its ends, and the neighbours of a stage.

    self.ranks is a tensor of global ranks, with the shape (dp_size, pp_size, tp_size). With all three sizes 2:

                     tp 0   tp 1
        dp 0  pp 0      0      1       pipelines   [0, 2] [1, 3] [4, 6] [5, 7]: the ranks that differ in pp only, in
              pp 1      2      3                   the order of their stages
        dp 1  pp 0      4      5       ends        of each pipeline the first and the last rank, one rank where
              pp 1      6      7                   pp_size is 1

    make_group(ranks), with a tensor of ranks, makes a process group of them, and returns None on any other rank. Set
    self.pp_group and self.pp_backward_group, two groups of the pipeline of this rank (self.dp_rank, self.pp_rank,
    self.tp_rank), and self.pp_ends_group, of that pipeline's ends, or of all stages between them where this rank is one
    of these: all ranks have to be in equally many groups. Set self.pp_prev_rank and self.pp_next_rank, the global ranks
    of the stages before and after its own (int), and None at the pipeline's ends.
    """
    for dp, pp, tp in ((2, 2, 2), (1, 3, 2), (2, 3, 1), (3, 1, 2), (1, 4, 1)):
        def program(modules, rank):
            grid = attempt.grid(modules, dp=dp, pp=pp, tp=tp)
            groups = {"pp_group": grid.pp_group, "pp_backward_group": grid.pp_backward_group,
                      "pp_ends_group": grid.pp_ends_group}
            return {**{f"the ranks of {name}": attempt.ranks_of(group) for name, group in groups.items()},
                    "pp_prev_rank": repr(grid.pp_prev_rank), "pp_next_rank": repr(grid.pp_next_rank),
                    "whether the two groups of the pipeline are two": grid.pp_backward_group is not grid.pp_group}

        attempt.both(dp * pp * tp, program, f"a grid of dp {dp} x pp {pp} x tp {tp}")
