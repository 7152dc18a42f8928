"""Which rank holds which modules, takes which micro-batches, and by which schedule: decided once, before training.

Three things may decide it: a plan (see plan_file.py), --pipelines, or else each rank holds the whole model. Then a
step's micro-batches are shared out by speed, as cluster.json has it or as it is measured now, so that none waits for
the slowest. A step's samples are those of the checkpoint that a run goes on from, on however many machines.

In an elastic run the machines that are there change, and so does how micro-batches and layers are shared out.
--pipelines can say so itself, with '|' between the alternatives:

    --pipelines "4,2,2|5,3" --num_microbatches "8|8"     three stages on three machines, two stages on two
"""

import argparse
import contextlib
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
import train
from membership.watch import is_elastic
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from machine_facts import from_home, gather, host_names, machines, places_of, ranks_sharing, say
from pipeline_template import PipelineTemplate, Unsupported
from planning.clock import StageClock
from planning.machines import Cluster, Setting, model_facts, read_cluster, setting_of, some_of
from planning.schedules import SCHEDULES
from planning.shares import shares_by_speed
from training.compression import WIRE_DTYPES, compress
from utils import ROOT, UserError, positive_int

CLUSTER_JSON = os.path.join(ROOT, "cluster.json")  # plan.py --measure writes it on the machine that starts it
MEASURED = {"seconds": None}  # of this process's whole model: what it has measured, it knows in the next generation
BY_SPEED = "by speed"  # in the place of --pipelines: one pipeline over all ranks
DECIDED = {"pipelines": None, "num_microbatches": None, "gradient_accumulation": 8, "batch_size": 4, "tp_size": 1,
           "pp_engine": "1f1b", "wire_dtype": None, "gradient_wire_dtype": None,
           "recompute": False}  # the flags that a plan decides, and their defaults


def alternatives(text: str) -> list[list[list[int]]]:
    """The type of --pipelines: 8;5,3 or, for other numbers of machines, 4,2,2|5,3."""
    return [[train.counts(part) for part in choice.split(";")] for choice in text.split("|")]


def numbers(text: str) -> list[list[int]]:
    """The type of --num_microbatches: 6,2 or, for other numbers of machines, 6,2|8."""
    return [train.counts(choice) for choice in text.split("|")]


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch_size", type=positive_int, help="samples of a micro-batch (default: 4)")
    parser.add_argument("--gradient_accumulation", type=positive_int,
                        help="a step has so many micro-batches times the number of pipelines, shared out by speed "
                             "(default: 8)")
    parser.add_argument("--num_microbatches", type=numbers, metavar="6,2", help="instead: those of each pipeline")
    parser.add_argument("--pipelines", type=alternatives, metavar="8;5,3",
                        help="decoder layers of each stage, with ';' between pipelines (default: one stage a rank)")
    parser.add_argument("--tp_size", type=positive_int, help="tensor-parallel ranks of a stage (default: 1)")
    parser.add_argument("--pp_engine", choices=list(SCHEDULES), help="the pipelines' schedule (default: 1f1b)")
    parser.add_argument("--wire_dtype", choices=WIRE_DTYPES, help="what stages send hidden states and gradients as")
    parser.add_argument("--plan", metavar="PLAN.JSON", help="pipelines and schedule that cluster/plan.py chose")
    parser.set_defaults(**dict.fromkeys(DECIDED))


def check_layout_flags(args) -> None:
    """Fills in defaults. Raises UserError for flags beside a --plan that decides them."""
    if args.plan and (given := [name for name in DECIDED if getattr(args, name) is not None]):
        raise UserError(f"--plan says what runs where: leave out --{', --'.join(given)}")
    for name, default in DECIDED.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


@dataclass(frozen=True)
class Layout:
    """`templates`: the modules of each stage, pipeline after pipeline; ranks are counted in this order, `tp_size` to a
    stage. `num_microbatches`: of an optimizer step, that each pipeline takes. `setting`: the schedule, what travels in
    which dtype, and whether layers are computed again. `local_steps`: of a round, for each rank, where ranks take them;
    the micro-batches are then those of a round."""

    templates: list[PipelineTemplate]
    num_microbatches: list[int]
    micro_batch_size: int
    tp_size: int
    setting: Setting
    local_steps: list[int] | None = None

    def form(self, args, config) -> HeterogeneousParallelPlugin:
        """Makes the groups of ranks: the plugin that trains by this layout. Collective. Raises UserError."""
        plugin = HeterogeneousParallelPlugin(self.tp_size, self.micro_batch_size, args.dtype, args.device,
                                             SCHEDULES[self.setting.schedule], self.setting.recompute)
        if self.local_steps:
            say(f"local steps of a round: {', '.join(map(str, self.local_steps))}")
        say(f"micro-batches of a {'round' if self.local_steps else 'step'}, of {self.micro_batch_size} samples each: "
            f"{', '.join(map(str, self.num_microbatches))}")
        plugin.set_pipelines(self.templates, self.num_microbatches)
        if self.tp_size > 1:
            kinds, rows = gather(plugin.device.type), torch.cat(pgm.process_group_manager.ranks).tolist()
            if any(len({kinds[rank] for rank in row}) > 1 for row in rows):
                raise UserError(f"--tp_size {self.tp_size}, and ranks of one stage compute on unlike devices, by rank: "
                                f"{', '.join(kinds)}: order the hosts so that they are alike, or leave out --tp_size")
        compress(plugin, config, self.setting.wire_dtype, self.setting.gradient_wire_dtype)
        return plugin

    def as_flags(self) -> dict:
        """What a run records of it."""
        layers = [[sum(name.rpartition(".")[2].isdigit() for name in stage) for stage in template.modules_per_stage]
                  for template in self.templates]
        setting = self.setting._asdict()
        return {"pipelines": [layers], "num_microbatches": [self.num_microbatches], "batch_size": self.micro_batch_size,
                "pp_engine": setting.pop("schedule"), **setting}


def choose_layout(args, made, plan: dict | None, found, device: torch.device, dtype: torch.dtype) -> Layout:
    """`made`: a Model. `plan`: what find_plan returned. `found`: the checkpoint to go on from, or None. Collective.

    Raises UserError for what is not possible.
    """
    def templates_of(pipelines: list[list[int]]) -> list[PipelineTemplate]:
        return [PipelineTemplate.from_layers_per_stage(made.model, layers) for layers in pipelines]

    if plan:
        shares, size = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]], plan["micro_batch_size"]
        total = micro_batches_of(found, size)
        if total not in (None, sum(shares)) and (is_elastic() or "seconds" in plan):  # else run.check refuses it
            shares = shares_by_speed(total, plan.get("seconds") or [1 / count for count in shares])  # as planned
        return Layout(templates_of([pipeline["layers"] for pipeline in plan["pipelines"]]), shares, size, 1,
                      setting_of(plan))
    pipelines, shares = choose_pipelines(args, made.model, dtype)
    templates, local_steps = templates_of(pipelines), None
    shares = choose_shares(args, made, len(pipelines), shares, micro_batches_of(found, args.batch_size), device, dtype)
    if args.local_steps and args.num_microbatches:  # local steps of unlike sizes, equally many on all ranks
        local_steps, shares = [args.local_steps] * len(shares), [args.local_steps * count for count in shares]
    elif args.local_steps:
        local_steps, shares = shares, [args.gradient_accumulation * count for count in shares]
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    if is_elastic():  # with fewer machines there may be nothing to send
        setting = setting.for_pipelines(pipelines)
    return Layout(templates, shares, args.batch_size, args.tp_size, setting, local_steps)


def micro_batches_of(found, size: int) -> int | None:
    """The micro-batches of a step that a checkpoint has decided, of `size` samples each; None in a new run."""
    if found is None:
        return None
    count, left_over = divmod(found.state["global_batch"], size)
    if left_over:
        raise UserError(f"--batch_size {size} does not divide the {found.state['global_batch']} samples of a step of "
                        f"{found.path}: choose one that does")
    return count


def choose_pipelines(args, model: torch.nn.Module, dtype: torch.dtype) -> tuple[list[list[int]], list[int] | None]:
    """The layers of each stage of each pipeline, and --num_microbatches for them. Collective."""
    num_stages, left_over = divmod(dist.get_world_size(), args.tp_size)
    if left_over:
        raise UserError(f"--tp_size {args.tp_size} does not divide the {dist.get_world_size()} processes: start a "
                        f"multiple of it")
    told = args.num_microbatches or [None]
    if not args.pipelines:
        return [[model.config.num_hidden_layers]] * num_stages, told[0]
    choices = [] if args.pipelines == BY_SPEED else args.pipelines
    for number, pipelines in enumerate(choices):
        if sum(map(len, pipelines)) == num_stages or len(choices) == 1 and not is_elastic():
            return pipelines, told[min(number, len(told) - 1)]  # where the only one does not fit, set_pipelines says so
    if choices and not is_elastic():
        raise UserError(f"--pipelines has no alternative with {num_stages} stages in all: that many x tp_size="
                        f"{args.tp_size} processes are here")
    measured = measured_speeds(args, args.batch_size, dtype)
    layers = layers_by_speed(model, measured if args.tp_size == 1 else None, num_stages)
    say(f"decoder layers of the stages: {', '.join(map(str, layers))}")
    return [layers], told[0]


def choose_shares(args, made, count: int, told: list[int] | None, total: int | None, device, dtype) -> list[int]:
    """Micro-batches of a step for each of `count` pipelines: as told, or by speed: measured before, or now. Collective.

    `total`: their sum, where a checkpoint has decided it.
    """
    if told:
        if len(told) == count and (total in (None, sum(told)) or not is_elastic()):
            return told  # run.check says what the checkpoint has instead
        if not is_elastic():
            raise UserError(f"--num_microbatches {','.join(map(str, told))}: write {count} numbers, one per pipeline, "
                            "with commas between them")
        total = total or sum(told)
    total = total or (args.local_steps or args.gradient_accumulation) * count
    if total < count:
        raise UserError(f"a step has {total} micro-batches, fewer than the {count} pipelines: lower --batch_size, or "
                        "start fewer processes")
    seconds = [1.0] * count
    if not args.equal_shares and count == dist.get_world_size() > 1:  # each rank has a whole model
        if measured := measured_speeds(args, args.batch_size, dtype, made.model.config):
            seconds = measured.seconds_of_whole()
        else:
            with contextlib.suppress(Unsupported):  # then all are taken as equally fast
                ranks_sharing(device)  # asked while one measures alone; the first call is collective
                dist.barrier()
                if MEASURED["seconds"] is None:
                    clock = StageClock(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
                    MEASURED["seconds"] = clock.seconds_of_whole(args.batch_size, args.recompute)
                seconds = gather(MEASURED["seconds"])
        speeds = ", ".join(f"{args.batch_size * args.seq_len / value:.0f}" for value in seconds)
        say(f"tokens/s of each rank alone: {speeds}")
    return shares_by_speed(total, seconds)


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
            data = read_cluster(path)
            cluster = Cluster(data)
            hosts = host_names(here, cluster.hosts)
            if is_elastic():
                if None in (places := places_of(hosts, cluster.hosts)):  # it came later: the run must not end for it
                    print(f"equal shares, since {path} does not have all of {', '.join(hosts)}", flush=True)
                    return None
                cluster = Cluster(some_of(data, places))
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
    names = PipelineTemplate.get_modules(model)
    sizes = [sum(param.numel() for param in model.get_submodule(name).parameters()) for name in names]
    layers = [k for k, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
    embedding, layer, head = sum(sizes[:layers[0]]), sizes[layers[0]], sum(sizes[layers[-1] + 1:])
    if len(layers) < num_stages:
        raise UserError(f"{num_stages} stages for a model of {len(layers)} decoder layers: each needs at least one, "
                        f"start at most {len(layers)} processes")
    each, besides = [1.0 * layer] * num_stages, [0.0] * (num_stages - 1) + [1.0 * head]  # looking up takes no time
    if measured:
        cluster, first = measured.cluster, measured.cluster.first_layer
        stop, end = first + cluster.num_layers, len(cluster.names)
        each, besides = cluster.layer_seconds(range(num_stages), measured.size, measured.kinds)
        each = [seconds * layer * cluster.num_layers / max(1, cluster.parameters_of((first, stop))) for seconds in each]
        besides[0] *= embedding / max(1, cluster.parameters_of((0, first)))
        besides[-1] *= head / max(1, cluster.parameters_of((stop, end)))
    return shares_by_speed(len(layers), each, besides=besides)
