"""Samples that move between pipelines while a run trains, as planning/rebalancing.py decides.

Each rank measures anyway how many seconds of a step it computes, and ask_all(), at the end of each step, tells all of
them. So all ranks decide the same from the same numbers, without another message, and nothing is sent: each pipeline
reads other samples from the next step on.
"""

import argparse

import process_group_manager as pgm
from planning.rebalancing import Rebalancing
from ranks.collectives import say
from run.speeds import has_router_loss
from utils import UserError


def add_replan_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replan", choices=["auto", "off"],
                        help="auto: where machines become slower or faster, samples move while the run trains "
                             "(default: auto, but what --num_microbatches says stays)")


def check_replan_flag(args) -> None:
    """Raises UserError for what can't follow the machines."""
    for flag in ("local_steps", "equal_shares"):
        if args.replan == "auto" and getattr(args, flag):
            raise UserError(f"--replan auto moves work between machines from step to step, and --{flag} leaves it "
                            "where it is: leave out one of them")


class Replanner:
    """Moves the samples of a run. All ranks make one together. `config`: the model's."""

    def __init__(self, args, layout, config):
        self.args, self.rebalancing = args, None
        if args.replan == "off" or args.local_steps or args.equal_shares:
            return
        is_asked, stay = args.replan == "auto", layout.setting.schedule == "afab" or has_router_loss(config)
        if len(layout.samples) > 1 and not stay and (is_asked or not args.num_microbatches):
            self.rebalancing = Rebalancing(layout.samples, layout.micro_batch_size)
        elif is_asked:
            say("--replan auto: nothing can move here. Samples move between pipelines, but not with --pp_engine afab, "
                "which keeps the activations of all, nor with the loss of a router")

    def follow(self, run, plugin, step: int) -> None:
        """Call it after each step, on all ranks."""
        if self.rebalancing is None:
            return
        old, (seconds, *of_ranks) = self.rebalancing.samples, run.watch.told
        self.rebalancing.observe(seconds, [[max(of_ranks[rank] for rank in row) for row in block.tolist()]
                                        for block in pgm.process_group_manager.ranks])
        if new := self.rebalancing.decide(step):
            before, after = (",".join(map(str, samples)) for samples in (old, new))
            say(f"after step {step} work moves to faster machines: samples {before} -> {after}")
            plugin.deal(new)
            self.args.num_microbatches, self.args.samples = [plugin.num_microbatches], new
