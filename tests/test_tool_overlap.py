"""overlap.py: what it finds out about a short run."""

import re

from launch import ROOT, STEPS, launch

SHORT = ["--num_hidden_layers", 2, "--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 2]


def test_only_gradients_are_counted(tmp_path):
    """Step 5 sums one parameter at a time: the embedding, 9 a layer, the last norm and the projection."""
    done = launch(5, 2, STEPS["5"] / "train.py", *SHORT, "--dp_size", 2, "--max_tokens", 384, "--log_dir", tmp_path,
                  script=ROOT / "tools" / "overlap.py")
    assert "\n21 all-reduces a step\n" in done.stdout


def test_overlap_of_all_reduces_with_backward(tmp_path):
    done = launch(6, 2, STEPS["6"] / "train.py", *SHORT, "--dp_size", 2, "--max_tokens", 512, "--log_dir", tmp_path,
                  script=ROOT / "tools" / "overlap.py")
    count, length, blocked, hidden, exposed = map(float, re.search(
        r"(\d+) all-reduces a step\n([\d.]+) ms: .* for ([\d.]+) ms\n([\d.]+) ms of .* it, ([\d.]+) ms", done.stdout
    ).groups())
    assert count > 1 and blocked <= length and hidden + exposed > 0, done.stdout
