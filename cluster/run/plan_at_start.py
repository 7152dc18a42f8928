"""A plan: which machines share the model, and in which order. Ranks are numbered anew in the order of the plan.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it

cluster/plan.py wrote it, for --plan. Without --plan and --pipelines the machines plan by themselves where one of them
can't hold the model:

    1. if a rough bound of the whole model fits into what each machine has free, nothing more happens
    2. they measure themselves, as plan.py --measure does
    3. one rank looks for the best plan: without recomputation if one fits, else with it. The others get it from there
"""

import contextlib

import torch

from planning.machines import CLUSTER_JSON, Cluster, Pipeline, Setting
from planning.measure import describe_machines, measure_with
from planning.plan_file import machines_of, plan_of_file, require_same_model
from planning.profiler import LayerProfiler
from planning.report import as_plan, describe
from planning.search import Plans, find_plans
from planning.simulate import peak_memory
from ranks.collectives import gather, once, say
from ranks.memory import USABLE_MEMORY, free_memory, return_freed_memory
from ranks.placement import home_rank, host_names, machines
from utils import UserError

MEASURE_SECONDS = 12.0  # of measuring
ROUGHLY = 50  # numbers that a layer keeps for each number of a hidden state, at most


def find_plan(args, made, device: torch.device, dtype: torch.dtype) -> dict | None:
    """The content of plan.json: that of --plan, or one that the machines make by themselves. None where each of them
    can hold the whole model, and with --pipelines, --tp_size or --local_steps. Collective.

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
    n = len(cluster.machines)
    total = sum(args.num_microbatches[0]) if args.num_microbatches else args.gradient_accumulation * n
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    [whole] = peak_memory(cluster, Pipeline((0,), (cluster.num_layers,), total), size, setting)  # on one machine
    if all(whole <= USABLE_MEMORY * machine.free_memory for machine in cluster.machines):
        return None
    schedule = "auto" if args.pp_engine == "1f1b" else args.pp_engine
    plans = plans_that_fit(cluster, setting._replace(schedule=schedule), size, total)
    print("plan:", *describe(cluster, plans.best[0], plans.setting), sep="\n    ", flush=True)
    return as_plan(cluster, plans)


def plans_that_fit(cluster: Cluster, setting: Setting, size: int, total: int) -> Plans:
    """Those for `total` micro-batches of `size` samples, with recomputation only where none fits without it."""
    if not setting.recompute:
        with contextlib.suppress(UserError):
            return find_plans(cluster, total * size, setting, [size], USABLE_MEMORY)
    return find_plans(cluster, total * size, setting._replace(recompute=True), [size], USABLE_MEMORY)
