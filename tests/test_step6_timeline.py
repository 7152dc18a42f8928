"""The timeline as steps 6 and 7 have it: all ranks, what each did, and what ran in the background meanwhile."""

from collections import Counter

import pytest
from launch import fork
from test_step8_timeline import order, read_trace, spans

SHORT = ["--seq_len", 16, "--micro_batch_size", 1, "--num_hidden_layers", 2, "--gradient_accumulation_steps", 3]


@pytest.mark.parametrize("step, axis, background", [(6, "dp", {"all-reduce"}), (7, "pp", {"receive"})])
def test_timeline_of_two_ranks(tmp_path, step, axis, background):
    done = fork(step, 2, *SHORT, f"--{axis}_size", 2, "--max_tokens", 3 * 2 * 3 * 16, "--log_dir", tmp_path,
                "--profile_batch", 2)
    [path] = tmp_path.glob("default_run/timeline*")
    assert path.name == "timeline_batch2_all.json" and f"timeline: {path}\n" in done.stdout
    places = {"dp": ["dp 0 pp 0 tp 0", "dp 1 pp 0 tp 0"], "pp": ["dp 0 pp 0 tp 0", "dp 0 pp 1 tp 0"]}[axis]
    for rank, events in read_trace(path).items():
        assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [f"rank {rank}: {places[rank]}"]
        assert order(events) == {"dp": "F0 B0 F1 B1 F2 B2", "pp": "F0 F1 F2 B0 B1 B2"}[axis]
        found = [event for event in events if event["ph"] == "X"]
        count = Counter(span["cat"] for span in found)
        assert set(count) == {"forward", "backward", "wait", "gradient norm", "optimizer", *background}, count
        assert (count["gradient norm"], count["optimizer"], count["receive"]) == (1, 1, 3 if axis == "pp" else 0)
        assert {span["cat"] for span in found if span["tid"] > 0} == background, "all that is not on the first track"
        assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in found)
        backward, norm, update = (spans(events, kind) for kind in ("backward", "gradient norm", "optimizer"))
        assert max(end for _, end in backward.values()) <= norm[None][0] and norm[None][1] <= update[None][0] + 0.01
