"""Who holds which modules and takes which samples, decided when a run starts: by a plan, by flags, or by speed.

A plan says which machines share the model, and in which order. Ranks are numbered anew in the order of the plan.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it

cluster/plan.py wrote it, for --plan. Without --plan, --pipelines, --tp_size and --local_steps the machines plan by
themselves where one of them can't hold the model:

    1. if a rough bound of the whole model fits into what each machine has free, nothing more happens
    2. they measure themselves, as plan.py --measure does
    3. one rank looks for the best plan: without recomputation if one fits, else with it. The others get it from there

Without a plan the pipelines are those of --pipelines, or else each rank holds the whole model. Then a step's samples
are shared out by speed, as it is measured now, so that none waits for the slowest. A step's samples are those of the
checkpoint that a run goes on from, on however many machines.
"""

import contextlib
import statistics

import torch
import torch.distributed as dist

from models.causal import parts_of
from models.loss import has_router_loss
from pipeline_template import PipelineTemplate, Unsupported
from planning.machines import CLUSTER_JSON, Cluster, Pipeline, Setting, setting_of
from planning.measure import describe_machines, measure_with
from planning.plan_file import as_plan, describe, machines_of, plan_of_file, require_same_model, samples_of
from planning.profiler import LayerProfiler
from planning.search import find_plans
from planning.shares import layers_by_speed, samples_by_speed, shares_by_speed
from planning.simulate import peak_memory
from ranks.collectives import gather, once, say
from ranks.lost import is_elastic
from ranks.memory import USABLE_MEMORY, free_memory, return_freed_memory
from ranks.placement import home_rank, host_names, machines, ranks_sharing
from run.layout import BY_SPEED, Layout
from utils import UserError

MEASURE_SECONDS = 12.0  # of measuring for a plan
ROUGHLY = 50  # numbers that a layer keeps for each number of a hidden state, at most
MOST = 1 << 20  # samples of a step, which are dealt one by one
MEASURED = []  # seconds of the modules: what this process has measured, it knows in the next generation


def find_plan(args, made, device: torch.device, dtype: torch.dtype) -> dict | None:
    """The content of plan.json, or None: see above. Collective.

    Raises UserError, on all ranks, for a plan that can't be read, or is for other hosts or another model, and where the
    model does not fit into all machines together.
    """
    if args.plan:
        plan = plan_of_file(args.plan, CLUSTER_JSON)
        used = machines_of(plan)
        idle = [host for rank, host in enumerate(plan["hosts"]) if rank not in used]
        say(f"ranks in the order of {args.plan}: {', '.join(plan['hosts'][rank] for rank in used)}"
            f"{' | idle: ' * bool(idle)}{', '.join(idle)}")
        require_same_model(plan, made.model.config, str(dtype).removeprefix("torch."), args)
        return plan
    if args.pipelines or args.tp_size > 1 or args.local_steps:
        return None
    free = gather(free_memory(device))
    if rough_bytes(args, made, dtype) < USABLE_MEMORY * min(free):
        return None
    return_freed_memory()
    listed = ", ".join(f"{host} {room / 1e9:.2f}" for host, room in zip(host_names(machines()), free))
    say(f"the whole model may not fit into every machine's free memory (GB: {listed}): measuring")
    data = measure(args, made, device, dtype)
    say(describe_machines(data, ()))
    return once(home_rank(), lambda: choose(args, data))


def rough_bytes(args, made, dtype: torch.dtype) -> float:
    """More than the whole model takes on one machine, without measuring anything."""
    config, lora, tokens = made.model.config, made.lora, args.batch_size * args.seq_len
    numbers = sum(param.numel() for param in made.model.parameters())
    weights = lora.frozen_bytes + 18 * lora.num_trained if lora else 24 * numbers
    kept = ROUGHLY * config.hidden_size * config.num_hidden_layers + 6 * config.vocab_size
    return weights + 4.0 * tokens * kept


def measure(args, made, device: torch.device, dtype: torch.dtype) -> dict:
    """The content of cluster.json, with micro-batches of 1 and of args.batch_size samples. Collective."""
    profiler = LayerProfiler(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
    sizes = sorted({1, args.batch_size})
    data = {**measure_with(profiler, args.model_name, tuple(sizes), MEASURE_SECONDS), "flags": {}}
    for machine in data["machines"]:  # where there was no time or memory for a size: so many times the smallest
        for kind in ("forward", "backward"):
            for size in sizes[1:]:
                machine[kind].setdefault(str(size), [size * seconds for seconds in machine[kind]["1"]])
    return data


def choose(args, data: dict) -> dict | None:
    """The plan; None where every machine can hold the whole model. Prints it. Raises UserError where nothing fits."""
    cluster, size = Cluster(data), args.batch_size
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    n = len(cluster.machines)
    total = sum(args.num_microbatches[0]) if args.num_microbatches else args.gradient_accumulation * n
    [whole] = peak_memory(cluster, Pipeline((0,), (cluster.num_layers,), total), size, setting)  # on one machine
    if all(whole <= USABLE_MEMORY * machine.free_memory for machine in cluster.machines):
        return None
    if args.pp_engine == "1f1b":
        setting = setting._replace(schedule="auto")
    best = find_plans(cluster, total * size, setting, [size], may_recompute=True).best[0]
    print("plan:", *describe(cluster, best), sep="\n    ", flush=True)
    return as_plan(cluster, best)


def choose_layout(args, made, plan: dict | None, found, device: torch.device, dtype: torch.dtype) -> Layout:
    """`made`: a Model. `plan`: what find_plan returned. `found`: the checkpoint to go on from, or None. Collective.

    Raises UserError for what is not possible.
    """
    def templates_of(pipelines: list[list[int]]) -> list[PipelineTemplate]:
        return [PipelineTemplate.from_layers_per_stage(made.model, layers) for layers in pipelines]

    total = found and found.state["global_batch"]  # of a step: what a checkpoint has decided
    if plan:
        shares, size = samples_of(plan), plan["micro_batch_size"]
        if total not in (None, sum(shares)) and (is_elastic() or not args.plan):  # else Start.check refuses it
            shares = shares_by_speed(total, [1 / count for count in shares])  # as planned
        return Layout(templates_of([pipeline["layers"] for pipeline in plan["pipelines"]]), shares, size,
                      setting_of(plan))
    pipelines, told = choose_pipelines(args, made, device, dtype)
    templates, local_steps = templates_of(pipelines), None
    unit = args.local_steps if args.num_microbatches else args.batch_size * args.gradient_accumulation
    if total and args.local_steps and not args.num_microbatches:
        total //= unit
    shares = choose_shares(args, made, len(pipelines), told, total, device, dtype)
    if args.local_steps:  # of unlike sizes, equally many on all ranks; or else all of one size
        local_steps = [args.local_steps] * len(shares) if args.num_microbatches else shares
        shares = [unit * count for count in shares]
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    return Layout(templates, shares, args.batch_size, setting.for_pipelines(pipelines), local_steps, args.tp_size)


def choose_pipelines(args, made, device, dtype) -> tuple[list[list[int]], list[int] | None]:
    """The layers of each stage of each pipeline, and --num_microbatches for them. Collective."""
    told, tp_size = args.num_microbatches or [None], args.tp_size
    num_stages, left_over = divmod(dist.get_world_size(), tp_size)
    if left_over:
        raise UserError(f"--tp_size {args.tp_size} does not divide the {dist.get_world_size()} processes: start a "
                        "multiple of it")
    if not args.pipelines:
        return [[made.model.config.num_hidden_layers]] * num_stages, told[0]
    choices = [] if args.pipelines == BY_SPEED else args.pipelines
    for number, pipelines in enumerate(choices):
        if sum(map(len, pipelines)) == num_stages or len(choices) == 1 and not is_elastic():
            return pipelines, told[min(number, len(told) - 1)]  # where the only one does not fit, set_pipelines says so
    if choices and not is_elastic():
        raise UserError(f"--pipelines has no alternative with {num_stages} stages in all: that many x tp_size="
                        f"{tp_size} processes are here")
    measured = measured_speeds(args, made, device, dtype) if tp_size == 1 else None
    layers = layers_of_stages(made.model, measured, num_stages)
    say(f"decoder layers of the stages: {', '.join(map(str, layers))}")
    return [layers], told[0]


def layers_of_stages(model: torch.nn.Module, measured: list[list[float]] | None, num_stages: int) -> list[int]:
    """Decoder layers of each stage, stage k on rank k, so that the slowest stage takes the shortest time. `measured`:
    as measured_speeds returned it; without it seconds go by parameters, of which an embedding's take no time. Raises
    UserError where there are fewer layers than stages.
    """
    _, layer, head, count = parts_of(model)
    if count < num_stages:
        raise UserError(f"{num_stages} stages for a model of {count} decoder layers: each needs at least one, "
                        f"start at most {count} processes")
    return layers_by_speed(count, [(first, statistics.fmean(layers), last) for first, *layers, last in measured]
                           if measured else [(0.0, layer, head)] * num_stages)


def choose_shares(args, made, count: int, told: list[int] | None, total: int | None, device, dtype) -> list[int]:
    """What each of `count` pipelines takes: as `told`, or else by speed, as it is measured, of a checkpoint's `total`.

    Collective. These are samples of a step. With --local_steps they are samples of a local step where `told`, the
    numbers of micro-batches, is given, and else the local steps of a round.
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
    if count * args.tp_size == ranks and (measured := measured_speeds(args, made, device, dtype)):  # a stage each
        seconds = [sum(modules) for modules in measured]
        say(f"tokens/s of each rank alone: {', '.join(f'{size * args.seq_len / value:.0f}' for value in seconds)}")
        seconds = [max(seconds[k : k + args.tp_size]) for k in range(0, ranks, args.tp_size)]  # the slowest of a stage
    if args.local_steps:
        return shares_by_speed(total, seconds)
    return samples_by_speed(total, size, seconds, has_router_loss(made.model.config))


def measured_speeds(args, made, device: torch.device, dtype: torch.dtype) -> list[list[float]] | None:
    """Of each rank the seconds of each module of the whole model for a micro-batch: what is before the decoder layers,
    these, what is behind. Collective.

    None in a run of one process, with --equal_shares, and for a model that can't be timed. `made`: a Model.
    """
    if args.equal_shares or dist.get_world_size() == 1:
        return None
    ranks_sharing(device)  # asked while one measures alone; the first call is collective
    dist.barrier()
    with contextlib.suppress(Unsupported):
        if not MEASURED:
            profiler = LayerProfiler(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
            MEASURED.extend(profiler.seconds_of_modules(args.batch_size, args.recompute))
        return gather([*MEASURED])
    return None
