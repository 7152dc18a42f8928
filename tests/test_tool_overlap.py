"""overlap.py: what it finds out about a short run."""

import re

from launch import ROOT, STEPS, fork

SHORT = ["--num_hidden_layers", 2, "--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 2]


def test_overlap_of_all_reduces_with_backward(tmp_path):
    done = fork(6, 2, STEPS["6"] / "train.py", *SHORT, "--dp_size", 2, "--max_tokens", 512, "--log_dir", tmp_path,
                script=ROOT / "tools" / "overlap.py")
    count, length, blocked, hidden, exposed = map(float, re.search(
        r"(\d+) all-reduces a step\n([\d.]+) ms: .* for ([\d.]+) ms\n([\d.]+) ms of .* it, ([\d.]+) ms", done.stdout
    ).groups())
    assert count > 1 and blocked <= length and hidden + exposed > 0, done.stdout
