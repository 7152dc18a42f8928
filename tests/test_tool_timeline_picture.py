"""timeline_picture.py: what it finds out about a short run."""

import re

import pytest
from lab.launch import fork, writing
from timeline_picture import draw, overlap_of, read_trace


def test_overlap_of_all_reduces_with_backward(tmp_path):
    fork(6, 2, "--num_hidden_layers", 2, "--seq_len", 32, "--micro_batch_size", 1, "--dp_size", 2, "--max_tokens", 1024,
         "--gradient_accumulation_steps", 2, "--profile_batch", 2, "--log_dir", tmp_path, "--run_name", "run")
    trace = tmp_path / "run" / "timeline_batch2_all.json"
    draw(str(trace), str(tmp_path / "picture.png"))
    spans = read_trace(trace)
    end = max(span.end for span in spans if span.kind == "backward" and span.rank == 0)
    ends = [span.end - end for span in spans if span.kind == "all-reduce" and span.rank == 0]
    found = overlap_of(spans)
    assert found.startswith(f"rank 0: {len(ends)} all-reduces, ") and f" {1e3 * max(*ends, 0):.1f} ms after" in found

    (full := tmp_path / "full.png").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=f"error: can't write {re.escape(str(full))} .No space left on device.: make "):
        draw(str(trace), str(full))
    with pytest.raises(FileNotFoundError), writing(full):  # of another kind
        open(tmp_path / "nothing")
