"""--timeout: a rank that waits for another one longer than that ends with an error. It holds for each process group."""

import re

import pytest

GROUPS = """
import json
import torch, torch.distributed as dist
import process_group_manager as pgm

pgm.init_process_group("gloo", 7.5)
pgm.setup_process_group_manager(*json.loads(sys.argv[1]))
grid = pgm.process_group_manager
groups = {name: value for name, value in vars(grid).items() if isinstance(value, dist.ProcessGroup)}
groups["default"] = dist.group.WORLD
if hasattr(grid, "group_of"):
    groups["of owners"] = grid.group_of([(0, 0), (0, 1)])
for name, group in groups.items():
    seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    assert seconds == 7.5, (name, seconds)
print(f"<{' '.join(sorted(groups))}>")
"""
SLEEPER = """
import os, time
import dataloader

if os.environ["RANK"] == "1":
    dataloader.MicroBatchDataLoader.__next__ = lambda self: time.sleep(1000)
"""


@pytest.mark.parametrize("step, sizes, names", [
    (2, "[2, 1, 1]", "default dp_group pp_group tp_group"),
    (8, "[1, 2, 1]", "default dp_group pp_backward_group pp_ends_group pp_group tp_group"),
    (9, "[[2], 1]", "default of owners pp_backward_group pp_group tp_group"),
])
def test_each_group_has_the_timeout(run_code, step, sizes, names):
    assert run_code(step, 2, GROUPS, sizes, timeout=60).stdout.count(f"<{names}>") == 2


@pytest.mark.parametrize("flags", [["--dp_size", 2], pytest.param(["--pp_size", 2], marks=pytest.mark.slow)])
def test_a_rank_that_sleeps_is_not_waited_for(run_code, tmp_path, flags):
    """The other one has its own gradients soon, and waits 3 s for the sleeper's, or for what it was to receive."""
    done = run_code(8, 2, SLEEPER, *flags, "--timeout", 3, "--num_hidden_layers", 2, "--seq_len", 16,
                    "--micro_batch_size", 1, "--gradient_accumulation_steps", 2, "--max_tokens", 256,
                    "--log_dir", tmp_path, then="train.py", check=False, timeout=60)
    assert done.returncode == 1 and re.search("Timed out waiting 3000ms", done.stderr), done.stderr
