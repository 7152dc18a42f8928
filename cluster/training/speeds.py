"""How fast each machine is, from cluster.json, and which share of the work it gets so that none waits for the slowest.

plan.py --measure writes cluster.json on the machine that starts it. A rank there reads it and tells the others.
"""

import os
from typing import NamedTuple

import torch

from pipeline_template import PipelineTemplate
from planning.machines import Cluster, Setting, load_cluster, model_facts
from planning.shares import shares_by_speed
from training.common import from_home, gather
from training.machine_facts import host_names, this_host
from checkpoints.survive import is_elastic
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


def measured_speeds(args, microbatch_size: int, dtype: torch.dtype, config=None) -> list[Speed] | None:
    """Each rank's speed, measured at the micro-batch size that is nearest. Collective.

    None in a run of one process, with --equal_shares, and where there is no cluster.json. `config`: of the model, where
    only speeds of this model are of use. Raises UserError for a file that can't be read, or that is for other machines
    or another order of them, another dtype or another model. In an elastic run any of its machines may be there.
    """
    here, path = gather(this_host()), args.cluster_json or CLUSTER_JSON

    def read() -> list[Speed] | None:
        if args.equal_shares or len(here) == 1 or (args.cluster_json is None and not os.path.exists(path)):
            return None
        try:
            cluster = load_cluster(path)
            hosts = host_names(here, cluster.hosts)
            run = {"hosts": hosts, "dtype": str(dtype).removeprefix("torch."),
                   **(model_facts(config) if config else {})}
            places = places_of(hosts, cluster.hosts) if is_elastic() else list(range(len(hosts)))
            if places is None:  # a host that came later: the run must not end for it
                print(f"equal shares, since {path} does not have all of {', '.join(hosts)}", flush=True)
                return None
            measured = {"hosts": hosts if is_elastic() else cluster.hosts, "dtype": cluster.dtype, **cluster.model}
            for name, value in run.items():
                if measured[name] != value:
                    raise UserError(f"{path} was measured with {name} {measured[name]}, but this run has {value}: "
                                    "measure again with plan.py --measure")
            kinds = Setting(recompute=args.recompute).kinds
            speeds = [speed_of(cluster, place, microbatch_size, kinds) for place in places]
        except ValueError as error:
            raise UserError(f"{error}, or use --equal_shares") from None
        print(f"speeds: {path}, measured with {cluster.model_name}", flush=True)
        return speeds

    return from_home(read)


def places_of(hosts: list[str], among: list[str]) -> list[int] | None:
    """For each of the hosts its place `among` others, each place once; None where one is not there."""
    left, places = list(among), []
    for host in hosts:
        if host not in left:
            return None
        places.append(left.index(host))
        left[places[-1]] = None
    return places


def speed_of(cluster: Cluster, rank: int, microbatch_size: int, kinds: str) -> Speed:
    size = min(cluster.sizes, key=lambda size: abs(size - microbatch_size))
    first, stop, end = cluster.first_layer, cluster.first_layer + cluster.num_layers, len(cluster.names)
    seconds = {part: cluster.seconds(rank, size, part, kinds) for part in ((0, first), (first, stop), (stop, end))}
    return Speed(*(value / max(1, cluster.parameters_of(part)) for part, value in seconds.items()),
                 whole_model=sum(seconds.values()))


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
