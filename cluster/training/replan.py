"""A plan that follows the machines: while a run trains, work moves from those that have become slower to the others.

The ranks measure anyway how many seconds of a step they compute, and ask_all(), at the end of each step, tells all of
them. So all make the same fresh plan of the same numbers, without another message:

    samples move between pipelines    from the next step on; nothing is sent
    layers move between stages        the generation ends as where a host is lost (see membership/), and the next one
                                      takes weights and optimizer state from memory: own ones, or another rank's

A pipeline of samples N, micro-batches of B, takes N times its slowest stage's seconds for a sample, and B times the
others': they fill and drain it. The slowest pipeline makes the step. What the fresh plan saves by this model, it saves
of the measured step, which also has the time for messages. So a step has a gain: by how much it would have been faster
with the fresh plan. Gains above 50 % count as 50 %.

    when      the gains of the last 4, 6, 10 or 20 steps add up to 200 %: 10 % over 20 steps, 50 % over 4. The plan is
              made of the medians of these steps; a step that it would have made slower counts against it
    layers    only where the seconds that they save in 100 steps are more than the move takes: 2, and what it sends
    calm      each move doubles what the next one needs, for 100 steps: so no more than three happen in that time
    early     once, after the second to fourth step (the first one warms up), samples move for a gain of 3 %

Steps are those that are measured: each one on CPUs, every tenth where a rank has a GPU.
"""

import argparse
import contextlib
import math
import os
import statistics
from collections.abc import Callable
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from machine_facts import free_memory, from_home, gather, host_names, machines, memory_of_process, places_of, say
from planning.machines import read_cluster
from planning.shares import shares_by_speed
from training.layout import BY_SPEED
from training.plan_file import in_order
from training.speeds import CLUSTER_JSON, parts_of
from utils import UserError

EARLY, REFINES = 3, 0.03  # measured steps; the gain of the early move
WINDOWS, MOST, NEEDED = (4, 6, 10, 20), 0.5, 2.0  # steps; a step's gain at most; the sum of gains
SURE = 3.0  # standard errors
CALM = PAYS = 100  # steps
BANDWIDTH, MOVE_SECONDS, FRACTION = 12.5e6, 2.0, 0.9  # bytes a second, where none was measured; of the free memory


def add_replan_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replan", choices=["auto", "off"],
                        help="auto: samples and layers move where machines become slower or faster while the run "
                             "trains (default: auto, but what --num_microbatches and --pipelines say stays)")


def check_replan_flag(args) -> None:
    """Raises UserError for what can't follow the machines."""
    if args.replan == "auto":
        for flag in ("local_steps", "equal_shares"):
            if getattr(args, flag):
                raise UserError(f"--replan auto and --{flag}: the one moves work between machines from step to step, "
                                "the other keeps it where it is: leave out one of them")


class Split(NamedTuple):
    """Who takes what: the decoder layers of each stage, by pipeline, and the samples of each pipeline in a step."""

    layers: list[list[int]]
    samples: list[int]


class Seen(NamedTuple):
    """Of a step: its seconds, and those of each stage, by pipeline, for a sample and a layer."""

    seconds: float
    rates: list[list[float]]


class Follower:
    """Decides, on all ranks from the same numbers, when work moves and where to. It communicates in most_layers alone.

    `size`: samples of a micro-batch. `head`: how many layers' work the head is. `moved`: the steps after which work
    has moved before. `most_layers()`: what each stage has memory for; None where layers stay. `move_seconds(layers)`:
    how long it takes to move so many.
    """

    def __init__(self, split: Split, size: int, head: float, moves_samples: bool = True,
                 most_layers: Callable | None = None, move_seconds: Callable | None = None, moved=()):
        self.split, self.size, self.head, self.moves_samples = split, size, head, moves_samples
        self.most_layers, self.move_seconds, self.moved = most_layers, move_seconds, list(moved)
        self.limits, self.seen, self.is_warm, self.is_refined = None, [], False, not moves_samples

    def work(self, layers: list[int]) -> list[float]:
        """Of each stage, in layers; to look up embeddings is none."""
        return [*layers[:-1], layers[-1] + self.head]

    def stages(self, split: Split, rates: list[list[float]]) -> list[list[float]]:
        """The seconds of each stage for a sample, by pipeline."""
        return [[rate * work for rate, work in zip(each, self.work(layers))]
                for each, layers in zip(rates, split.layers)]

    def fill(self, stages: list[float]) -> float:
        return self.size * (sum(stages) - max(stages))

    def seconds(self, split: Split, rates: list[list[float]]) -> float:
        """Of a step without its messages."""
        return max(count * max(stages) + self.fill(stages)
                   for count, stages in zip(split.samples, self.stages(split, rates)))

    def fresh(self, rates: list[list[float]], moves_layers: bool) -> Split:
        """The plan for machines of this speed."""
        layers, samples = self.split
        if moves_layers:
            ends = [[0.0] * (len(each) - 1) + [each[-1] * self.head] for each in rates]
            layers = [shares_by_speed(sum(own), *facts) for own, *facts in zip(layers, rates, self.limits, ends)]
        if self.moves_samples:
            stages = self.stages(Split(layers, samples), rates)
            samples = shares_by_speed(sum(samples), [*map(max, stages)], besides=[*map(self.fill, stages)])
        return Split(layers, samples)

    def gain(self, split: Split, seen: list[Seen]) -> float:
        """How much faster these steps would have been with that split, added up: 0.1 is one step of 10 %.

        Less than zero where it may be chance.
        """
        gains = []
        for step in seen:
            now = self.seconds(self.split, step.rates)
            saved = now - self.seconds(split, step.rates)
            gains.append(min(MOST, saved / (max(step.seconds, now) - saved)))
        is_sure = sum(gains) >= SURE * statistics.stdev(gains) * math.sqrt(len(gains))
        return sum(gains) if is_sure else -1.0

    def observe(self, seconds: float, of_stages: list[list[float]]) -> None:
        """A step, and the seconds that its stages computed, by pipeline; 0 where one has not measured them."""
        if not all(map(all, of_stages)):
            return
        if not self.is_warm:
            self.is_warm = True
            return
        rates = [[value / count / work for value, work in zip(each, self.work(layers))]
                 for each, layers, count in zip(of_stages, *self.split)]
        self.seen = [*self.seen[-WINDOWS[-1] + 1:], Seen(seconds, rates)]

    def decide(self, step: int) -> Split | None:
        """What to move to after `step`. It is then taken for done. All ranks ask after the same steps."""
        found = None
        if not self.is_refined and len(self.seen) == EARLY:
            self.is_refined, found = True, self.fresh(medians(self.seen), False)
            if self.gain(found, self.seen) < EARLY * REFINES:
                found = None
        elif found := next(filter(None, (self.better(self.seen[-n:], step) for n in WINDOWS if n <= len(self.seen))),
                           None):
            self.moved.append(step)
        if found:
            self.split, self.seen = found, []
        return found

    def better(self, seen: list[Seen], step: int) -> Split | None:
        """The plan for which these steps speak."""
        needed = NEEDED * 2 ** sum(step - before < CALM for before in self.moved)
        rates = medians(seen)
        found = [self.fresh(rates, False)]
        if self.most_layers:
            self.limits = self.limits or self.most_layers()
            other = self.fresh(rates, True)
            saved = self.seconds(found[0], rates) - self.seconds(other, rates)
            if PAYS * saved > self.move_seconds(changed(self.split, other)):
                found.insert(0, other)
        return next((split for split in found if self.gain(split, seen) >= needed), None)


def medians(seen: list[Seen]) -> list[list[float]]:
    return [[statistics.median(rates) for rates in zip(*of_pipeline)]
            for of_pipeline in zip(*(step.rates for step in seen))]


def changed(old: Split, new: Split) -> int:
    """The layers that are on another stage."""
    def stage_of(layers: list[int]) -> list[int]:
        return [stage for stage, count in enumerate(layers) for _ in range(count)]

    return sum(a != b for before, after in zip(old.layers, new.layers)
               for a, b in zip(stage_of(before), stage_of(after)))


class Replanner:
    """Lets the work of a run follow its machines. All ranks make one together, before the model is cut into stages.

    `made`: a Model. `before`: the plan for which the generation before has ended, or None.
    """

    def __init__(self, args, layout, made, before: dict | None):
        self.args, self.layout, self.follower = args, layout, None
        layers, is_asked = layout.as_flags()["pipelines"][0], args.replan == "auto"
        if args.replan == "off" or args.local_steps or args.equal_shares or dist.get_world_size() == 1:
            return
        moves_samples = len(layers) > 1 and layout.setting.schedule != "afab" and (
            is_asked or not args.num_microbatches)
        moves_layers = max(map(len, layers)) > 1 and layout.tp_size == 1 and (
            is_asked or args.pipelines in (None, BY_SPEED))
        if is_asked and not (moves_samples or moves_layers):
            say("--replan auto: nothing can move here. Samples move between pipelines, but not with --pp_engine afab, "
                "which keeps the activations of all; layers between stages, but not with --tp_size")
        if moves_samples or moves_layers:
            _, layer, head, _ = parts_of(made.model)
            a_layer = layer * (4 if made.lora else 12) / from_home(lambda: slowest_link(args))
            self.follower = Follower(Split(layers, layout.samples), layout.micro_batch_size, head / layer,
                                     moves_samples, self.most_layers if moves_layers else None,
                                     lambda count: MOVE_SECONDS + count * a_layer, before["moved"] if before else ())

    def most_layers(self) -> list[list[int]]:
        """What each stage has memory for, where a layer takes its part of all that the process has. Collective."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else memory_of_process("VmHWM")
        spare = iter(gather(FRACTION * free_memory(self.device) / max(1, peak)))
        return [[int(count * (1 + next(spare))) for count in layers] for layers in self.follower.split.layers]

    def follow(self, run, plugin, step: int, told: list[float]) -> None:
        """Call it after each step, on all ranks. `told`: the seconds of the step, and what each rank computed of it.

        Raises Lost, on all ranks, where layers move.
        """
        if self.follower is None:
            return
        self.follower.observe(told[0], [[max(told[1 + rank] for rank in row) for row in block.tolist()]
                                        for block in pgm.process_group_manager.ranks])
        old, self.device = self.follower.split, plugin.device
        if not (new := self.follower.decide(step)):
            return
        say(f"after step {step} work moves to faster machines: " + ", ".join(
            f"{name} {describe(a)} -> {describe(b)}" for name, a, b in zip(Split._fields, old, new) if a != b))
        if new.layers == old.layers:
            plugin.deal(new.samples)
            self.args.num_microbatches, self.args.samples = [plugin.num_microbatches], new.samples
        else:
            run.take_in(self.as_plan(new))

    def as_plan(self, split: Split) -> dict:
        """As in plan.json, with what planned_before() needs."""
        hosts, ends = host_names(machines()), [0, *accumulate(map(len, split.layers))]
        pipelines = [{"machines": [*range(*place)], "layers": layers, "samples": count}
                     for place, layers, count in zip(pairwise(ends), *split)]
        return {"pipelines": pipelines, "micro_batch_size": self.layout.micro_batch_size, "hosts": hosts,
                "world_size": os.environ.get("WORLD_SIZE"), "moved": self.follower.moved,
                **self.layout.setting._asdict()}


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
