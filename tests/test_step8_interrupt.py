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
from processes import processes

SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 4, "--max_tokens", 3200000]
SECONDS = 20  # after 30 torchrun kills what doesn't end by itself, which then would not be noticed
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


class Run:
    """A run of `stages` stages, in a process group of its own like a command typed at a terminal."""

    def __init__(self, folder, stages: int, script=None):
        self.marker, self.metrics = uuid.uuid4().hex, folder / "default_run" / "metrics.jsonl"
        corpus = folder / "corpus.txt"  # short, so that its tokens are there at once; it is read again and again
        corpus.write_text("".join(f"We the people, line {i}.\n" for i in range(2000)))
        train = STEPS["8"] / "train.py"
        words = [script, train] if script else [train]
        command = torchrun(stages, *words, "--pp_size", stages, "--num_hidden_layers", stages, "--log_dir", folder,
                           "--dataset_name", corpus, *SHORT)
        self.output, self.errors = open(folder / "stdout.txt", "w+"), open(folder / "stderr.txt", "w+")
        self.process = subprocess.Popen(command, env=environment(MARKER=self.marker), start_new_session=True,
                                        stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.errors)

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 180
        while not self.metrics.exists() or self.metrics.read_text().count("\n") < count:
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, f"no step {count} within minutes\n{self.stderr()}"
            time.sleep(0.05)

    def stderr(self) -> str:
        return pathlib.Path(self.errors.name).read_text()

    def ends(self) -> None:
        """It ends in time, as a failure, with nothing left running, and each step that was shown is recorded."""
        start = time.monotonic()
        while processes(self.marker) and time.monotonic() < start + SECONDS:
            self.process.poll()
            time.sleep(0.05)
        left = processes(self.marker)
        assert not left, f"still running after {SECONDS} s (pid: rank): {left}\n{self.stderr()[-3000:]}"
        assert self.process.wait(timeout=60) != 0
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
        self.process.wait(timeout=60)
        self.output.close()
        self.errors.close()


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(stages: int, script=None):
        runs.append(Run(tmp_path, stages, script))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(start):
    run = start(4)
    run.wait_for_steps(3)
    assert sorted(rank for rank in processes(run.marker).values() if rank is not None) == [0, 1, 2, 3]
    os.killpg(run.process.pid, signal.SIGINT)
    run.ends()


def test_ctrl_c_ends_ranks_that_wait_for_each_other(start, tmp_path):
    """Stage 0 falls asleep in its third step: the other sits in a receive of gloo, where Python can't interrupt."""
    script = tmp_path / "block.py"
    script.write_text(BLOCK)
    run = start(2, script)
    run.wait_for_steps(2)
    time.sleep(1)
    assert run.metrics.read_text().count("\n") == 2, "stage 0 should sleep"
    os.killpg(run.process.pid, signal.SIGINT)
    run.ends()


@pytest.mark.slow
@pytest.mark.parametrize("stages, rank", [(2, 0), (4, 0), (4, 2)])
def test_a_killed_rank_ends_the_others(start, stages, rank):
    run = start(stages)
    run.wait_for_steps(3)
    [pid] = [pid for pid, its_rank in processes(run.marker).items() if its_rank == rank]
    os.kill(pid, signal.SIGKILL)
    run.ends()
