"""What a run leaves behind: metrics.jsonl, config.json, W&B; and what it shows on a terminal."""

import fcntl
import filecmp
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import time

import pytest
from lab.launch import STEPS, environment, fork, metrics, torchrun

METRICS = ["step", "loss", "grad_norm", "learning_rate", "trained_tokens", "tokens_per_second",
           "tokens_per_second_per_rank", "memory_gb", "step_seconds"]
SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--num_hidden_layers", 2, "--learning_rate", 0.001]
SECONDS = 120  # on a terminal: a run that asks a question there waits for ever


def on_a_terminal(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Runs `command` with a pseudo-terminal as stdin, stdout and stderr: its exit code, and what one would see."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # lines, columns, and no pixels
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    output, deadline = b"", time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    output += os.read(ours, 1 << 16)
                except OSError:  # all who had the terminal open are gone
                    return process.wait(timeout=60), output.decode()
        raise AssertionError(f"not done after {SECONDS} s; does it wait for an answer?\n{output.decode()}")
    finally:
        process.terminate()
        process.wait(timeout=40)
        os.close(ours)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def terminal_run(log_dir):
    """Two stages and W&B on a terminal, without a login: (what was seen, the run's folder as it was then)."""
    env = environment(HOME=str(log_dir), TERM="xterm")
    env = {name: value for name, value in env.items() if not name.startswith("WANDB_")}
    command = torchrun(2, STEPS["8"] / "train.py", *SHORT, "--pp_size", 2, "--gradient_accumulation_steps", 2,
                       "--max_tokens", 256, "--run_name", "pair", "--log_dir", log_dir, "--use_wandb",
                       "--wandb_project", "speeches", "--wandb_group", "sweep", "--profile_batch", 2)
    code, seen = on_a_terminal(command, env)
    assert code == 0, seen
    return seen, shutil.copytree(log_dir / "pair", log_dir / "pair_before_its_rerun")


@pytest.fixture(scope="module")
def rerun(log_dir, terminal_run):
    """Half as many steps under the same name, not on a terminal, without W&B or a timeline."""
    return fork(8, 2, *SHORT, "--pp_size", 2, "--gradient_accumulation_steps", 2, "--max_tokens", 128,
                "--run_name", "pair", "--log_dir", log_dir)


def test_metrics(terminal_run):
    rows = metrics(terminal_run[1].parent, terminal_run[1].name)
    assert [list(row) for row in rows] == [METRICS] * 4
    for step, row in enumerate(rows, 1):
        assert (row["step"], row["trained_tokens"]) == (step, step * 64)
        assert 4 < row["loss"] < 10 and row["loss"] != round(row["loss"], 5), "full precision"
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(64)
        assert row["tokens_per_second_per_rank"] * 2 == pytest.approx(row["tokens_per_second"])
        assert 0.1 < row["grad_norm"] < 100 and row["learning_rate"] == 0.001, "no warm-up and no decay"
        assert 0.05 < row["memory_gb"] < 5 and row["step_seconds"] < SECONDS


def test_config(terminal_run, log_dir):
    config = json.loads((terminal_run[1] / "config.json").read_text())
    flags = re.findall(r'add_argument\("--(\w+)"', (STEPS["8"] / "train.py").read_text())
    assert len(flags) > 20 and set(config) == {*flags, "topology"}
    assert config["topology"] == {"dp_size": 1, "pp_size": 2, "tp_size": 1, "world_size": 2}
    given = {"seq_len": 32, "num_hidden_layers": 2, "learning_rate": 0.001, "use_wandb": True, "run_name": "pair",
             "log_dir": str(log_dir), "max_tokens": 256, "pp_engine": "1f1b", "seed": 42, "num_attention_heads": None}
    assert given.items() <= config.items()


def test_one_rank_writes_one_of_each(terminal_run):
    folder = terminal_run[1]
    assert sorted(os.listdir(folder)) == ["config.json", "metrics.jsonl", "timeline_batch2_all.json", "wandb"]
    assert len(list(folder.glob("wandb/*run-*"))) == 1


def test_rerun_starts_anew_and_keeps_the_older_run(log_dir, terminal_run, rerun):
    assert sorted(os.listdir(log_dir / "pair")) == ["config.json", "metrics.jsonl"]
    assert f"an older run has the same name: its folder is now {log_dir}/pair.1\n" in rerun.stdout
    older = filecmp.dircmp(log_dir / "pair_before_its_rerun", log_dir / "pair.1")
    assert older.common and not older.left_only + older.right_only + older.diff_files
    before = metrics(log_dir, "pair_before_its_rerun")
    rows = metrics(log_dir, "pair")
    assert [row["loss"] for row in rows] == [row["loss"] for row in before[:2]], "the same run again"
    assert json.loads((log_dir / "pair" / "config.json").read_text())["max_tokens"] == 128


def test_a_run_in_progress_is_not_touched(log_dir, terminal_run, rerun):
    """It holds a lock on its metrics.jsonl. The second run of that name ends, and does not wait."""
    arguments = ["--run_name", "pair", "--log_dir", log_dir, "--max_tokens", 32]
    before = sorted(os.listdir(log_dir))
    with open(log_dir / "pair" / "metrics.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = fork(8, 1, *SHORT, *arguments, "--gradient_accumulation_steps", 1, check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert "or a run in progress writes there" in done.stderr and "another --run_name" in done.stderr
    assert sorted(os.listdir(log_dir)) == before and len(metrics(log_dir, "pair")) == 2


LINE = (r"^step (\d)/{} \| loss \d+\.\d{{4}} \| grad norm \d+\.\d{{3}} \| (\d+) tokens \| "
        r"[\d.]+K? tokens/s \| [\d.]+K? per rank \| "
        r"\d\.\d\d GB\r?$")


def test_terminal_shows_a_line_a_step_and_no_question(terminal_run):
    seen, _ = terminal_run
    assert re.findall(LINE.format(4), seen, re.MULTILINE) == [(str(i), str(64 * i)) for i in range(1, 5)], seen
    assert "choice" not in seen and "API key" not in seen


def test_elsewhere_the_same_lines_are_shown(rerun):
    assert re.findall(LINE.format(2), rerun.stdout, re.MULTILINE) == [("1", "64"), ("2", "128")], rerun.stdout
    assert "\r" not in rerun.stdout + rerun.stderr
