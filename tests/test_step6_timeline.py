"""The timeline as steps 6 and 7 have it: all ranks, what each did, and what ran in the background meanwhile."""

import json
from collections import Counter

import pytest
from launch import fork

SHORT = ["--seq_len", 16, "--micro_batch_size", 1, "--num_hidden_layers", 2, "--gradient_accumulation_steps", 3]


@pytest.mark.parametrize("step, axis, background", [(6, "dp", {"all-reduce"}), (7, "pp", {"receive"})])
def test_timeline_of_two_ranks(tmp_path, step, axis, background):
    done = fork(step, 2, *SHORT, f"--{axis}_size", 2, "--max_tokens", 3 * 2 * 3 * 16, "--log_dir", tmp_path,
                "--profile_batch", 2)
    [path] = tmp_path.glob("default_run/timeline*")
    assert path.name == "timeline_batch2_all.json" and f"timeline: {path}\n" in done.stdout
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {rank: f"rank {rank}: {place}" for rank, place in enumerate(
        {"dp": ["dp 0 pp 0 tp 0", "dp 1 pp 0 tp 0"], "pp": ["dp 0 pp 0 tp 0", "dp 0 pp 1 tp 0"]}[axis])}
    for rank in (0, 1):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        count = Counter(span["cat"] for span in spans)
        assert set(count) == {"forward", "backward", "wait", "gradient norm", "optimizer", *background}, count
        assert (count["forward"], count["backward"], count["gradient norm"], count["optimizer"]) == (3, 3, 1, 1)
        assert {span["cat"] for span in spans if span["tid"] > 0} == background, "all that is not on the first track"
        assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
        if axis == "pp":
            assert count["receive"] == 3
        names = [span["name"] for span in sorted(spans, key=lambda span: span["ts"])
                 if span["cat"] in ("forward", "backward")]
        order = {"dp": "F0 B0 F1 B1 F2 B2", "pp": "F0 F1 F2 B0 B1 B2"}[axis]
        assert names == [{"F": "forward ", "B": "backward "}[word[0]] + word[1] for word in order.split()]
        last_compute = max(span["ts"] + span["dur"] for span in spans if span["cat"] == "backward")
        [norm], [update] = ([span for span in spans if span["cat"] == kind] for kind in ("gradient norm", "optimizer"))
        assert last_compute <= norm["ts"] and norm["ts"] + norm["dur"] <= update["ts"] + 0.01
