"""What the checks of exercises that count measure of several ranks: their messages, and schedules that are played."""

import functools
import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from counting_runs import llama
from lab.launch import STEPS
from lab.program import Program, StepModules
from lab.thread_ranks import World
from lab.watch.schedule import interleaved_stages, play

DP_TP = dict(vocab=32, hidden=16, width=24, heads=4, kv_heads=4, head_dim=4)


def small_llama(modules: StepModules, wrap: Callable | None = None, **shape: int):
    """On the CPU, in one process or as a part of one: wrap(model) cuts it, over tp ranks by default."""
    with torch.device("meta"):
        model = (wrap or modules.tensor_parallel.apply_tensor_parallel)(
            modules.model.Llama(llama(**{**DP_TP, **shape}).config))
    modules.model.init_weights(model, 0, torch.device("cpu"), modules.tensor_parallel.split_over_tp)
    return model


def on_grid(step: str, sizes: tuple[int, ...], make: Callable, program: Callable) -> tuple[list, World]:
    """What program(modules, make(modules)) returns on each rank of a grid, and their world. Its log begins after
    make(): a run opens its connections once."""
    world, source = World(math.prod(sizes)), Program(step)

    def main(rank: int):
        modules = source.load()
        modules.process_group_manager.setup_process_group_manager(*sizes)
        made = make(modules)
        torch.distributed.barrier()
        world.events.clear()
        torch.distributed.barrier()
        return program(modules, made)

    return world.run(main), world


@functools.cache
def tp_run(layers: int, hidden: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Bytes that a rank sends for a micro-batch, its sums over a ring, and FLOPs that it does."""
    def program(modules, model):
        group, ids = modules.process_group_manager.process_group_manager.tp_group, torch.zeros(1, tokens, dtype=int)
        modules.tensor_parallel.all_reduce = lambda tensor, op=torch.distributed.ReduceOp.SUM: (
            torch.distributed.all_reduce(tensor, op, group=group))
        with FlopCounterMode(display=False) as counter:
            modules.tensor_parallel.cross_entropy(model(ids), ids, 32).backward()
        return sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))

    flops, world = on_grid("8", (1, 1, ranks), lambda modules: small_llama(
        modules, layers=layers, hidden=hidden), program)
    return world.num_bytes(0), flops[0]


@functools.cache
def dp_run(ranks: int, microbatches: int, layers: int, limit: float | None = None) -> tuple[int, int]:
    """Bytes that a rank sends in an optimizer step, and its all-reduces."""
    def program(modules, model):
        for i in range(microbatches):
            model.require_backward_grad_sync = i == microbatches - 1
            model(torch.zeros(1, 4, dtype=int)).sum().backward()
        model.finish_gradient_sync()

    _, world = on_grid("8", (ranks, 1, 1), lambda modules: modules.data_parallel.DataParallelBucket(
        small_llama(modules, layers=layers), limit and limit / 1e6), program)
    return world.num_bytes(0), sum(event.kind == "all_reduce" and event.rank == 0 for event in world.events)


@functools.cache
def pipeline_run(stages: int, microbatches: int, tokens: int, hidden: int) -> list[int]:
    """Bytes that each stage sends in a step of 1F1B."""
    def program(modules, model):
        ids = torch.zeros(1, tokens, dtype=int)
        loader = type("Loader", (), {"gradient_accumulation_steps": microbatches,
                                     "__next__": lambda self: {"input_ids": ids, "target_ids": ids}})()
        modules.pipeline_parallel.run_schedule(
            modules.pipeline_parallel.one_f_one_b, modules.data_parallel.DataParallelBucket(model), loader,
            (1, tokens, hidden), torch.device("cpu"))

    _, world = on_grid("8", (1, stages, 1), lambda modules: small_llama(
        modules, modules.pipeline_parallel.PipelineParallel, hidden=hidden, layers=stages), program)
    return [sum(event.num_bytes for event in world.events if event.kind == "send" and event.rank == rank)
            for rank in range(stages)]


def played(step: str, schedule: str, stages: int, microbatches: int, *chunks: int, seconds: dict):
    """The schedule of a step, played with these seconds for its actions."""
    function = getattr(Program(step).load().pipeline_parallel, schedule, None) or getattr(
        Program(step).load().virtual_stages, schedule)
    actions = [list(function(stage, stages, microbatches, *chunks)) for stage in range(stages)]
    return play(actions, seconds, interleaved_stages(stages) if chunks else None)


@functools.cache
def rank_run(layers: int, hidden: int, width: int, dp: int, tp: int, pp: int, microbatches: int,
             tokens: int) -> list[int]:
    """Bytes of the second stage's first rank, by tools/dry_run.py: its weights, and what it sends over dp and pp."""
    from lab.watch.dry_run import run_rank
    from lab.watch.memory import Event
    from sizes.data_sheets import Shape  # before the modules of cluster/

    sizes = {"dp_size": dp, "tp_size": tp, "pp_size": pp, "gradient_accumulation_steps": microbatches,
             "seq_len": tokens, "micro_batch_size": 1, "model_name": "llama", "device": "cpu"}
    flags = [str(word) for name, size in sizes.items() for word in (f"--{name}", size)]
    rank = run_rank(STEPS["8"] / "train.py", flags, dp * tp * pp, tp, 8, lambda *_: 0.0, False,
                    {"llama": Shape(hidden, width, layers, 2, 2, 32, False, hidden // 2)})
    events = [each for each in rank.count.log if isinstance(each, Event) and each.kind != "receive"]
    sent = [sum(each.num_bytes for each in events if each.axis == axis and each.num_bytes > 8)
            for axis in ("dp", "pp")]
    return [rank.count.snapshots["after backward"]["weights"], *sent]
