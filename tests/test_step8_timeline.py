"""The timeline of a step: all ranks and what each did, in the schedule's order; refused where clocks disagree."""

import json
import os
import re
from collections import defaultdict
from unittest import mock

import pytest
import torch
from launch import fork, modules_of

SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--num_hidden_layers", 3, "--log_dir"]


def read_trace(path) -> dict[int, list[dict]]:
    """rank -> its events."""
    trace, events = json.loads(path.read_text()), defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["pid"]].append(event)
    return events


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    """The trace of two pipelines of two stages with four micro-batches; what the run printed."""
    folder = tmp_path_factory.mktemp("timeline")
    done = fork(8, 4, *SHORT, folder, "--pp_size", 2, "--dp_size", 2, "--gradient_accumulation_steps", 4,
                "--pp_engine", "1f1b", "--max_tokens", 768, "--run_name", "run", "--profile_batch", 2)
    assert not list((folder / "run").glob("timeline_batch[13]*"))
    return read_trace(folder / "run" / "timeline_batch2_all.json"), done.stdout


def order(events: list[dict]) -> str:
    """What a rank computed, as in "F0 F1 B0 B1"; F0' is chunk 1's."""
    letters = {"forward": "F", "backward": "B", "weight gradients": "W"}
    computed = sorted((event for event in events if event.get("cat") in letters), key=lambda event: event["ts"])
    names = [re.search(r"(\d+)(?: chunk (\d))?$", event["name"]) for event in computed]
    return " ".join(letters[event["cat"]] + name[1] + "'" * int(name[2] or 0) for event, name in zip(computed, names))


def spans(events: list[dict], kind: str) -> dict:
    """micro-batch (or None) -> (start, end) of a rank's events of this kind, in the order of their starts."""
    events = sorted((event for event in events if event.get("cat") == kind), key=lambda event: event["ts"])
    found = {event.get("args", {}).get("microbatch"): (event["ts"], event["ts"] + event["dur"]) for event in events}
    assert None in found or len(found) == len(events), f"a micro-batch occurs twice as {kind}"
    return found


def test_timeline_holds_all_ranks_and_kinds(timeline):
    events, stdout = timeline
    names = {rank: [event["args"]["name"] for event in events[rank] if event["ph"] == "M"] for rank in sorted(events)}
    places = ["dp 0 pp 0", "dp 0 pp 1", "dp 1 pp 0", "dp 1 pp 1"]
    assert names == {rank: [f"rank {rank}: {place} tp 0"] for rank, place in enumerate(places)}
    kinds = {"forward", "backward", "wait", "receive", "all-reduce", "gradient norm", "optimizer"}
    for rank in events:
        assert {event["cat"] for event in events[rank] if event["ph"] == "X"} == kinds, rank
        assert len(spans(events[rank], "optimizer")) == 1
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events[rank] if event["ph"] == "X")
    assert min(event["ts"] for rank in events for event in events[rank] if event["ph"] == "X") == 0
    assert re.search(r"bubble: \d+\.\d% measured, 20\.0% ideal.*p=2 stages and m=4 micro-batches", stdout), stdout


def test_timeline_is_the_schedule(timeline):
    """Every micro-batch goes forward and backward once on each stage, in the order of 1F1B."""
    orders = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    for rank, events in timeline[0].items():
        assert order(events) == orders[rank % 2], rank
        assert set(spans(events, "receive")) == {0, 1, 2, 3}
        assert {event["args"]["peer"] for event in events if event.get("cat") == "receive"} == {rank ^ 1}


def test_spans_of_one_track_do_not_overlap(timeline):
    for rank, events in timeline[0].items():
        tracks = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
                assert (event["tid"] > 0) == (event["cat"] in ("receive", "all-reduce")), event
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


def test_nothing_arrives_before_it_is_made(timeline):
    for first in (0, 2):
        nothing_arrives_before_it_is_made(timeline[0], 0.0, first, 4)


@pytest.mark.parametrize("step", [6, 8, pytest.param(9, marks=pytest.mark.slow)])
def test_several_machines_are_refused(step):
    """torchrun gives each process the number of those on its machine, and the clocks of machines disagree."""
    with modules_of(step):
        from timeline import check_profile_batch
        from utils import UserError
    with mock.patch.object(torch.distributed, "get_world_size", return_value=3), \
            mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        check_profile_batch(0, 3)
        with pytest.raises(UserError, match="--profile_batch 2: the clocks .* cluster/train_distributed.py"):
            check_profile_batch(2, 3)


def test_each_pipeline_has_its_own_bubble(tmp_path):
    done = fork(9, 3, *SHORT, tmp_path, "--pipelines", "3;2,1", "--num_microbatches", "3,2", "--max_tokens", 512,
                "--profile_batch", 1)
    for text in ("pipeline 0: 1 stage, idle for", "pipeline 1: bubble: ",
                 "33.3% ideal, that is (p-1)/(m+p-1) with p=2 stages"):
        assert text in done.stdout, done.stdout
