"""Which rank holds which modules, takes which samples, and by which schedule: decide.py chooses, before training.

In an elastic run the machines that are there change, and so does how samples and layers are shared out.
--pipelines can say so itself, with '|' between the alternatives:

    --pipelines "4,2,2|5,3" --num_microbatches "8|8"     three stages on three machines, two stages on two
"""

import argparse
import functools
from dataclasses import dataclass

import torch

import process_group_manager as pgm
from models.loss import has_router_loss
from pipeline_template import PipelineTemplate
from planning.machines import WIRE_DTYPES, Setting
from planning.schedules import SCHEDULES
from ranks.collectives import gather, say
from run.compression import compress
from run.local_steps import LocalPlugin
from run.samples import SamplesPlugin, rebalancing_of
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
        """Makes the groups of ranks: the plugin that trains by this layout. `args` as they were before they have its
        numbers. Collective. Raises UserError."""
        kind = functools.partial(LocalPlugin, args, self.local_steps) if self.local_steps else SamplesPlugin
        plugin = kind(self.tp_size, self.micro_batch_size, args.dtype, args.device, SCHEDULES[self.setting.schedule],
                      self.setting.recompute)
        plugin.rebalancing = rebalancing_of(args, self, config)
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
