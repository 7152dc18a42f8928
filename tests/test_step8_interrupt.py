"""Ctrl-C and a killed rank: all processes are gone within seconds, and metrics.jsonl holds all steps done."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time
import uuid

import pytest

from launch import STEPS, environment, torchrun

SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 4, "--max_tokens", 3200000]
SECONDS = 5
BLOCK = """
import os, runpy, sys, time
sys.path[0] = os.path.dirname(sys.argv[1])
sys.argv = sys.argv[1:]
import dataloader

ask = dataloader.MicroBatchDataLoader.__next__

def ask_or_hang(self):
    self.asked = getattr(self, "asked", 0) + 1
    if self.asked > 8 and os.environ["RANK"] == "0":
        time.sleep(1000)
    return ask(self)

dataloader.MicroBatchDataLoader.__next__ = ask_or_hang
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def processes(marker: str) -> dict[int, int | None]:
    """pid -> rank (None for torchrun itself) of all that run with MARKER=marker in their environment."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"MARKER={marker}" in variables:
            ranks = [int(text.removeprefix("RANK=")) for text in variables if text.startswith("RANK=")]
            found[int(path.parent.name)] = ranks[0] if ranks else None
    return found


class Run:
    """A run of four stages, in a process group of its own like a command typed at a terminal."""

    def __init__(self, log_dir, script=None):
        self.marker, self.metrics = uuid.uuid4().hex, log_dir / "default_run" / "metrics.jsonl"
        self.metrics.unlink(missing_ok=True)
        train = STEPS["8"] / "train.py"
        words = [script, train] if script else [train]
        command = torchrun(4, *words, "--pp_size", 4, "--log_dir", log_dir, *SHORT)
        self.output, self.errors = open(log_dir / "stdout.txt", "w+"), open(log_dir / "stderr.txt", "w+")
        self.process = subprocess.Popen(command, env=environment(MARKER=self.marker), start_new_session=True,
                                        stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.errors)

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while not self.metrics.exists() or self.metrics.read_text().count("\n") < count:
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, f"no step {count} within a minute\n{self.stderr()}"
            time.sleep(0.05)

    def stderr(self) -> str:
        return pathlib.Path(self.errors.name).read_text()

    def ends(self, seconds: float = SECONDS) -> None:
        """It ends in time, as a failure, with nothing left running, and each step that was shown is recorded."""
        start = time.monotonic()
        while processes(self.marker) and time.monotonic() < start + seconds:
            self.process.poll()
            time.sleep(0.05)
        left = processes(self.marker)
        assert not left, f"still running after {seconds} s (pid: rank): {left}\n{self.stderr()[-3000:]}"
        assert self.process.wait(timeout=1) != 0
        text = self.metrics.read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert text.endswith("\n") and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        shown = re.findall(r"^step (\d+)/", pathlib.Path(self.output.name).read_text(), re.MULTILINE)
        assert shown and len(rows) >= int(shown[-1])

    def kill(self) -> None:
        for pid in processes(self.marker):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(timeout=10)
        self.output.close()
        self.errors.close()


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("interrupt")  # one for all: only the first run has to encode the corpus


@pytest.fixture
def start(log_dir):
    runs = []

    def start(script=None):
        runs.append(Run(log_dir, script))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def test_ctrl_c_ends_all_ranks(start):
    run = start()
    run.wait_for_steps(3)
    assert sorted(rank for rank in processes(run.marker).values() if rank is not None) == [0, 1, 2, 3]
    os.killpg(run.process.pid, signal.SIGINT)
    run.ends()


def test_ctrl_c_ends_ranks_that_wait_for_each_other(start, tmp_path):
    """Stage 0 falls asleep in its third step: the others sit in a receive of gloo, where Python can't interrupt."""
    script = tmp_path / "block.py"
    script.write_text(BLOCK)
    run = start(script)
    run.wait_for_steps(2)
    time.sleep(1)
    assert run.metrics.read_text().count("\n") == 2, "stage 0 should sleep"
    os.killpg(run.process.pid, signal.SIGINT)
    run.ends()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_others(start, rank):
    run = start()
    run.wait_for_steps(3)
    [pid] = [pid for pid, its_rank in processes(run.marker).items() if its_rank == rank]
    os.kill(pid, signal.SIGKILL)
    run.ends()
