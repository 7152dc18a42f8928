"""What the scripts for a few unlike machines share: flags, the banner, shares by speed, what each rank did when.

Speeds come from cluster.json, which plan.py --measure writes. Rank 0 reads it and tells the others, so that one machine
has the file. Shares are dealt one by one, each to the rank that would be done with it first: with speeds of 4:2:1 seven
layers, or micro-batches, go 4, 2, 1. No other split has a smaller largest time.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from heterogeneous_dataloader import HeterogeneousDataLoader
from heterogeneous_parallel_plugin import PRECISIONS
from training.machine_facts import network, processor_name
from metrics import peak_memory_gb
from timeline import timeline
from utils import positive_int

CLUSTER_JSON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cluster.json")
MEASURE_EVERY = {"cpu": 1, "cuda": 10}  # steps: on a GPU, to time what it computes is to wait for it


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", "--precision", type=precision, default="fp32", metavar="fp32|bf16|fp64",
                        help="of the activations; the same on all machines")


def add_speed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster_json", help="measured speeds (default: cluster.json beside the script, if there)")
    parser.add_argument("--even", action="store_true", help="the same for every machine, whatever its speed")


def precision(text: str) -> str:
    """The type of --dtype: "fp64" and "float64" are the same."""
    names = {str(dtype).removeprefix("torch."): name for name, dtype in PRECISIONS.items()}
    if (name := names.get(text, text)) not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(PRECISIONS)}")
    return name


def not_negative(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def fill_from_environment(args: argparse.Namespace, name: str, default: int, kind=positive_int) -> None:
    """A flag that was not given takes the environment variable of its name, else `default`. Raises ValueError."""
    if getattr(args, name) is not None:
        return
    text = os.environ.get(name.upper(), "").strip()
    try:
        setattr(args, name, kind(text) if text else default)
    except (ValueError, argparse.ArgumentTypeError):
        lowest = 0 if kind is not_negative else 1
        raise ValueError(f"the environment variable {name.upper()}={text!r} is no whole number from {lowest} on: "
                         f"correct it, unset it, or give --{name}") from None


def from_rank_0(make):
    """What make() returns on rank 0, on every rank; its ValueError, too. Collective."""
    outcome = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [make()]
        except ValueError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    return outcome[0]


def print_banner(backend: str, device: torch.device, dtype: str) -> None:
    """On rank 0: what runs where, a line a rank. Collective."""
    everyone = gather((socket.gethostname(), processor_name(device), network()))
    if dist.get_rank() > 0:
        return
    print(f"{len(everyone)} {'rank' if len(everyone) == 1 else 'ranks'} over {backend}, {dtype}, torch "
          f"{torch.__version__}")
    print(table(["rank", "host", device.type.upper(), "network"],
                [[rank, *facts] for rank, facts in enumerate(everyone)]), flush=True)


def gather(value) -> list:
    """Every rank's value, on every rank. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def table(heads: list[str], rows: list[list]) -> str:
    rows = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def shares_by_speed(total: int, seconds_each: list[float]) -> list[int]:
    """`total` like pieces of work, at least one a rank, so that the slowest is done as soon as can be.

    Raises ValueError where there are fewer pieces than ranks.
    """
    if total < len(seconds_each):
        raise ValueError(f"{total} layers or micro-batches for {len(seconds_each)} ranks: each needs at least one")
    shares = [1] * len(seconds_each)
    for _ in range(total - len(shares)):
        done_first = min(range(len(shares)), key=lambda rank: ((shares[rank] + 1) * seconds_each[rank], rank))
        shares[done_first] += 1
    return shares


def measured_seconds(args, microbatch_size: int, kind: str) -> list[float] | None:
    """Each rank's seconds for a decoder layer (`kind` "layer") or the whole model ("model") and a micro-batch.

    Of the measured size that is nearest. None where no cluster.json is there, or --even. Collective. Raises ValueError
    for a file that can't be read or is for fewer ranks.
    """
    def read() -> list[float] | None:
        path = args.cluster_json or CLUSTER_JSON
        if args.even or (args.cluster_json is None and not os.path.exists(path)):
            return None
        try:
            with open(path) as file:
                machines = json.load(file)["machines"]
            seconds = [seconds_of(machine, microbatch_size, kind) for machine in machines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no speeds ({type(error).__name__}: {error}): measure again with plan.py "
                             "--measure, or use --even") from None
        if len(seconds) != dist.get_world_size() or not all(0 < value < float("inf") for value in seconds):
            raise ValueError(f"{path} has the speeds of {len(seconds)} machines ({seconds}), but "
                             f"{dist.get_world_size()} ranks run: measure again with plan.py --measure, or use --even")
        print(f"speeds: {path}", flush=True)
        return seconds

    return from_rank_0(read)


def seconds_of(machine: dict, microbatch_size: int, kind: str) -> float:
    size = min(machine["forward"], key=lambda size: abs(int(size) - microbatch_size))
    both = [forward + backward for forward, backward in
            zip(machine["forward"][size], machine["backward"][size], strict=True)]
    if kind == "layer":
        return statistics.median(both[1:-2])  # without the embedding, the final norm and the head
    return sum(both) + machine.get("microbatch_overhead", 0.0)


def endless(loader: HeterogeneousDataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Epoch after epoch of micro-batches."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: the data holds {loader.steps_per_epoch} steps and starts again", flush=True)


class StepTimes:
    """Where this rank's time goes: seconds of forward, backward, optimizer, and of the whole step."""

    def __init__(self, device: torch.device):
        self.device, self.every, self.measured = device, MEASURE_EVERY[device.type], []

    def start(self, step: int, profile: bool = False) -> None:
        """`step` from 1 on. `profile`: measure, whatever the number, for timeline.write() too: collective then."""
        timeline.recording, timeline.spans = (step - 1) % self.every == 0, []
        if profile:
            timeline.start(self.device)
        self.began = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds of the step, and of them those that this rank computed: NaN where that was not measured.

        Afterwards timeline.spans still holds its spans, until the next start.
        """
        step_seconds = time.perf_counter() - self.began
        if not timeline.recording:
            return step_seconds, float("nan")
        spent = Counter(step=step_seconds)
        for kind, _, start, end, communication, _ in timeline.spans:
            if not communication:
                spent[kind] += (end - start) / 1e9
        spent["compute"] = sum(spent[kind] for kind in ("forward", "backward", "optimizer"))
        self.measured.append(spent)
        return step_seconds, spent["compute"]

    def mean(self) -> dict[str, float]:
        """Seconds a step, less the first, which warms up; idle: it waited for other ranks, or for the network."""
        steps = self.measured[1:] or self.measured
        mean = {kind: statistics.fmean(spent[kind] for spent in steps)
                for kind in ("forward", "backward", "optimizer", "compute", "step")}
        return {**mean, "idle": mean["step"] - mean["compute"]}


def print_stage_times(times: StepTimes, layers: int, is_writer: bool) -> None:
    """Per rank: decoder layers, seconds of a step by what they went to, peak memory. Collective."""
    mean = times.mean()
    parts = [f"{mean[kind] * 1e3:.1f}" for kind in ("forward", "backward", "optimizer", "idle", "step")]
    everyone = gather([socket.gethostname(), layers, *parts, f"{peak_memory_gb():.2f}"])
    if is_writer:
        print("milliseconds of a step, mean, and peak memory")
        print(table(["rank", "host", "layers", "forward", "backward", "optimizer", "idle", "step", "GB"],
                    [[rank, *row] for rank, row in enumerate(everyone)]), flush=True)
