"""Step 9: pipelines of unlike shapes."""

import itertools

import torch

from catalogue import exercise
from lab.ranks import SMALL


@exercise("9", "dataloader.deal_microbatches", hints=(
    "In round 0 each pipeline takes one, in round 1 each that takes at least two, and so on.",
    "Sort pairs (round, pipeline), one for each micro-batch that a pipeline takes: their order is that of dealing.",
    "The i-th pair of the sorted list says which pipeline gets micro-batch i."), wrong=[
    ("each pipeline gets its micro-batches in a row", "sorted((turn, pipeline) for", "sorted((pipeline, pipeline) for",
     "not the order of the rounds"),
    ("all pipelines take the same number", "for turn in range(count)", "for turn in range(num_microbatches[0])",
     "pipeline 1 gets 3, and takes 2"),
    ("each pipeline counts its own", "return [[i for i, (_, dealt_to) in enumerate(turns) if dealt_to == pipeline]",
     "return [list(range(num_microbatches[pipeline]))", "micro-batch 0 is dealt 2 times")])
def deal_micro_batches(attempt):
    """Deal the micro-batches of a step to pipelines that take unlike numbers of them.

    num_microbatches[k] is how many pipeline k takes. The micro-batches of the step are 0 to sum(num_microbatches) - 1,
    and they are dealt in rounds, as cards are: in each round, every pipeline that lacks some of its number gets the
    next one, pipeline 0 first. Return, for each pipeline, the list of its micro-batches. With [3, 2, 3]:

        micro-batch     0  1  2  3  4  5  6  7
        pipeline        0  1  2  0  1  2  0  2        -->  [[0, 3, 6], [1, 4], [2, 5, 7]]
                        round 0  round 1  round 2

    A fast machine takes many, a slow one few, and the step reads the same samples however they are divided.
    """
    deal, ours = attempt.function(), attempt.function(attempt.ours)
    for numbers in ([4], [2, 2], [3, 2, 3], [1, 5], [6, 1, 3, 1]):
        got = deal(numbers)
        attempt.require(isinstance(got, list) and len(got) == len(numbers) and all(type(each) is list for each in got),
                        f"num_microbatches={numbers}: it returns {got}, and not a list for each pipeline")
        dealt = [i for each in got for i in each]
        for k, each in enumerate(got):
            attempt.require(len(each) == numbers[k], f"num_microbatches={numbers}: pipeline {k} gets {len(each)}, and "
                                                     f"takes {numbers[k]}: {got}")
        for i in range(sum(numbers)):
            attempt.require(dealt.count(i) == 1, f"num_microbatches={numbers}: micro-batch {i} is dealt "
                                                 f"{dealt.count(i)} times: {got}")
        attempt.same(str([[*map(int, each)] for each in got]), str(ours(numbers)),
                     f"num_microbatches={numbers}: not the order of the rounds")


@exercise("9", "data_parallel.find_owners", hints=(
    "pipelines[k].modules_per_stage[s] is a tuple of the names of the modules of stage s of pipeline k.",
    "places[name] is the set of all (k, s) for which `name` is among them: a dictionary of set comprehensions.",
    "The group of a module is grid.group_of(places[module]); that of the tied parameter is the one of the union of "
    "places[module] over the modules in `ends`."),
    blank=("places =", "group = grid.group_of(places", "group = grid.group_of({"), wrong=[
    ("stage and pipeline are exchanged", "{(k, s) for", "{(s, k) for", "the owners of"),
    ("only the first pipeline is asked", "enumerate(pipelines)", "enumerate(pipelines[:1])", "expected  [0, 3]"),
    ("the tied parameter has the owners of its first module", "for module in ends for place",
     "for module in ends[:1] for place", "tied, the owners of"),
    ("a name that begins another one's", "if name in names} for", 'if name in " ".join(names)} for',
     "the owners of decoder_layers.1.")])
def owners_of_a_module(attempt):
    """Find the ranks that hold a module, where pipelines are cut at unlike places.

    `pipelines` is a list of templates: pipelines[k].modules_per_stage[s] has the names of the modules on stage s of
    pipeline k. `modules` are all names. A gradient is summed over the owners of its module:

        pipeline 0   | embedding, layers 0-2 | layer 3, norm, projection |       rank 0 | rank 1
        pipeline 1   | embedding, layer 0 | layers 1-3, norm, projection |       rank 2 | rank 3
        owners         embedding, layer 0: ranks 0 and 2     layers 1-2: 0 and 3     layer 3, norm, projection: 1 and 3

    Write `places`, a dictionary: name of a module -> set of its places, pairs (pipeline, stage). In the loop, `group`
    is that of the owners of `module`; for a parameter that two modules share, `ends`, it is that of the owners of all
    of them. You may call grid.group_of(set of places), which all ranks do in the same order: it returns the group, or
    None where this rank is not among the owners, or is the only one.
    """
    cases = (([[3, 1], [1, 3]], False), ([[4], [1, 2, 1]], False), ([[2, 2], [4], [1, 3]], True), ([[2, 2]], True),
             ([[2, 9], [11]], False))
    for layers, tied in cases:
        def program(modules, rank):
            config = modules.utils.load_config(SMALL[1], num_hidden_layers=sum(layers[0]), num_attention_heads=None,
                                               num_key_value_heads=None)
            config.tie_word_embeddings = tied
            with torch.device("meta"):
                model = modules.model.Llama(config)
            template = modules.pipeline_template.PipelineTemplate
            pipelines = [template.from_layers_per_stage(model, sizes) for sizes in layers]
            modules.process_group_manager.setup_process_group_manager([len(sizes) for sizes in layers], 1)
            grid = modules.process_group_manager.process_group_manager
            stage = modules.pipeline_stage.PipelineStage(model, pipelines[grid.dp_rank], grid.pp_rank)
            names = {param: name for name, param in stage.model.named_parameters()}
            return {f"the owners of {names[param]}": attempt.ranks_of(group)
                    for param, group in modules.data_parallel.find_owners(stage, pipelines)}

        shape = "; ".join(",".join(map(str, sizes)) for sizes in layers)
        attempt.both(sum(map(len, layers)), program, f"pipelines with {shape} layers{', tied' * tied}")


@exercise("9", "references:references.cut_layers", hints=(
    "Give the first k layers to the first s stages as well as possible. How does the answer for s stages follow from "
    "those for s - 1?",
    "best(s, k) = the least, over all beginnings f of the last stage, of max(best(s - 1, f), sum(costs[f:k]) / speed).",
    "Keep the sizes of the stages beside the time, and functools.cache the function: it is called often with the same "
    "arguments. A recursion that tries all cuts is as good where there are few layers."), wrong=[
    ("a stage without layers is allowed", "for first in range(stages - 1, layers):",
     "for first in range(1, layers + 1):", "each needs one"),
    ("where stages begin, and not how many they get", "[*sizes, layers - first]", "[*sizes, first]", "together, of 6"),
    ("the last stage is forgotten", "return best(len(speeds), len(costs))[1]",
     "return best(len(speeds), len(costs))[1][:-1]", "not a number for each of the 3 stages"),
    ("the costs and speeds are not read", "return best(len(speeds), len(costs))[1]",
     "return [len(costs) // len(speeds) + (s < len(costs) % len(speeds)) for s in range(len(speeds))]",
     "whatever the costs and speeds are")])
def cut_layers(attempt):
    """Cut layers of unlike cost into stages for machines of unlike speed.

    Layer i takes costs[i] / speeds[s] seconds on stage s. Stages are in the order of `speeds`, and each gets one or
    more consecutive layers. Return how many each gets. The slowest stage sets the pace of the whole pipeline:

        costs    4 1 1 1 1 4     speeds   2  1  2
        [2, 2, 2]    4 1 | 1 1 | 1 4      2.5   2   2.5    seconds: a micro-batch leaves every 2.5 seconds
        [1, 4, 1]    4 | 1 1 1 1 | 4      2     4   2      every 4 seconds

    Stars are for the seconds of the slowest stage. Equally many layers, or a cut at equal shares of the sum, are not
    the best in general. There are up to 12 layers and 4 stages here.
    """
    cut, total, best, equal = attempt.function(), 0.0, 0.0, 0.0
    for costs, speeds in (([1.0] * 6, [1.0] * 3), ([4.0, 1, 1, 1, 1, 4], [2.0, 1, 2]), ([3.0, 1, 2], [1.0, 5, 1]),
                          ([5.0], [2.0]), ([1.0, 2, 9, 2, 1, 3, 3, 1, 6, 1, 1, 8], [1.0, 4, 2, 1.5]),
                          ([1.0] * 11, [1.0, 3, 0.5])):
        sizes, what = cut(costs, speeds), f"costs {costs}, speeds {speeds}"
        attempt.require(hasattr(sizes, "__len__") and len(sizes) == len(speeds),
                        f"{what}: it returns {sizes}, and not a number for each of the {len(speeds)} stages")
        sizes = [*map(int, sizes)]
        attempt.require(sum(sizes) == len(costs) and min(sizes) >= 1,
                        f"{what}: stages of {list(sizes)} layers have {sum(sizes)} together, of {len(costs)}, and each "
                        "needs one")
        total += slowest(costs, speeds, sizes)
        many, left = divmod(len(costs), len(speeds))
        equal += slowest(costs, speeds, [many + (s < left) for s in range(len(speeds))])
        best += min(slowest(costs, speeds, [b - a for a, b in itertools.pairwise((0, *ends, len(costs)))])
                    for ends in itertools.combinations(range(1, len(costs)), len(speeds) - 1))
    attempt.require(total < equal, f"the slowest stages of six pipelines take {total:g} seconds together. Equally many "
                    f"layers on each stage take {equal:g}, whatever the costs and speeds are")
    attempt.score("seconds of the slowest stage, summed over six pipelines", total, best)


def slowest(costs: list[float], speeds: list[float], sizes: list[int]) -> float:
    layers = iter(costs)
    return max(sum(itertools.islice(layers, size)) / speed for size, speed in zip(sizes, speeds))
