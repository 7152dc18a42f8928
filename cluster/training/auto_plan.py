"""Where a machine can't hold the model, and neither --pipelines nor --plan is given, the machines plan by themselves.

    1. may every machine hold the whole model?    a rough bound, and what it has free: then nothing more happens
    2. the rank with the most free memory measures what each module takes, all ranks measure their speeds and links
    3. one rank looks for the best plan: without recomputation if one fits, else with it. The others get it from there
    4. ranks are numbered anew in the order of the plan. Machines that it leaves idle wait for the end of the training
"""

import argparse
import atexit
import datetime
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from planning.clock import StageClock
from planning.machines import Cluster, Pipeline, Setting
from planning.measure import describe_machines, measure_with
from planning.search import Plans, find_plans
from planning.simulate import peak_memory
from training.common import from_home, gather
from training.machine_facts import (
    free_memory, home_rank, host_names, once_per_machine, ranks_of_this_machine, return_freed_memory, this_host,
)
from training.lora import Lora
from training.models import is_ours, of_transformers, our_llama
from checkpoints.survive import is_elastic
from utils import UserError, read_config, to_readable_format

SECONDS, FRACTION = 12.0, 0.9  # of measuring; of the free memory that may be used
ROUGHLY = 50  # numbers that a layer keeps for each number of a hidden state, at most


class Chosen(NamedTuple):
    """A plan for these machines. `order`: the ranks as they were, in the order that they get; `seconds`: of each
    pipeline for a micro-batch, for other shares of it."""

    order: list[int]
    layers: list[list[int]]
    num_microbatches: list[int]
    schedule: str
    recompute: bool
    seconds: list[float]
    text: str


def plan_by_itself(args, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a plan was necessary: then it is in the flags, and ranks have the order of the plan. Collective.

    Call it before any process group is made besides the default one, which is made anew. Raises UserError where the
    model does not fit into all machines together, and what whole_model raises.
    """
    if args.pipelines or args.plan or args.tp_size > 1 or args.local_steps:
        return False
    model, lora = whole_model(args, device, dtype)
    free, hosts = zip(*gather((free_memory(device), this_host())))
    if rough_bytes(args, model, dtype, lora) < FRACTION * min(free):
        return False
    return_freed_memory()
    if dist.get_rank() == 0:
        listed = ", ".join(f"{host} {room / 1e9:.2f}" for host, room in zip(host_names(hosts), free))
        print(f"the whole model may not fit into every machine's free memory (GB: {listed}): measuring", flush=True)
    data = measure(args, model, device, dtype, lora)
    if dist.get_rank() == 0:
        print(describe_machines(data, ()), flush=True)
    chosen = from_home(lambda: choose(args, data))
    if chosen is None:
        return False
    args.pipelines, args.num_microbatches = [chosen.layers], [chosen.num_microbatches]
    args.pp_engine, args.recompute, args.pipeline_seconds = chosen.schedule, chosen.recompute, chosen.seconds
    if dist.get_rank() == 0:
        print(chosen.text, flush=True)
    take_place(chosen.order)
    return True


def whole_model(args, device: torch.device, dtype: torch.dtype) -> tuple[torch.nn.Module, Lora | None]:
    """The model of args.model_name on the meta device, and its adapters with args.lora_rank. Collective.

    Raises UserError as make_model does.
    """
    fields, args = once_per_machine(lambda: read_config(args.model_name)), argparse.Namespace(**vars(args))
    if fields.get("model_type") == "llama" and is_ours(fields) and not args.lora_rank:
        return our_llama(args, device, dtype, None).model, None
    made = of_transformers(args, fields, device, dtype, None, has_weights=True)
    return made.model, made.lora


def rough_bytes(args, model: torch.nn.Module, dtype: torch.dtype, lora) -> float:
    """More than the whole model takes on one machine, without measuring anything."""
    config, tokens = model.config, args.batch_size * args.seq_len
    numbers = sum(param.numel() for param in model.parameters())
    weights = dtype.itemsize * numbers + 18 * lora.num_trained if lora else 24 * numbers
    kept = ROUGHLY * config.hidden_size * config.num_hidden_layers + 6 * config.vocab_size
    return weights + 4.0 * tokens * kept


def measure(args, model: torch.nn.Module, device: torch.device, dtype: torch.dtype, lora) -> dict:
    """The content of cluster.json, with micro-batches of 1 and of args.batch_size samples. Collective."""
    clock = StageClock(model, args.seq_len, dtype, device, lora)
    free = gather(free_memory(device))
    roomiest, known = free.index(max(free)), None
    try:
        known = clock.measure_memory(max(free)) if dist.get_rank() == roomiest else None
    except ValueError as error:
        known = error
    if isinstance(known := gather(known)[roomiest], ValueError):
        raise known
    clock.known = known
    sizes = sorted({1, args.batch_size})
    data = {**measure_with(clock, args.model_name, tuple(sizes), SECONDS), "flags": {}}
    for machine in data["machines"]:  # where there was no time or memory for a size: so many times the smallest
        for kind in ("forward", "backward"):
            for size in sizes[1:]:
                machine[kind].setdefault(str(size), [size * seconds for seconds in machine[kind]["1"]])
    return data


def choose(args, data: dict) -> Chosen | None:
    """The plan; None where every machine can hold the whole model. Raises UserError where nothing fits."""
    cluster, size = Cluster(data), args.batch_size
    n, layers = len(cluster.machines), cluster.num_layers
    total = sum(args.num_microbatches[0]) if args.num_microbatches else args.gradient_accumulation * n
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    whole = peak_memory(cluster, Pipeline((0,), (layers,), total), size, setting)[0]
    if all(whole <= FRACTION * machine.free_memory for machine in cluster.machines):
        return None
    schedule = "auto" if args.pp_engine == "1f1b" else args.pp_engine
    for recompute in sorted({args.recompute, True}):
        try:
            plans = find_plans(cluster, total * size, setting._replace(schedule=schedule, recompute=recompute), [size],
                               FRACTION)
            return as_chosen(cluster, plans)
        except ValueError:
            continue
    raise UserError(why_not(cluster, setting, size, total))


def as_chosen(cluster: Cluster, plans: Plans) -> Chosen:
    """The best of the plans, and what to say of it."""
    (pipelines, size, *_), result = plans.best[0]
    order, recompute = [rank for pipeline in pipelines for rank in pipeline.machines], plans.setting.recompute
    seconds, parts = [], []
    for machines, layers, number in pipelines:
        stages = zip(machines, cluster.stages(layers))
        seconds.append(max(cluster.seconds(rank, size, stage, plans.setting.kinds) for rank, stage in stages))
        shares = " -> ".join(f"{cluster.machines[rank].host} {count}" for rank, count in zip(machines, layers))
        parts.append(f"{shares} ({number} micro-batch{'es' * (number > 1)})")
    idle = [machine.host for rank, machine in enumerate(cluster.machines) if rank not in order]
    text = f"plan: decoder layers {'; '.join(parts)}{' | --recompute' * recompute}"
    text += f" | idle: {', '.join(idle)}" if idle else ""
    memory = []
    for rank in order:
        host, free, _, _, process = cluster.machines[rank]
        memory.append(f"{host} {(process + result.peak_memory[rank]) / 1e9:.2f} of {(process + free) / 1e9:.2f}")
    tokens = size * sum(pipeline.num_microbatches for pipeline in pipelines) * cluster.seq_len
    text += (f"\npredicted: {to_readable_format(tokens / result.step_seconds)} tokens/s, {result.step_seconds:.3g} s a "
             f"step; peak memory of the processes in GB: {', '.join(memory)}")
    return Chosen(order, [list(pipeline.layers) for pipeline in pipelines],
                  [pipeline.num_microbatches for pipeline in pipelines], plans.setting.schedule, recompute, seconds,
                  text)


def why_not(cluster: Cluster, setting: Setting, size: int, total: int) -> str:
    """One line: what the model needs, what there is, and what would fit."""
    def needed(size: int, recompute: bool) -> float:
        return peak_memory(cluster, Pipeline((0,), (cluster.num_layers,), total), size,
                           setting._replace(recompute=recompute))[0]

    has = ", ".join(f"{machine.host} {machine.free_memory / 1e6:.0f}" for machine in cluster.machines)
    more = needed(1, True) / FRACTION - sum(machine.free_memory for machine in cluster.machines)
    advice = (f"even --batch_size 1 --recompute needs {needed(1, True) / 1e6:.0f} MB: free about "
              f"{max(more, 1e8) / 1e6:.0f} MB more, or add machines, which share the model")
    for recompute in sorted({setting.recompute, True}) if size > 1 else ():
        try:
            find_plans(cluster, total, setting._replace(recompute=recompute), [1], FRACTION)
            advice = "--batch_size 1" + " --recompute" * (recompute and not setting.recompute) + " would fit"
            break
        except ValueError:
            continue
    return (f"not enough memory: with micro-batches of {size} samples of {cluster.seq_len} tokens the model needs "
            f"{needed(size, setting.recompute) / 1e6:.0f} MB on one machine, {needed(size, True) / 1e6:.0f} MB with "
            f"--recompute; free are, in MB: {has}, of which {FRACTION:.0%} may be used; {advice}")


def take_place(order: list[int]) -> None:
    """Makes the process group anew with the ranks in this order. Idle processes wait for the end, and exit."""
    rank, backend, store = dist.get_rank(), dist.get_backend(), dist.distributed_c10d._get_default_store()
    if order == list(range(dist.get_world_size())):
        return
    dist.barrier()
    dist.destroy_process_group()
    ranks_of_this_machine.cache_clear()
    home_rank.cache_clear()
    if rank not in order:
        try:
            store.wait(["ended"], datetime.timedelta(days=365))
        except RuntimeError:  # the store may end with rank 0's process
            sys.exit(1 if is_elastic() else 0)
        sys.exit(0)
    atexit.register(store.set, "ended", "")
    dist.init_process_group(backend, store=dist.PrefixStore("planned", store), rank=order.index(rank),
                            world_size=len(order), timeout=pgm.timeout)
