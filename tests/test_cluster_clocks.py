"""The timeline of several machines has one clock, whatever theirs say."""

import re

from test_all_steps_timeline import nothing_arrives_before_it_is_made, read_trace

CLOCKS = """
import os, time
# Rank 1's was started 5 s before rank 0's and runs 100 ppm fast, as a machine's may. Rank 2's was started eleven days
# after and runs 10 % slow, more than any does: the step is short, and an error of its rate has to show within it.
AHEAD, RATE = {1: (5.0, 1.0001), 2: (-1e6, 0.9)}.get(int(os.environ["RANK"]), (0.0, 1.0))  # seconds; of the true rate
true_clock, start = time.perf_counter_ns, time.perf_counter_ns()
time.perf_counter_ns = lambda: start + int(AHEAD * 1e9) + int((true_clock() - start) * RATE)
"""


def test_transfers_agree_across_unlike_clocks(run_code, tmp_path):
    """The ranks' clocks disagree by seconds and days, and run at unlike speeds: the trace has that of rank 0 only."""
    done = run_code("cluster", 3, CLOCKS, "--pipelines", "2,3,3", "--gradient_accumulation", 6, "--batch_size", 2,
                    "--seq_len", 128, "--max_steps", 2, "--profile_batch", 1, "--log_dir", tmp_path, "--run_name",
                    "run", "--checkpoint_dir", tmp_path / "checkpoints", then="train_distributed.py")
    error = float(re.search(r"the clocks of two ranks differ by at most (\d+) microseconds", done.stdout)[1])
    events = read_trace(tmp_path / "run" / "timeline_batch1_all.json")
    assert error < 1e6
    for first in (0, 1):
        nothing_arrives_before_it_is_made(events, error, first, 6)
    window = max(event["ts"] + event["dur"] for rank in events for event in events[rank] if event["ph"] == "X")
    assert window < 60e6, "the ranks' spans lie days apart"
