"""Which rank holds which modules, takes which samples, and by which schedule: decided once, before training.

Three things may decide it: a plan (see plan_file.py), --pipelines, or else each rank holds the whole model. Then a
step's samples are shared out by speed, as it is measured now, so that none waits for the slowest. A step's samples are
those of the checkpoint that a run goes on from, on however many machines.

In an elastic run the machines that are there change, and so does how samples and layers are shared out.
--pipelines can say so itself, with '|' between the alternatives:

    --pipelines "4,2,2|5,3" --num_microbatches "8|8"     three stages on three machines, two stages on two
"""

import argparse
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

import process_group_manager as pgm
from pipeline_template import PipelineTemplate
from planning.machines import WIRE_DTYPES, Setting, setting_of
from planning.plan_file import samples_of
from planning.schedules import SCHEDULES
from planning.shares import shares_by_speed
from ranks.collectives import gather, say
from ranks.lost import is_elastic
from run.compression import compress
from run.local_steps import LocalPlugin
from run.samples import SamplesPlugin
from run.speeds import choose_shares, has_router_loss, layers_by_speed, measured_speeds
from train import counts  # step 9's
from utils import UserError, positive_int

BY_SPEED = "by speed"  # in the place of --pipelines: one pipeline over all ranks
DECIDED = {"pipelines": None, "num_microbatches": None, "gradient_accumulation": 8, "batch_size": 4, "tp_size": 1,
           "pp_engine": "1f1b", "wire_dtype": None, "gradient_wire_dtype": None,
           "recompute": False}  # the flags that a plan decides, and their defaults


def alternatives(text: str) -> list[list[list[int]]]:
    """The type of --pipelines: 8;5,3 or, for other numbers of machines, 4,2,2|5,3."""
    return [[counts(part) for part in choice.split(";")] for choice in text.split("|")]


def numbers(text: str) -> list[list[int]]:
    """The type of --num_microbatches: 6,2 or, for other numbers of machines, 6,2|8."""
    return [counts(choice) for choice in text.split("|")]


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch_size", type=positive_int, help="samples of a micro-batch, at most (default: 4)")
    parser.add_argument("--gradient_accumulation", type=positive_int,
                        help="a step has the samples of so many micro-batches times the number of pipelines, shared "
                             "out by speed (default: 8)")
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
    stage. `samples`: of an optimizer step, that each pipeline takes. `setting`: the schedule, what travels in which
    dtype, and whether layers are computed again. `local_steps`: of a round, for each rank, where ranks take
    them; the samples are then those of a round."""

    templates: list[PipelineTemplate]
    samples: list[int]
    micro_batch_size: int
    setting: Setting
    local_steps: list[int] | None = None
    tp_size: int = 1

    @property
    def num_microbatches(self) -> list[int]:
        return [-(-count // self.micro_batch_size) for count in self.samples]

    def form(self, args, config) -> SamplesPlugin:
        """Makes the groups of ranks: the plugin that trains by this layout. Collective. Raises UserError."""
        kind = functools.partial(LocalPlugin, args, self.local_steps) if self.local_steps else SamplesPlugin
        plugin = kind(self.tp_size, self.micro_batch_size, args.dtype, args.device, SCHEDULES[self.setting.schedule],
                      self.setting.recompute)
        if self.local_steps:
            say(f"local steps of a round: {', '.join(map(str, self.local_steps))}")
        say(f"samples of a {'round' if self.local_steps else 'step'}, in micro-batches of up to "
            f"{self.micro_batch_size}: {', '.join(map(str, self.samples))}")
        if has_router_loss(config) and not self.local_steps and any(n % self.micro_batch_size for n in self.samples):
            raise UserError(f"samples {', '.join(map(str, self.samples))} of a step are no whole micro-batches of "
                            f"{self.micro_batch_size}, and the loss of a mixture of experts' router is one of each "
                            "micro-batch: choose another --batch_size, or output_router_logits=False in config.json")
        plugin.set_pipelines(self.templates, self.samples)
        if self.tp_size > 1:
            kinds, rows = gather(plugin.device.type), torch.cat(pgm.process_group_manager.ranks).tolist()
            if any(len({kinds[rank] for rank in row}) > 1 for row in rows):
                raise UserError("--tp_size, and ranks of one stage compute on unlike devices, by rank: "
                                f"{', '.join(kinds)}: order the hosts so that they are alike, or leave out --tp_size")
        compress(plugin, config, self.setting.wire_dtype, self.setting.gradient_wire_dtype)
        return plugin

    def as_flags(self) -> dict:
        """What a run records of it."""
        layers = [[sum(name.rpartition(".")[2].isdigit() for name in stage) for stage in template.modules_per_stage]
                  for template in self.templates]
        setting = self.setting._asdict()
        return {"pipelines": [layers], "num_microbatches": [self.num_microbatches], "samples": self.samples,
                "batch_size": self.micro_batch_size, "pp_engine": setting.pop("schedule"), **setting}


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
    of_local_step = args.local_steps and args.batch_size * args.gradient_accumulation
    if total and args.local_steps and not args.num_microbatches:
        total //= of_local_step
    pipelines, shares = choose_pipelines(args, made, device, dtype)
    templates, local_steps = templates_of(pipelines), None
    shares = choose_shares(args, made, len(pipelines), shares, total, device, dtype)
    if args.local_steps and args.num_microbatches:  # local steps of unlike sizes, equally many on all ranks
        local_steps, shares = [args.local_steps] * len(shares), [args.local_steps * count for count in shares]
    elif args.local_steps:
        local_steps = shares
        shares = [of_local_step * count for count in local_steps]
    setting = Setting(args.pp_engine, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    setting = setting.for_pipelines(pipelines)  # there may be nothing to send
    return Layout(templates, shares, args.batch_size, setting, local_steps, args.tp_size)


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
    layers = layers_by_speed(made.model, measured, num_stages)
    say(f"decoder layers of the stages: {', '.join(map(str, layers))}")
    return [layers], told[0]
