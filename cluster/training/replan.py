"""Work that moves while a run trains, as planning/follow.py decides, and without a restart of any process.

Each rank measures anyway how many seconds of a step it computes, and ask_all(), at the end of each step, tells all of
them. So all ranks decide the same from the same numbers, without another message:

    samples move between pipelines    from the next step on; nothing is sent
    layers move between stages        the generation ends, as where a host is lost (see membership/), and the next one
                                      takes weights and optimizer state from memory: its own, or another rank's
"""

import argparse
import contextlib
import os
from itertools import accumulate, pairwise, permutations

import torch
import torch.distributed as dist

import process_group_manager as pgm
from machine_facts import free_memory, from_home, gather, host_names, machines, memory_of_process, places_of, say
from planning.follow import Follower, Split
from planning.machines import read_cluster
from training.layout import BY_SPEED
from training.plan_file import in_order
from training.speeds import CLUSTER_JSON, has_router_loss, parts_of
from utils import UserError

BANDWIDTH, MOVE_SECONDS, FRACTION = 12.5e6, 2.0, 0.9  # bytes a second, where none was measured; of the free memory


def add_replan_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replan", choices=["auto", "off"],
                        help="auto: where machines become slower or faster, samples and layers move while the run "
                             "trains (default: auto, but what --num_microbatches and --pipelines say stays)")


def check_replan_flag(args) -> None:
    """Raises UserError for what can't follow the machines."""
    for flag in ("local_steps", "equal_shares"):
        if args.replan == "auto" and getattr(args, flag):
            raise UserError(f"--replan auto moves work between machines from step to step, and --{flag} leaves it "
                            "where it is: leave out one of them")


class Replanner:
    """Moves the work of a run. All ranks make one together, before the model is cut into stages.

    `made`: a Model. `before`: the plan for which the generation before has ended, or None.
    """

    def __init__(self, args, layout, made, before: dict | None, device: torch.device):
        self.args, self.layout, self.device, self.follower = args, layout, device, None
        layers, is_asked = layout.as_flags()["pipelines"][0], args.replan == "auto"
        if args.replan == "off" or args.local_steps or args.equal_shares or dist.get_world_size() == 1:
            return
        stay = layout.setting.schedule == "afab" or has_router_loss(made.model.config)
        moves_samples = len(layers) > 1 and not stay and (is_asked or not args.num_microbatches)
        is_whole = not layout.optimizer_shares and layout.tp_size == 1
        moves_layers = is_whole and max(map(len, layers)) > 1 and (is_asked or args.pipelines in (None, BY_SPEED))
        if moves_samples or moves_layers:
            _, layer, head, _ = parts_of(made.model)
            seconds = layer * (4 if made.lora else 12) / from_home(lambda: slowest_link(args))  # with AdamW's averages
            self.follower = Follower(Split(layers, layout.samples), layout.micro_batch_size, head / layer,
                                     moves_samples, self.most_layers if moves_layers else None,
                                     lambda count: MOVE_SECONDS + count * seconds, before["moved"] if before else ())
        elif is_asked:
            say("--replan auto: nothing can move here. Samples move between pipelines, but not with --pp_engine afab, "
                "which keeps the activations of all, nor with the loss of a router; layers between stages, but not "
                "with --tp_size or --optimizer_shares")

    def most_layers(self) -> list[list[int]]:
        """What each stage has memory for, where a layer takes its part of all that the process has. Collective."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else memory_of_process("VmHWM")
        spare = iter(gather(FRACTION * free_memory(self.device) / max(1, peak)))
        return [[int(count * (1 + next(spare))) for count in layers] for layers in self.follower.split.layers]

    def follow(self, run, plugin, step: int) -> None:
        """Call it after each step, on all ranks. Raises Lost, on all, where layers move, and as run.take_in() does."""
        run.take_in()
        if self.follower is None:
            return
        old, (seconds, *of_ranks) = self.follower.split, run.watch.told
        self.follower.observe(seconds, [[max(of_ranks[rank] for rank in row) for row in block.tolist()]
                                        for block in pgm.process_group_manager.ranks])
        if not (new := self.follower.decide(step)):
            return
        say(f"after step {step} work moves to faster machines: " + ", ".join(
            f"{name} {describe(a)} -> {describe(b)}" for name, a, b in zip(Split._fields, old, new) if a != b))
        if new.layers != old.layers:
            run.take_in(self.as_plan(new))
        plugin.deal(new.samples)
        self.args.num_microbatches, self.args.samples = [plugin.num_microbatches], new.samples

    def as_plan(self, split: Split) -> dict:
        """As in plan.json, with what the next generation has to know besides."""
        ends = [0, *accumulate(map(len, split.layers))]
        pipelines = [{"machines": [*range(*place)], "layers": layers, "samples": count}
                     for place, layers, count in zip(pairwise(ends), *split)]
        return {"pipelines": pipelines, "micro_batch_size": self.layout.micro_batch_size,
                "hosts": host_names(machines()), "world_size": os.environ.get("WORLD_SIZE"),
                "moved": self.follower.moved, **self.layout.setting._asdict()}


def planned_before(generation) -> dict | None:
    """The plan for which the generation before has ended, if its machines are here, and no others. Collective."""
    plan = next(filter(None, gather(generation.plan)), None)
    if plan is None or plan["world_size"] != os.environ.get("WORLD_SIZE"):
        return None
    hosts = host_names(machines(), plan["hosts"])
    return None if None in places_of(plan["hosts"], hosts) else in_order(plan, hosts)


def slowest_link(args) -> float:
    """Bytes a second."""
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
        links = read_cluster(args.cluster_json or CLUSTER_JSON)["links"]
        return min(links[a][b]["bandwidth"] for a, b in permutations(range(len(links)), 2))
    return BANDWIDTH


def describe(numbers: list) -> str:
    """4,2;6 of [[4, 2], [6]]."""
    return ";".join(map(describe, numbers)) if isinstance(numbers[0], list) else ",".join(map(str, numbers))
