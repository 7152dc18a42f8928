"""--sudo_pass of three_stages_simple_pp.py: accepted, and its value is nowhere."""

import pathlib
import subprocess
import sys
import time
import uuid

import pytest

from launch import STEPS, environment, modules_of, torchrun
from test_step8_interrupt import processes

with modules_of(9):
    from training import sudo_pass

SECRET = "c0rrect-h0rse"
SCRIPT = ROOT / "cluster" / "three_stages_simple_pp.py"


@pytest.mark.parametrize("arguments, kept", [
    (["--sudo_pass", SECRET, "--train_steps", "5"], ["--train_steps", "5"]),
    (["--train_steps", "5", f"--sudo_pass={SECRET}"], ["--train_steps", "5"]),
    (["--sudo", SECRET, "--sudo_password", SECRET, "-sudo_pass", SECRET], []),
    (["--sudo_pass", f"--su{SECRET}", "--run_name", "a"], ["--run_name", "a"]),
    (["--run_name", "a", "--sudo_pass"], ["--run_name", "a"]),
])
def test_without_password(arguments, kept):
    assert sudo_pass.without_password(arguments) == kept


def test_the_password_is_nowhere(tmp_path):
    """Neither in what is printed or written, W&B's files included, nor in the title of a worker while it runs."""
    marker, titles, corpus = uuid.uuid4().hex, [], tmp_path / "corpus.txt"
    corpus.write_text("It was the best of times, it was the worst of times. " * 40)
    command = torchrun(1, SCRIPT, "--sudo_pass", SECRET, "--train_steps", 30, "--batch_size", 4,
                       "--dataset_name", corpus, "--log_dir", tmp_path, "--use_wandb")
    process = subprocess.Popen(command, env=environment(MARKER=marker, WANDB_MODE="offline", WANDB_SILENT="true"),
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "three_stages" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and not titles:
        if metrics.exists() and metrics.stat().st_size:  # training has begun
            titles = [pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid, rank in processes(marker).items()
                      if rank == 0]
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr[-3000:]
    assert titles and any(b"--train_steps" in title for title in titles)
    assert not any(SECRET.encode() in title for title in titles)
    assert SECRET not in stdout + stderr
    assert [line for line in stderr.splitlines() if "sudo_pass" in line] == [sudo_pass.WARNING]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    [record] = [path.read_bytes() for path in written if path.suffix == ".wandb"]
    assert b"--train_steps" in record, "W&B notes the command line elsewhere: look there"
    assert "config.json" in {path.name for path in written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_one_rank_warns(tmp_path):
    """And what a real start prints of a mistake is one line."""
    done = subprocess.run([sys.executable, SCRIPT, "--sudo_pass", SECRET, "--batch_size", "10"],
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == sudo_pass.WARNING
    assert done.stderr.splitlines()[1].startswith("error: --batch_size 10") and len(done.stderr.splitlines()) == 2
    code = "import sys, sudo_pass as own; sys.argv[1:] = ['--sudo_pass']; own.os.execv = print; own.drop_password()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(RANK="1", PYTHONPATH=str(STEPS["9"])),
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr
