"""The timeline of a step: all ranks and what each did, in the schedule's order; refused where clocks disagree."""

import json
import os
import re
from collections import Counter, defaultdict
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from lab.launch import fork, start_fork
from lab.program import Program

COMMON = ["--seq_len", 32, "--micro_batch_size", 1, "--profile_batch", 2, "--num_hidden_layers", 4]


class Profiled(NamedTuple):
    step: int
    ranks: int
    num_microbatches: int
    flags: list
    orders: list[str]  # by stage
    background: set[str]  # what ran there
    said: str = ""


RUNS = {run.step: run for run in (
    Profiled(6, 2, 3, ["--dp_size", 2], ["F0 B0 F1 B1 F2 B2"], {"all-reduce"}),
    Profiled(7, 2, 3, ["--pp_size", 2], 2 * ["F0 F1 F2 B0 B1 B2"], {"receive"}),
    Profiled(8, 4, 4, ["--dp_size", 2, "--pp_size", 2],
             ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"], {"receive", "all-reduce"},
             "20.0% ideal"),
    Profiled(11, 2, 2, ["--pp_size", 2, "--virtual_stages", 2, "--pp_engine", "interleaved_zb"],
             ["F0 F1 F0' F1' B0' W0' B1' W1' B0 W0 B1 W1", "F0 F1 F0' B0' F1' B1' W0' B0 W1' B1 W0 W1"], {"receive"},
             "7.7% ideal"),
    Profiled(12, 2, 3, ["--dp_size", 2, "--zero", 2], ["F0 B0 F1 B1 F2 B2"],
             {"reduce-scatter", "all-gather"}))}


def read_trace(path) -> dict[int, list[dict]]:
    """rank -> its events."""
    trace, events = json.loads(path.read_text()), defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["pid"]].append(event)
    return events


def order(events: list[dict]) -> str:
    """What a rank computed, as in "F0 F1 B0 B1"; F0' is chunk 1's."""
    letters = {"forward": "F", "backward": "B", "weight gradients": "W"}
    computed = sorted((event for event in events if event.get("cat") in letters), key=lambda event: event["ts"])
    names = [re.search(r"(\d+)(?: chunk (\d))?$", event["name"]) for event in computed]
    return " ".join(letters[event["cat"]] + name[1] + "'" * int(name[2] or 0) for event, name in zip(computed, names))


def spans(events: list[dict], kind: str) -> dict:
    """micro-batch (or None) -> (start, end) of a rank's events of this kind, in the order of their starts."""
    events = sorted((event for event in events if event.get("cat") == kind), key=lambda event: event["ts"])
    return {event.get("args", {}).get("microbatch"): (event["ts"], event["ts"] + event["dur"]) for event in events}


@pytest.fixture(scope="module")
def profiled(selected, tmp_path_factory):
    """profiled(step): the events of each rank, and what the run printed. All runs start together."""
    root, futures = tmp_path_factory.mktemp("timeline"), {}
    for step in set(selected("step")) & {*RUNS}:
        run = RUNS[step]
        futures[step] = start_fork(
            step, run.ranks, *COMMON, *run.flags, "--gradient_accumulation_steps", run.num_microbatches, "--max_tokens",
            3 * 32 * run.num_microbatches * run.ranks // len(run.orders), "--log_dir", root, "--run_name", step)

    def profiled(step: int) -> tuple[dict[int, list[dict]], str]:
        printed = futures[step].result().stdout
        [path] = (root / str(step)).glob("timeline*")
        assert path.name == "timeline_batch2_all.json" and f"timeline: {path}\n" in printed
        return read_trace(path), printed

    return profiled


@pytest.mark.parametrize("step", RUNS)
def test_timeline_holds_all_ranks_and_kinds_in_the_schedules_order(profiled, step):
    run, (ranks, printed) = RUNS[step], profiled(step)
    stages = len(run.orders)
    kinds = {"forward", "backward", "wait", "gradient norm", "optimizer", *run.background}
    assert run.said in printed and sorted(ranks) == [*range(run.ranks)]
    for rank, events in ranks.items():
        place = f"rank {rank}: dp {rank // stages} pp {rank % stages} tp 0"
        assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [place]
        assert order(events) == run.orders[rank % stages], rank
        found = [event for event in events if event["ph"] == "X"]
        assert {event["cat"] for event in found} == kinds | ({"weight gradients"} if step == 11 else set()), rank
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in found)
        count = Counter(event["cat"] for event in found)
        assert count["gradient norm"] == count["optimizer"] == 1
        if "receive" in kinds and step < 11:
            assert set(spans(events, "receive")) == set(range(count["forward"])), rank
            assert {event["args"]["peer"] for event in found if event["cat"] == "receive"} == {rank ^ 1}
        if step == 12:  # a reduce-scatter after each micro-batch
            assert count["reduce-scatter"] == 3 * count["all-gather"] > 0
        backward, norm, update = (spans(events, kind) for kind in ("backward", "gradient norm", "optimizer"))
        assert max(end for _, end in backward.values()) <= norm[None][0] and norm[None][1] <= update[None][0] + 0.01
    assert min(event["ts"] for events in ranks.values() for event in events if event["ph"] == "X") == 0


@pytest.mark.parametrize("step", [6, 7, 8, 11])  # in step 12, a wait is a part of backward
def test_spans_of_one_track_do_not_overlap(profiled, step):
    """All that is in the background is on tracks of its own."""
    for rank, events in profiled(step)[0].items():
        tracks = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
                assert (event["tid"] > 0) == (event["cat"] in RUNS[step].background), event
        assert len(tracks) > 1
        for track in tracks.values():
            for (_, end, name), (start, _, after) in zip(sorted(track), sorted(track)[1:]):
                assert end <= start + 0.01, f"rank {rank}: {name} ends {end - start} us after {after} begins"


def nothing_arrives_before_it_is_made(events: dict, error: float, first: int, num_microbatches: int) -> None:
    """Between the ranks `first` and `first` + 1, forward and backward; `error` is that of their clocks."""
    for kind, maker, receiver in (("forward", first, first + 1), ("backward", first + 1, first)):
        made, computed = spans(events[maker], kind), spans(events[receiver], kind)
        gradients = kind == "backward"
        received = {event["args"]["microbatch"]: event["ts"] + event["dur"] for event in events[receiver]
                    if event.get("cat") == "receive" and (event["args"]["peer"] > receiver) == gradients}
        assert received.keys() == set(range(num_microbatches))
        for i, arrived in received.items():
            assert arrived > made[i][1] - error, f"{kind} {i} arrived {made[i][1] - arrived:.0f} us before it was made"
            assert arrived <= computed[i][0], (kind, i)


@pytest.mark.parametrize("step, firsts, num_microbatches", [(7, [0], 3), (8, [0, 2], 4)])
def test_nothing_arrives_before_it_is_made(profiled, step, firsts, num_microbatches):
    for first in firsts:
        nothing_arrives_before_it_is_made(profiled(step)[0], 0.0, first, num_microbatches)


def test_each_pipeline_has_its_own_bubble(tmp_path):
    done = fork(9, 3, *COMMON, "--log_dir", tmp_path, "--pipelines", "4;2,2",
                "--num_microbatches", "3,2", "--max_tokens", 512)
    assert re.search(r"^pipeline 0: bubble: .* 0.0% ideal\npipeline 1: bubble: .* 33.3% ideal$", done.stdout, re.M)


@pytest.mark.parametrize("step", [6, 8, 9])
def test_several_machines_are_refused(step):
    """torchrun gives each process the number of those on its machine, and the clocks of machines disagree."""
    modules = Program(step).load()
    with mock.patch.object(torch.distributed, "get_world_size", return_value=3), \
            mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        modules.timeline.check_profile_batch(0, 3)
        with pytest.raises(modules.utils.UserError, match="--profile_batch 2: the clocks .* cluster/train_dist"):
            modules.timeline.check_profile_batch(2, 3)
