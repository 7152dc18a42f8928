"""Wrong and right answers to the exercises of step 9."""

from versions import Versions, Wrong

VERSIONS = {
    "deal_micro_batches": Versions(
        wrong=[
            Wrong("each pipeline gets its micro-batches in a row", "sorted((turn, pipeline) for",
                  "sorted((pipeline, pipeline) for", "not the order of the rounds"),
            Wrong("all pipelines take the same number", "for turn in range(count)",
                  "for turn in range(num_microbatches[0])", "pipeline 1 gets 3, and takes 2"),
            Wrong("each pipeline counts its own",
                  "return [[i for i, (_, dealt_to) in enumerate(turns) if dealt_to == pipeline]",
                  "return [list(range(num_microbatches[pipeline]))", "micro-batch 0 is dealt 2 times"),
        ],
        right='''
def deal_microbatches(num_microbatches):
    dealt, lacks, i = [[] for _ in num_microbatches], list(num_microbatches), 0
    while any(lacks):
        for k in range(len(lacks)):
            if lacks[k]:
                dealt[k].append(i)
                lacks[k] -= 1
                i += 1
    return dealt
'''),
    "owners_of_a_module": Versions(
        wrong=[
            Wrong("stage and pipeline are exchanged", "{(k, s) for", "{(s, k) for", "the owners of"),
            Wrong("only the first pipeline is asked", "enumerate(pipelines)", "enumerate(pipelines[:1])",
                  "expected  [0, 3]"),
            Wrong("the tied parameter has the owners of its first module", "for module in ends for place",
                  "for module in ends[:1] for place", "tied, the owners of"),
            Wrong("a name that begins another one's", "if name in names} for", "if name in \" \".join(names)} for",
                  "the owners of decoder_layers.1."),
        ]),
    "cut_layers": Versions(
        wrong=[
            Wrong("a stage without layers is allowed", "for first in range(stages - 1, layers):",
                  "for first in range(1, layers + 1):", "each needs one"),
            Wrong("where stages begin, and not how many they get", "[*sizes, layers - first]", "[*sizes, first]",
                  "together, of 6"),
            Wrong("the last stage is forgotten", "return best(len(speeds), len(costs))[1]",
                  "return best(len(speeds), len(costs))[1][:-1]", "not a number for each of the 3 stages"),
            Wrong("the costs and speeds are not read", "return best(len(speeds), len(costs))[1]",
                  "return [len(costs) // len(speeds) + (s < len(costs) % len(speeds)) for s in range(len(speeds))]",
                  "whatever the costs and speeds are"),
        ],
        right='''
def cut_layers(costs, speeds):
    share, sizes, first = sum(costs) / sum(speeds), [], 0
    for s, speed in enumerate(speeds):  # a greedy cut: right, but not the best
        end, later = first + 1, len(speeds) - s - 1
        while end < len(costs) - later and (not later or sum(costs[first : end + 1]) / speed <= share):
            end += 1
        sizes.append(end - first)
        first = end
    return sizes
'''),
}
