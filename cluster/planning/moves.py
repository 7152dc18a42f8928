"""Small changes of a plan, for the planner to try: a micro-batch or a layer goes from one place to another."""

from collections.abc import Iterator
from itertools import permutations

from planning.simulation import Candidate


def microbatch_moves(candidate: Candidate) -> Iterator[Candidate]:
    """One micro-batch goes from each pipeline to each other one."""
    for a, b in permutations(range(len(candidate.pipelines)), 2):
        pipelines = list(candidate.pipelines)
        for k, more in (a, -1), (b, 1):
            pipelines[k] = pipelines[k]._replace(num_microbatches=pipelines[k].num_microbatches + more)
        if pipelines[a].num_microbatches:
            yield candidate._replace(pipelines=tuple(pipelines))


def layer_moves(candidate: Candidate) -> Iterator[Candidate]:
    """One decoder layer goes from each stage to each other stage of its pipeline."""
    for k, pipeline in enumerate(candidate.pipelines):
        for s, t in permutations(range(len(pipeline.layers)), 2):
            layers, pipelines = list(pipeline.layers), list(candidate.pipelines)
            layers[s], layers[t] = layers[s] - 1, layers[t] + 1
            pipelines[k] = pipeline._replace(layers=tuple(layers))
            if layers[s]:
                yield candidate._replace(pipelines=tuple(pipelines))
