"""How far a run is: the bar on a terminal, lines elsewhere; evaluations and samples in the files that a run leaves."""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from launch import modules_of

with modules_of(9):
    from ranks import course  # noqa: F401  before step 9's modules
    from ranks.disks import Disks
    from ranks.files import outlive_a_full_disk
    from run.live_state import Commit
    from run.record import EVALUATIONS, Board, Record, Step, perplexity


class Terminal(io.StringIO):
    """What a terminal gets, and the lines that one would see at the end."""

    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        rows = []
        for row in self.getvalue().split("\n"):
            cells = ""
            for part in row.split("\r"):  # each part overwrites the beginning of what is there
                cells = part + cells[len(part):]
            rows.append(cells.rstrip())
        return rows


def on_a_terminal(monkeypatch) -> Terminal:
    """Called in a test: pytest puts its own streams in place between a fixture and the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    return stream


def a_record(folder, start: int = 0, num_steps: int = 4, last: Commit | None = None) -> Record:
    """Of one rank, whose disk is its own."""
    args = argparse.Namespace(log_dir=str(folder), run_name="run", use_wandb=False)
    grid = types.SimpleNamespace(is_logging_rank=True, world_size=1, topology={})
    before = {"log_dir": str(folder), "run_name": "run"} if start else {}
    return Record(args, grid, Disks(str(folder), needs_room=last is None), torch.device("cpu"), num_steps, 100, start, before, last)


def log(record: Record, *steps: int) -> None:
    for step in steps:
        with record.bar():
            pass
        record.log(step, 5.0 - step, 0.5, 0.1, 0.5)


def test_bar_on_a_terminal_is_one_line(world_of_one, tmp_path, monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    record = a_record(tmp_path)
    log(record, 1, 2)
    record.evaluated(2, 3.25)
    print("sample after step 2: 'The'")
    log(record, 3, 4)
    record.evaluated(4, 3.125)
    record.close()
    lines = [line for line in terminal.seen() if line]
    assert lines[:2] == ["evaluation after step 2: loss 3.2500, perplexity 25.79", "sample after step 2: 'The'"]
    assert lines[2].startswith("evaluation after step 4") and lines[4].startswith("metrics: ") and len(lines) == 5
    assert lines[3] == f"step 4/4 |{'#' * 20}| loss 1.0000 | evaluation 3.1250 | 200 tokens/s | 00:00 left"
    bars = re.findall(r"step \d/.*?(?=\r|\n)", terminal.getvalue())
    assert bars[0] == f"step 0/4 |{'':20}| ? left" and bars[3].startswith(f"step 2/4 |{'#' * 10:20}| loss 3.0000 | ")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_lines_where_there_is_no_terminal(world_of_one, tmp_path, capsys, monkeypatch):
    record = a_record(tmp_path)
    log(record, 1, 2)
    record.close()
    printed = capsys.readouterr().out
    assert printed.count("step 1/4 | loss 4.0000 | grad norm 0.500") == 1 and printed.count("step 2/4") == 1
    assert "left" not in printed and "\r" not in printed
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    (dumb := a_record(tmp_path)).close()
    assert dumb.progress.disable


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
    assert rows == [{"step": step, "evaluation_loss": loss, "perplexity": pytest.approx(perplexity(loss))}
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
            record.complete(Step(step, 5.0, 0.5, 0.1, 2.0, 0.5))
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


def test_board_and_wandb_get_evaluation_sample_and_waiting(world_of_one, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent = []
    run = types.SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    board = Board(str(tmp_path), torch.device("cpu"))
    board.log(Step(1, 3.0, 0.5, 0.1, 2.0, 0.5), 100)
    board.log(Step(2, 2.0, 0.5, 0.1, 2.0, 0.75, evaluation=1.0, sample="The end"), 100)
    board.log(Step(3, 2.0, 0.5, 0.1, 2.0, None), 100)  # not measured
    board.close()
    assert perplexity(1e4) > 1e300, "where a float overflows"
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("wait_seconds/rank0")] == [1.5, 1.25]
    for name, value in (("evaluation_loss", 1.0), ("perplexity", perplexity(1.0))):
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(2, pytest.approx(value))]
    [text] = events.Tensors("sample/text_summary")
    assert text.step == 2 and text.tensor_proto.string_val == [b"The end"]
    assert [step for step, _ in sent] == [1, 2, 3] and sent[1][1]["sample"] == "The end"
    assert sent[0][1]["wait_seconds/rank0"] == 1.5 and "sample" not in sent[0][1]
    assert {"step_seconds/rank0", "compute_seconds/rank0", "cpu_memory_gb/rank0", "cpu_percent/rank0"} <= {*sent[0][1]}
