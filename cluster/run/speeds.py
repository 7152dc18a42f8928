"""How fast the ranks' machines are, as cluster.json has it or as it is measured now, and what each takes by it."""

import contextlib
import operator
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.causal import parts_of
from pipeline_template import Unsupported
from planning.profiler import LayerProfiler
from planning.machines import CLUSTER_JSON, Cluster, Setting, load_cluster, model_facts
from planning.shares import shares_by_speed
from ranks.collectives import gather, say
from ranks.lost import is_elastic
from ranks.placement import from_home, host_names, machines, positions_of, ranks_sharing
from utils import UserError

MOST, GAIN = 1 << 20, 0.03  # samples of a step, which are dealt one by one; see samples_by_speed
MEASURED = {"seconds": None}  # of this process's whole model: what it has measured, it knows in the next generation


def choose_shares(args, made, count: int, told: list[int] | None, total: int | None, device, dtype) -> list[int]:
    """What each of `count` pipelines takes: as `told`, or else by speed, as it was measured before or is now.

    Collective. These are samples of a step. With --local_steps they are samples of a local step where `told`, the
    numbers of micro-batches, is given, and else the local steps of a round.
    `total`: the samples of a step, where a checkpoint has decided it.
    """
    size, ranks = args.batch_size, dist.get_world_size()
    if told and len(told) == count and (total in (None, size * sum(told)) or not is_elastic()):
        return [size * number for number in told]  # Start.check says what the checkpoint has instead
    if told and not is_elastic():
        raise UserError(f"--num_microbatches {','.join(map(str, told))}: write {count} numbers, one per pipeline, with "
                        "commas between them")
    total = total or size * sum(told or ()) or (args.local_steps or size * args.gradient_accumulation) * count
    if not count <= total <= MOST:
        raise UserError(f"{total} {'local steps a round' if args.local_steps else 'samples a step'} for {count} "
                        f"pipelines: choose {count} to {MOST}, or start fewer processes")
    seconds = [1.0] * count
    if not args.equal_shares and count * args.tp_size == ranks and count > 1:  # each pipeline is one stage
        if measured := measured_speeds(args, size, dtype, made.model.config):
            seconds = measured.seconds_of_whole()
        else:
            with contextlib.suppress(Unsupported):  # then all are taken as equally fast
                ranks_sharing(device)  # asked while one measures alone; the first call is collective
                dist.barrier()
                if MEASURED["seconds"] is None:
                    profiler = LayerProfiler(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
                    MEASURED["seconds"] = profiler.seconds_of_whole(size, args.recompute)
                seconds = gather(MEASURED["seconds"])
        say(f"tokens/s of each rank alone: {', '.join(f'{size * args.seq_len / value:.0f}' for value in seconds)}")
        seconds = [max(seconds[k : k + args.tp_size]) for k in range(0, ranks, args.tp_size)]  # the slowest of a stage
    if args.local_steps:
        return shares_by_speed(total, seconds)
    return samples_by_speed(total, size, seconds, has_router_loss(made.model.config))


def has_router_loss(config) -> bool:
    """Whether the loss is another one where a step's samples are cut into other micro-batches: of a mixture of experts.
    """
    return bool(getattr(config, "output_router_logits", False))


def samples_by_speed(total: int, size: int, seconds: list[float], is_whole: bool = False) -> list[int]:
    """`total` samples, dealt to ranks that need `seconds` for `size` of them. Where that makes the step shorter by less
    than GAIN, ranks take whole micro-batches: a part of one takes longer than its samples' part of the time. They do so
    in any case with `is_whole`, if the samples make enough of them."""
    shares, (number, left_over) = shares_by_speed(total, seconds), divmod(total, size)
    if left_over or number < len(seconds):
        return shares
    whole = [size * share for share in shares_by_speed(number, seconds)]
    longest, shortest = (max(map(operator.mul, each, seconds)) for each in (whole, shares))
    return shares if longest > (1 + GAIN) * shortest and not is_whole else whole


class Measured(NamedTuple):
    """The ranks' machines as cluster.json has them, rank by rank. `size`: the micro-batch size measured that is nearest
    to the run's; `kinds`: of passes that a micro-batch takes."""

    cluster: Cluster
    size: int
    kinds: str

    def seconds_of_whole(self) -> list[float]:
        """Of the measured model for a micro-batch, rank by rank."""
        whole = (0, len(self.cluster.names))
        return [self.cluster.seconds(rank, self.size, whole, self.kinds) for rank in range(len(self.cluster.machines))]


def measured_speeds(args, microbatch_size: int, dtype: torch.dtype, config=None) -> Measured | None:
    """What cluster.json says of these ranks' machines. Collective.

    None in a run of one process, with --equal_shares, and where there is no cluster.json. `config`: of the model, where
    only speeds of this model are of use. Raises UserError for a file that can't be read, or that is for other machines
    or another order of them, another dtype or another model. In an elastic run any of its machines may be there.
    """
    here, path = machines(), args.cluster_json or CLUSTER_JSON

    def read() -> Measured | None:
        if args.equal_shares or len(here) == 1 or (args.cluster_json is None and not os.path.exists(path)):
            return None
        try:
            cluster = load_cluster(path)
            hosts = host_names(here, cluster.hosts)
            if is_elastic():
                if None in (positions := positions_of(hosts, cluster.hosts)):  # it came later: the run goes on
                    print(f"equal shares, since {path} does not have all of {', '.join(hosts)}", flush=True)
                    return None
                cluster = cluster.only(positions)
            run = {"hosts": hosts, "dtype": str(dtype).removeprefix("torch."),
                   **(model_facts(config) if config else {})}
            measured = {"hosts": cluster.hosts, "dtype": cluster.dtype, **cluster.model}
            for name, value in run.items():
                if measured[name] != value:
                    raise UserError(f"{path} was measured with {name} {measured[name]}, but this run has {value}: "
                                    "measure again with plan.py --measure")
            size = min(cluster.sizes, key=lambda size: abs(size - microbatch_size))
        except ValueError as error:
            raise UserError(f"{error}, or use --equal_shares") from None
        print(f"speeds: {path}, measured with {cluster.model_name}", flush=True)
        return Measured(cluster, size, Setting(recompute=args.recompute).kinds)

    return from_home(read)


def layers_by_speed(model: torch.nn.Module, measured: Measured | None, num_stages: int) -> list[int]:
    """Decoder layers of each stage, stage k on rank k, so that the slowest stage takes the shortest time.

    The first stage has the embedding besides its layers, the last one the head: in a small model that is many layers'
    worth. Seconds go by parameters, because the model that is trained need not be the one that was measured. Raises
    UserError where there are fewer layers than stages.
    """
    embedding, layer, head, count = parts_of(model)
    if count < num_stages:
        raise UserError(f"{num_stages} stages for a model of {count} decoder layers: each needs at least one, "
                        f"start at most {count} processes")
    each, besides = [1.0 * layer] * num_stages, [0.0] * (num_stages - 1) + [1.0 * head]  # looking up takes no time
    if measured:
        cluster = measured.cluster
        first, stop = cluster.layers
        each, besides = cluster.layer_seconds(range(num_stages), measured.size, measured.kinds)
        measured_layer = max(1, cluster.parameters_of(cluster.layers)) / cluster.num_layers
        each = [seconds * layer / measured_layer for seconds in each]
        besides[0] *= embedding / max(1, cluster.parameters_of((0, first)))
        besides[-1] *= head / max(1, cluster.parameters_of((stop, len(cluster.names))))
    return shares_by_speed(count, each, besides=besides)
