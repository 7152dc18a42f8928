"""Which rank holds what: a plan, the pipelines of the command line, or whole models with shares by speed.

In an elastic run the machines that are there change. A step takes the same samples whoever is left, so what changes is
how its micro-batches, and the layers, are shared out. --pipelines can say so itself, with '|' between the alternatives:

    --pipelines "4,2,2|5,3" --num_microbatches "8|8"     three stages on three machines, two stages on two
"""

import argparse
import contextlib

import torch
import torch.distributed as dist

import train
from pipeline_template import PipelineTemplate, Unsupported
from planning.clock import StageClock
from planning.module_memory import load_code
from planning.shares import shares_by_speed
from training.common import gather
from training.loop import make_llama, seconds_of_microbatch
from training.speeds import layers_by_speed, measured_speeds
from checkpoints.survive import is_elastic
from utils import UserError, positive_int


def alternatives(text: str) -> list[list[list[int]]]:
    """The type of --pipelines: 8;5,3 or, for other numbers of machines, 4,2,2|5,3."""
    return [[train.counts(part) for part in choice.split(";")] for choice in text.split("|")]


def numbers(text: str) -> list[list[int]]:
    """The type of --num_microbatches: 6,2 or, for other numbers of machines, 6,2|8."""
    return [train.counts(choice) for choice in text.split("|")]


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gradient_accumulation", type=positive_int, default=8,
                        help="a step has so many micro-batches times the number of pipelines, shared out by speed")
    parser.add_argument("--num_microbatches", type=numbers, metavar="6,2", help="instead: those of each pipeline")
    parser.add_argument("--pipelines", type=alternatives, metavar="8;5,3",
                        help="decoder layers of each stage, with ';' between pipelines (default: one stage a rank)")
    parser.add_argument("--tp_size", type=positive_int, default=1, help="tensor-parallel ranks of a stage")


def choose_layout(args, model: torch.nn.Module, device: torch.device, dtype: torch.dtype,
                  total: int | None, lora=None) -> tuple[list[PipelineTemplate], list[int]]:
    """The pipelines, and the micro-batches of a step that each takes. Collective.

    `total`: the micro-batches of a step where a checkpoint has decided it. `lora`: the model's adapters. Raises
    UserError for what is not possible.
    """
    num_stages, left_over = divmod(dist.get_world_size(), args.tp_size)
    if left_over:
        raise UserError(f"--tp_size {args.tp_size} does not divide the {dist.get_world_size()} processes: start a "
                        f"multiple of it")
    chosen = None
    for k, pipelines in enumerate(args.pipelines or ()):
        if sum(map(len, pipelines)) == num_stages or len(args.pipelines) == 1 and not is_elastic():
            chosen = k  # where the only one does not fit, set_pipelines says so
            break
    if args.pipelines and chosen is None and not is_elastic():
        raise UserError(f"--pipelines has no alternative with {num_stages} stages in all: that many x tp_size="
                        f"{args.tp_size} processes are here")
    if chosen is not None:
        templates = [PipelineTemplate.from_layers_per_stage(model, layers) for layers in args.pipelines[chosen]]
    elif args.pipelines:
        speeds = speeds_of_stages(args, dtype, num_stages)
        templates = [PipelineTemplate.from_layers_per_stage(model, layers_by_speed(model, speeds, num_stages))]
    else:
        templates = [PipelineTemplate.from_layers_per_stage(model, [model.config.num_hidden_layers])] * num_stages
    return templates, choose_shares(args, model, templates, chosen or 0, device, dtype, total, lora)


def choose_shares(args, model, templates: list, chosen: int, device, dtype, total: int | None, lora=None) -> list[int]:
    """Micro-batches of a step, pipeline by pipeline: as told, or by speed: measured before, or now. Collective."""
    count = len(templates)
    if told := args.num_microbatches:
        shares = told[min(chosen, len(told) - 1)]
        if getattr(args, "pipeline_seconds", None) and total:  # the machines planned by themselves
            return shares_by_speed(total, args.pipeline_seconds)
        if len(shares) == count and total in (None, sum(shares)):
            return shares
        if not is_elastic():
            if len(shares) != count:
                raise UserError(f"--num_microbatches {','.join(map(str, shares))}: write {count} numbers, one per "
                                "pipeline, with commas between them")
            return shares  # check_batch says what the checkpoint has instead
        total = total or sum(shares)
    total = total or (getattr(args, "local_steps", None) or args.gradient_accumulation) * count
    if total < count:
        raise UserError(f"a step has {total} micro-batches, fewer than the {count} pipelines: lower --batch_size, or "
                        "start fewer processes")
    seconds = [1.0] * count
    if not args.equal_shares and count == dist.get_world_size() > 1:  # each rank has a whole model
        if speeds := measured_speeds(args, args.batch_size, dtype, model.config):
            seconds = [speed.whole_model for speed in speeds]
        elif PipelineTemplate.get_model_name(model) == "model.Llama":
            whole = make_llama(model.config, args.seed, device, dtype, args.recompute)
            seconds = gather(seconds_of_microbatch(whole, args.batch_size, args.seq_len, device))
        else:
            load_code(device)
            dist.barrier()
            with contextlib.suppress(Unsupported):  # then all are taken as equally fast
                clock = StageClock(model, args.seq_len, dtype, device, lora)
                seconds = gather(clock.seconds_of_whole(args.batch_size, args.recompute))
        if dist.get_rank() == 0:
            listed = ", ".join(f"{args.batch_size * args.seq_len / value:.0f}" for value in seconds)
            print(f"tokens/s of each rank alone: {listed}", flush=True)
    return shares_by_speed(total, seconds)


def speeds_of_stages(args, dtype: torch.dtype, num_stages: int) -> list | None:
    """The speed of each stage's machine, where one process is one stage and cluster.json has it. Collective."""
    speeds = measured_speeds(args, args.batch_size, dtype)
    return speeds if speeds and len(speeds) == num_stages else None
