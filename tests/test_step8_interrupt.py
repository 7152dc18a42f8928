"""Ctrl-C and a killed rank: all processes are gone within seconds, and metrics.jsonl holds all steps done."""

import json
import os
import re
import signal

import pytest
from lab.launch import STEPS, torchrun
from maintain.processes import eventually

SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 4, "--max_tokens", 3200000]
SECONDS = 20  # after 30 torchrun kills what doesn't end by itself, which then would not be noticed
BLOCK = """
import os, pathlib, runpy, sys, time
sys.path[0] = os.path.dirname(sys.argv[1])
asleep, sys.argv = sys.argv[0] + ".asleep", sys.argv[1:]
import dataloader

ask = dataloader.MicroBatchDataLoader.__next__

def ask_or_hang(self):
    self.asked = getattr(self, "asked", 0) + 1
    if self.asked > 8 and os.environ["RANK"] == "0":
        pathlib.Path(asleep).touch()
        time.sleep(1000)
    return ask(self)

dataloader.MicroBatchDataLoader.__next__ = ask_or_hang
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def start(command, tmp_path):
    """start(stages, script): a run of so many stages; with metrics, the path of its metrics.jsonl."""
    def start(stages: int, *script):
        corpus = tmp_path / "corpus.txt"  # short, so that its tokens are there at once; it is read again and again
        corpus.write_text("".join(f"We the people, line {i}.\n" for i in range(2000)))
        run = command(torchrun(stages, *script, STEPS["8"] / "train.py", "--pp_size", stages, "--num_hidden_layers",
                               stages, "--log_dir", tmp_path, "--dataset_name", corpus, *SHORT))
        run.metrics = tmp_path / "default_run" / "metrics.jsonl"
        return run

    return start


def ends(run) -> None:
    """It ends in time, as a failure, with nothing left running, and each step that was shown is recorded."""
    printed = run.end(SECONDS)
    assert run.process.returncode != 0
    text = run.metrics.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    shown = re.findall(r"^step (\d+)/", printed, re.MULTILINE)
    assert shown and len(rows) >= int(shown[-1])


def test_ctrl_c_ends_ranks_that_wait_for_each_other(start, tmp_path):
    """Stage 0 falls asleep in its third step: the other sits in a receive of gloo, where Python can't interrupt."""
    script = tmp_path / "block.py"
    script.write_text(BLOCK)
    run = start(2, script)
    run.wait_for_step(run.metrics, 2)
    assert eventually(script.with_name("block.py.asleep").exists), run.output()
    os.killpg(run.process.pid, signal.SIGINT)
    ends(run)
    assert run.metrics.read_text().count("\n") == 2
