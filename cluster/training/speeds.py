"""How fast each machine is, from cluster.json, and which share of the work it gets so that none waits for the slowest.

plan.py --measure writes cluster.json. Rank 0 reads it and tells the others, so only one machine needs the file.
"""

import json
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline_template import PipelineTemplate
from planning.shares import shares_by_speed
from training.common import from_rank_0
from utils import ROOT, UserError

CLUSTER_JSON = os.path.join(ROOT, "cluster.json")


class Speed(NamedTuple):
    """Seconds of one machine for a micro-batch, forward and backward.

    The first three are seconds a parameter, because the model that is trained need not be the one that was measured.
    """

    embedding: float
    layers: float
    head: float  # with the final norm
    whole_model: float  # of the measured one, in seconds


EQUALLY_FAST = Speed(embedding=0.0, layers=1.0, head=1.0, whole_model=1.0)  # looking up an embedding takes no time


def measured_speeds(args, microbatch_size: int) -> list[Speed] | None:
    """Each rank's speed, measured at the micro-batch size that is nearest. None without cluster.json. Collective.

    Raises UserError for a file that can't be read, or that is for another number of ranks.
    """
    def read() -> list[Speed] | None:
        path, world_size = args.cluster_json or CLUSTER_JSON, dist.get_world_size()
        if args.equal_shares or (args.cluster_json is None and not os.path.exists(path)):
            return None
        remedy = "measure again with plan.py --measure, or use --equal_shares"
        try:
            with open(path) as file:
                cluster = json.load(file)
            parameters = [module["parameters"] for module in cluster["modules"]]
            speeds = [speed_of(machine, microbatch_size, parameters) for machine in cluster["machines"]]
        except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{path} holds no speeds ({type(error).__name__}: {error}): {remedy}") from None
        seconds = [speed.whole_model for speed in speeds]
        if len(speeds) != world_size or not all(0 < value < float("inf") for value in seconds):
            raise UserError(f"{path} has the speeds of {len(speeds)} machines ({seconds} s a micro-batch), but "
                             f"{world_size} ranks run: {remedy}")
        print(f"speeds: {path}", flush=True)
        return speeds

    return from_rank_0(read)


def speed_of(machine: dict, microbatch_size: int, parameters: list[int]) -> Speed:
    """From a machine's entry in cluster.json, whose lists are over the modules: embedding, layers, norm, head."""
    size = min(machine["forward"], key=lambda size: abs(int(size) - microbatch_size))
    seconds = [forward + backward for forward, backward in
               zip(machine["forward"][size], machine["backward"][size], strict=True)]
    head_parameters = parameters[-1] or parameters[0]  # a tied head has the embedding's
    return Speed(seconds[0] / parameters[0], sum(seconds[1:-2]) / sum(parameters[1:-2]),
                 sum(seconds[-2:]) / head_parameters, sum(seconds) + machine.get("microbatch_overhead", 0.0))


def layers_by_speed(model: torch.nn.Module, speeds: list[Speed] | None, num_stages: int) -> list[int]:
    """Decoder layers of each stage, stage k on rank k, so that the slowest stage takes the shortest time.

    The first stage has the embedding besides its layers, the last one the head: in a small model that is many layers'
    worth. Raises UserError where there are fewer layers than stages.
    """
    names = PipelineTemplate.get_modules(model)
    sizes = [sum(param.numel() for param in model.get_submodule(name).parameters()) for name in names]
    layers = [k for k, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
    embedding, layer, head = sum(sizes[:layers[0]]), sizes[layers[0]], sum(sizes[layers[-1] + 1:])
    if len(layers) < num_stages:
        raise UserError(f"{num_stages} stages for a model of {len(layers)} decoder layers: each needs at least one, "
                         f"start at most {len(layers)} processes")
    speeds, besides = speeds or [EQUALLY_FAST] * num_stages, [0.0] * num_stages
    besides[0] += embedding * speeds[0].embedding
    besides[-1] += head * speeds[-1].head
    return shares_by_speed(len(layers), [layer * speed.layers for speed in speeds], besides=besides)
