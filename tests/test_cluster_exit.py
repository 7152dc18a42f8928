"""How the scripts of cluster/ end: no thread of gloo outlives main(), for it could abort the process."""

import subprocess
import sys

import pytest
from launch import ROOT, environment

END = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print("threads of gloo:", [name for name in names if "gloo" in name])
"""
FLAGS = {
    "train_single_test": ["--steps", 1, "--max_batch_size", 1],
    "three_stages_simple_pp": ["--train_steps", 1, "--profile_batch", -1],
    "train_distributed": ["--max_steps_per_epoch", 1, "--gradient_accumulation", 1, "--equal_shares"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the threads")
@pytest.mark.parametrize("script", [
    "train_distributed", *(pytest.param(script, marks=pytest.mark.slow) for script in (
        "train_single_test", "three_stages_simple_pp"))])
def test_no_thread_of_gloo_outlives_the_training(tmp_path, script):
    """Each process starts anew here: in one that has imported torch.distributed.nn before, the test could not fail."""
    (tmp_path / "corpus.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    places = {"train_single_test": [], "three_stages_simple_pp": ["--log_dir", tmp_path],
              "train_distributed": ["--log_dir", tmp_path, "--checkpoint_dir", tmp_path]}[script]
    words = [ROOT / "cluster" / f"{script}.py", "--device", "cpu", "--seq_len", 16, "--dataset_name",
             tmp_path / "corpus.txt", *FLAGS[script], *places]
    done = subprocess.run([sys.executable, "-c", END, *map(str, words)], env=environment(), capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("threads of gloo: []\n"), done.stdout + done.stderr
