"""Wrong and right answers to the exercises of step 11."""

from versions import Versions, Wrong

SPLIT = "torch.arange(num_microbatches).tensor_split(max(num_microbatches // num_stages, 1))"

VERSIONS = {
    "interleaved": Versions(
        wrong=[
            Wrong("the warm-up of step 8",
                  "len(forwards[0]) // num_chunks * (num_chunks - 1) + hops * (num_stages - 1 - stage)",
                  "num_stages - 1 - stage", "deadlock: no rank can go on"),
            Wrong("hops is not used", "hops * (num_stages", "(num_stages", "forwards before its first backward"),
            Wrong("the whole first round", "len(forwards[0]) // num_chunks * (num_chunks - 1)", "len(forwards[0])",
                  "does 7 forwards before its first backward, and has to do 5"),
        ]),
    "v_shape": Versions(
        wrong=[
            Wrong("the second chunk goes down the ranks again", "(rank, last - rank)", "(rank, num_ranks + rank)",
                  "deadlock"),
            Wrong("one chunk only", "enumerate((rank, last - rank))", "enumerate((rank,))", "never does F0'"),
            Wrong("backwards come too late", "4 * i + 2 * last", "8 * num_ranks * i + 2 * last", "and may take"),
        ],
        right='''
def v_shape(rank, num_ranks, num_microbatches):
    """All forward, all backward: as quick, but with all of them alive."""
    stages = rank, 2 * num_ranks - 1 - rank
    pairs = [(i, chunk) for i in range(num_microbatches) for chunk in (0, 1)]
    forwards = sorted(pairs, key=lambda pair: 2 * pair[0] + stages[pair[1]])
    backwards = sorted(pairs, key=lambda pair: 2 * pair[0] - stages[pair[1]])
    return [("F", *pair) for pair in forwards] + [("B", *pair) for pair in backwards]
'''),
}
