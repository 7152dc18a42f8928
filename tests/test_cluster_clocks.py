"""The timeline of several machines has one clock, whatever theirs say."""

import re

from launch import ROOT, fork
from test_step8_timeline import nothing_arrives_before_it_is_made, read_trace


def test_transfers_agree_across_unlike_clocks(tmp_path):
    """The ranks' clocks disagree by seconds and days, and run at unlike speeds: the trace has that of rank 0 only."""
    done = fork(9, 3, ROOT / "cluster" / "train_distributed.py", "--pipelines", "2,3,3", "--gradient_accumulation", 6,
                "--batch_size", 2, "--seq_len", 128, "--max_steps", 2, "--profile_batch", 1, "--log_dir", tmp_path,
                "--run_name", "run", "--checkpoint_dir", tmp_path / "checkpoints",
                script=ROOT / "tests" / "support" / "unlike_clocks.py")
    error = float(re.search(r"the clocks of two ranks differ by at most (\d+) microseconds", done.stdout)[1])
    events = read_trace(tmp_path / "run" / "timeline_batch1_all.json")
    assert error < 1e6
    for first in (0, 1):
        nothing_arrives_before_it_is_made(events, error, first, 6)
    window = max(event["ts"] + event["dur"] for rank in events for event in events[rank] if event["ph"] == "X")
    assert window < 60e6, "the ranks' spans lie days apart"
