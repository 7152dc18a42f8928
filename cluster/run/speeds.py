"""How fast the ranks' machines are, as they measure it now, and what each takes by it."""

import contextlib
import operator
import statistics

import torch
import torch.distributed as dist

from models.causal import parts_of
from pipeline_template import Unsupported
from planning.profiler import LayerProfiler
from planning.shares import shares_by_speed
from ranks.collectives import gather, say
from ranks.lost import is_elastic
from ranks.placement import ranks_sharing
from utils import UserError

MOST, GAIN = 1 << 20, 0.03  # samples of a step, which are dealt one by one; see samples_by_speed
MEASURED = []  # seconds of the modules: what this process has measured, it knows in the next generation


def choose_shares(args, made, count: int, told: list[int] | None, total: int | None, device, dtype) -> list[int]:
    """What each of `count` pipelines takes: as `told`, or else by speed, as it is measured.

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
    if count * args.tp_size == ranks and (measured := measured_speeds(args, made, device, dtype)):  # a stage each
        seconds = [sum(modules) for modules in measured]
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


def layers_by_speed(model: torch.nn.Module, measured: list[list[float]] | None, num_stages: int) -> list[int]:
    """Decoder layers of each stage, stage k on rank k, so that the slowest stage takes the shortest time.

    The first stage has the embedding besides its layers, the last one the head: in a small model that is many layers'
    worth. `measured`: as measured_speeds returned it; without it seconds go by parameters. Raises UserError where there
    are fewer layers than stages.
    """
    _, layer, head, count = parts_of(model)
    if count < num_stages:
        raise UserError(f"{num_stages} stages for a model of {count} decoder layers: each needs at least one, "
                        f"start at most {count} processes")
    measured = measured or [[0.0, *[layer] * count, head]] * num_stages  # looking up takes no time
    besides = [0.0] * num_stages
    besides[0], besides[-1] = measured[0][0], besides[-1] + measured[-1][-1]
    return shares_by_speed(count, [statistics.fmean(seconds[1:-1]) for seconds in measured], besides=besides)
