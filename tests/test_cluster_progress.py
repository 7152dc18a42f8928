"""What a run tells of itself: evaluations and samples in the files that it leaves, also where a disk is full; and bars
of what takes long."""

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import types

import pytest

from checkpoint_runs import SIZES, write_corpus, write_model
from launch import MODELS, modules_of

with modules_of(9):
    from ranks import course  # noqa: F401  before step 9's modules
    from ranks.disks import Disks
    from ranks.files import outlive_a_full_disk
    from run.live_state import Commit
    from run.record import EVALUATIONS, Record


def a_record(folder, start: int = 0, num_steps: int = 4, last: Commit | None = None) -> Record:
    """Of one rank, whose disk is its own."""
    args = argparse.Namespace(log_dir=str(folder), run_name="run", use_wandb=False)
    grid = types.SimpleNamespace(is_logging_rank=True, world_size=1, topology={})
    before = {"log_dir": str(folder), "run_name": "run"} if start else {}
    return Record(args, grid, Disks(str(folder), needs_room=last is None), num_steps, 100, start, before, last)


def log(record: Record, *steps: int) -> None:
    for step in steps:
        record.log(step, 5.0 - step, 0.5, 0.1, 0.5)


def test_evaluations_of_a_run_that_goes_on(world_of_one, tmp_path):
    record = a_record(tmp_path)
    record.evaluated(0, 5.0)
    log(record, 1, 2)
    record.evaluated(2, 3.0)
    log(record, 3)
    record.evaluated(3, 2.5)
    record.close()
    record = a_record(tmp_path, start=2)
    log(record, 3, 4)
    record.evaluated(4, 2.0)
    record.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / EVALUATIONS).read_text().splitlines()]
    assert rows == [{"step": step, "evaluation_loss": loss, "perplexity": pytest.approx(math.exp(loss))}
                    for step, loss in ((0, 5.0), (2, 3.0), (4, 2.0))]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    record = a_record(tmp_path)  # another run of that name: the older one's folder is kept
    record.close()
    assert (tmp_path / "run.1" / EVALUATIONS).exists() and not (tmp_path / "run" / EVALUATIONS).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_full_disk_under_the_logs_costs_nothing(world_of_one, tmp_path, capsys):
    """It is said once, the run and its next generation go on, and what could not be written is once there is room."""
    def steps(name: str) -> list[int]:
        return [json.loads(line)["step"] for line in (tmp_path / "run" / name).read_text().splitlines()]

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=True)
    try:
        record = a_record(tmp_path, num_steps=70)
        for step in range(1, 61):
            if step == 3:
                subprocess.run(["dd", "if=/dev/zero", f"of={tmp_path}/filler", "bs=4k"], stderr=subprocess.DEVNULL)
            if step == 45:  # the processes go on in a new generation
                record.leave()
                record = a_record(tmp_path, 44, 70, Commit(44, 5.0, 0.5, 0.1))
            if step == 50:
                (tmp_path / "filler").unlink()
            log(record, step)
            if step in (40, 60):
                record.evaluated(step, 2.0)
        record.close()
        found = steps("metrics.jsonl")
        assert found[-16:] == [*range(45, 61)] and found[:2] == [1, 2] and steps(EVALUATIONS) in ([40, 60], [60])
        assert [*(tmp_path / "run").glob("*before*")] == []
        assert capsys.readouterr().out.count("the run goes on, and what it can't write there") == 3
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_output_outlives_a_full_disk_and_not_a_closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    for place, expected in (("/dev/full", contextlib.nullcontext()), (writer, pytest.raises(BrokenPipeError))):
        stream = open(place, "w", buffering=1)
        outlive_a_full_disk(stream)
        with expected:
            print("step 1", file=stream, flush=True)
        with contextlib.suppress(OSError):
            stream.close()  # which writes what is left


def test_without_rows_of_its_own_a_run_says_so(world_of_one, tmp_path, capsys):
    """The run that has left rows there has another id."""
    record = a_record(tmp_path)
    log(record, 1)
    record.close()
    (tmp_path / "run" / "config.json").write_text('{"run_id": "older"}')
    a_record(tmp_path, start=1).close()
    assert "the metrics of the steps up to 1 are on none of these hosts" in capsys.readouterr().out
    assert len((tmp_path / "run.1" / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


SCREEN = """
import atexit, io, os
from ranks import progress
progress.DELAY, out = 0, sys.argv.pop(1)
sys.stdout = sys.stderr = screen = io.StringIO()
screen.isatty = lambda: True
atexit.register(lambda: open(out + os.environ["RANK"], "w", newline="").write(screen.getvalue()))
"""
WORK = {  # script -> its flags, and the names of the bars
    "plan.py": (["--measure", "{}/cluster.json", "--measure_seconds", 1, "--num_hidden_layers", 2, "--seq_len", 16],
                ["measuring memory", "measuring speed", "measuring links"]),
    "train_distributed.py": (["--model_name", "{}/model", "--dataset_name", "{}/corpus", "--max_steps", 1, "--seq_len",
                              16, "--equal_shares", "--pipelines", "2,2", "--log_dir", "{}", "--checkpoint_dir", "{}"],
                             ["encoding", "loading weights"]),
    "generate.py": (["--checkpoint", "{}/model", "--prompt", "We"], ["loading weights"]),
}


@pytest.mark.parametrize("script", WORK)
def test_bars_on_a_terminal_alone(run_code, tmp_path, script):
    """Each has the work's name, and is gone when that ends. Of what all ranks do at once, the first one shows it."""
    sizes = {**SIZES, "vocab_size": 1024}
    write_model(tmp_path / "model", "llama", "float32", **sizes)
    write_corpus(tmp_path)
    words, bars = WORK[script]
    words = [str(word).format(tmp_path) for word in words] + ["--device", "cpu"]
    for kind in "xterm", "dumb":
        run_code("cluster", 2 - (script == "generate.py"), SCREEN, tmp_path / kind, *words, then=script,
                 env={"TERM": kind, "XDG_CACHE_HOME": str(tmp_path / f"cache of {kind}")}, modules=MODELS)
        seen = (tmp_path / f"{kind}0").read_bytes().decode()
        for bar in bars:
            assert re.search(rf"\r{bar}: .*\r +\r", seen) if kind == "xterm" else bar not in seen, f"{bar}: {seen!r}"
    if script != "generate.py":
        assert bars[-1] not in (tmp_path / "xterm1").read_bytes().decode()
