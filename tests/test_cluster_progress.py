"""What a run tells of itself: bars on a terminal, TensorBoard's curves, evaluations; also where a disk is full."""

import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
from lab.launch import MODELS, modules_of
from support.checkpoint_runs import SIZES, write_corpus, write_model

with modules_of(9):
    from hosts.exits import outlive_a_full_disk
    from ranks import course  # noqa: F401  before step 9's modules
    from ranks.disks import Disks
    from run import times
    from run.record import EVALUATIONS, METRICS, Record, Rows, Wandb
    from run.times import ABSENT
    from utils import UserError, writing


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
        return [row for row in rows if row]


def curves(folder):
    """TensorBoard's reader of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in curves(folder).Scalars(name)]


def a_record(folder, before: Record | None = None, start: int = 0, num_steps: int = 4, is_in_memory: bool = False,
             is_logging_rank: bool = True, **flags) -> Record:
    """Of one rank, whose disk is its own; it goes on after step `start` of the one `before`."""
    args = argparse.Namespace(log_dir=str(folder), run_name="run", wandb_project="", wandb_group="",
                              **{"use_wandb": False, "run_id": "0123", **flags})
    grid = times.pgm.ProcessGroupManager([1], 1)
    grid.is_logging_rank = is_logging_rank
    lines = [line for line in before.lines if json.loads(line)["step"] <= start] if before else []
    disks = Disks(str(folder), needs_room=not is_in_memory)
    return Record(args, grid, disks, num_steps, 100, start, lines, is_in_memory)


def log(record: Record, *steps: int) -> None:
    for step in steps:
        record.bar.begin()
        record.log(step, 5.0 - step, 0.5, 0.1, 0.5)


def test_bar_on_a_terminal_is_one_line(world_of_one, tmp_path, monkeypatch):
    terminal = Terminal()
    for name in "stdout", "stderr":
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("TERM", "xterm")
    record = a_record(tmp_path)
    log(record, 1, 2)
    record.evaluated(2, 3.25)
    record.sampled(2, "The")
    log(record, 3, 4)
    record.close()
    first, sample, bar, metrics = terminal.seen()
    assert (first, sample) == ("evaluation after step 2: loss 3.2500, perplexity 25.79", "sample after step 2: 'The'")
    assert bar == f"step 4/4 |{'#' * 20}| loss 1.0000 | evaluation 3.2500 | 200 tokens/s | 00:00 left"
    assert metrics.startswith("metrics: ") and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert re.search(rf"step 2/4 \|{'#' * 10}          \| loss 3.0000 \| ", terminal.getvalue())
    monkeypatch.setenv("TERM", "dumb")
    log(record := a_record(tmp_path), 1)
    record.close()
    assert "step 1/4 | loss 4.0000 | grad norm 0.500" in terminal.getvalue()


def test_curves_and_wandb_have_ranks_evaluations_and_samples(world_of_one, tmp_path):
    record = a_record(tmp_path)
    record.sinks.append(Wandb(str(tmp_path), run := mock.Mock(step=0), []))
    log(record, 1)
    record.used(1, [[1.5, 1.5, 0.25, 0.5, 99.0, ABSENT, ABSENT]])
    record.evaluated(1, 1.0)
    record.sampled(1, "The end")
    at_once = curves(tmp_path / "run")  # while it trains
    record.close()
    assert {name: at_once.Scalars(name)[0].value for name in at_once.Tags()["scalars"]} == pytest.approx({
        "loss": 4.0, "grad_norm": 0.5, "learning_rate": 0.1, "tokens_per_second": 200, "evaluation_loss": 1.0,
        "perplexity": math.e, "compute_seconds/rank0": 1.5, "wait_seconds/rank0": 0.25, "cpu_memory_gb/rank0": 0.5,
        "cpu_percent/rank0": 99.0})
    texts = {name: at_once.Tensors(name)[0].tensor_proto.string_val for name in at_once.Tags()["tensors"]}
    assert texts["sample/text_summary"] == [b"The end"] and texts["hosts/text_summary"][0].startswith(b"rank 0: ")
    sent = [call.args[0] for call in run.log.call_args_list if call.kwargs == {"step": 1}]
    everything = {name: value for values in sent for name, value in values.items()}
    assert everything["wait_seconds/rank0"] == 0.25 and everything["sample"] == "The end"
    assert everything["evaluation_loss"] == 1.0 and "gpu_percent/rank0" not in everything


def test_curves_of_a_run_that_goes_on(world_of_one, tmp_path):
    """Those after its start are hidden, and on a disk without them all come from the rows."""
    log(record := a_record(tmp_path), 1, 2, 3)
    record.close()
    log(record := a_record(tmp_path, record, start=2), 3, 4)
    record.close()
    whole = [(step, 5.0 - step) for step in (1, 2, 3, 4)]
    assert scalars(tmp_path / "run", "loss") == whole
    for path in (tmp_path / "run").glob("events*"):
        path.unlink()
    log(record := a_record(tmp_path, record, start=3), 4)
    record.close()
    assert scalars(tmp_path / "run", "loss") == whole


def test_without_tensorboard_a_run_says_so_once(world_of_one, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    log(record := a_record(tmp_path), 1, 2)
    record.close()
    assert capsys.readouterr().out.count("pip install tensorboard. metrics.jsonl has the losses") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_evaluations_of_a_run_that_goes_on(world_of_one, tmp_path):
    record = a_record(tmp_path)
    record.evaluated(0, 5.0)
    log(record, 1, 2)
    record.evaluated(2, 3.0)
    log(record, 3)
    record.evaluated(3, 2.5)
    record.close()
    record = a_record(tmp_path, record, start=2)
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
                record = a_record(tmp_path, record, 44, 70, is_in_memory=True)
            if step == 50:
                (tmp_path / "filler").unlink()
            log(record, step)
            if step in (40, 60):
                record.evaluated(step, 2.0)
        record.close()
        found = steps("metrics.jsonl")
        assert found == [*range(1, 61)] and steps(EVALUATIONS) == [40, 60]
        printed = capsys.readouterr().out
        assert printed.count("the run goes on, and what it can't write there") == 4
        assert printed.count("no more curves for TensorBoard ([Errno 28]") >= 1
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_rows_that_find_no_room(capsys):
    rows = Rows("metrics.jsonl", "a", [], open("/dev/full", "w"))
    rows.show(1, {"a": 1})
    rows.show(2, {"a": 2})
    rows.close()
    assert rows.left == b'{"a": 1}\n{"a": 2}\n' and capsys.readouterr().out.splitlines() == [
        "metrics.jsonl: No space left on device: the run goes on, and what it can't write there is written once there "
        "is room", "metrics.jsonl: the disk is full still, so the last rows are lost, 18 bytes: make room, or choose "
        "another --log_dir"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_disk_that_stays_full_to_the_end(world_of_one, tmp_path, capsys):
    """The records close, as often as they are asked to: what comes next, as a last checkpoint, is worth more."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", tmp_path], check=True)
    try:
        record = a_record(tmp_path, num_steps=60)
        log(record, *range(1, 61))
        record.evaluated(60, 2.0)
        record.close()
        record.leave()  # at the end of a generation, after that of the run
        names = [METRICS, EVALUATIONS]
        printed = capsys.readouterr().out
        assert [printed.count(f"run/{name}: the disk is full still, so the last rows are lost") for name in names] == [1, 1]
        assert printed.count("no more curves for TensorBoard ([Errno 28]") == 1 and f"room in {tmp_path}/run" in printed
        first = json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[0])
        assert first["step"] == 1
        subprocess.run(["mount", "-o", "remount,size=24k", tmp_path], check=True)
        refused = r"^can't write .*config.json \(No space left.*make room there, or choose another --log_dir"
        with pytest.raises(UserError, match=refused):
            a_record(tmp_path, notes=50_000 * "x").close()  # in config.json
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_row_that_a_full_disk_took_a_part_of(world_of_one, tmp_path):
    """Its folder is this run's also where no row of it is whole: nothing there gets another name."""
    log(record := a_record(tmp_path), 1)
    record.leave()
    (tmp_path / "run" / METRICS).write_text('{"step": 1, "lo')
    a_record(tmp_path, record, 1, is_in_memory=True).close()
    assert [json.loads(row)["step"] for row in (tmp_path / "run" / METRICS).open()] == [1]
    assert os.listdir(tmp_path) == ["run"]


def test_a_timeline_on_a_full_disk(world_of_one, tmp_path, monkeypatch, capsys):
    """One line with the file and the remedy; no part of a file is left, and no picture of it is offered."""
    path, args = tmp_path / "timeline_batch3_all.json", argparse.Namespace(log_dir=tmp_path, run_name="", profile_batch=3)
    monkeypatch.setattr(times.pgm, "process_group_manager", times.pgm.ProcessGroupManager([1], 1))

    def write(name, grid):  # as Timeline does
        with writing(name), open(name, "w") as file:
            file.write("[]")

    monkeypatch.setattr(times.timeline, "write", write)
    for is_full in True, False:
        if is_full:
            path.symlink_to("/dev/full")
        times.write_timeline(args, times.compare_clocks(), writes=True)
        printed = capsys.readouterr().out
        assert path.exists() != is_full and ("picture: " in printed) != is_full
        refused = rf"^can't write {path} \(No space left.*\): make room there, .* another --log_dir. The run goes on$"
        assert bool(re.search(refused, printed, re.M)) == is_full, printed


@pytest.mark.parametrize("logs", [False, True])
def test_one_process_at_a_time_writes_the_run_of_wandb(world_of_one, tmp_path, monkeypatch, capsys, logs):
    """Where another one logs from now on, the process that did ends it first: others begin after gather()."""
    gather, wandb = Disks.gather, mock.Mock(**{"init.return_value.step": 0})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_RUN_ID", "restored")
    monkeypatch.setenv("WANDB_RESUME", "restored")
    monkeypatch.setattr(Disks, "gather", lambda *args: wandb.gather() and gather(*args))
    record = a_record(tmp_path, is_logging_rank=logs, use_wandb=True)
    record.leave()
    calls = [name for name, *_ in wandb.mock_calls if name in ("gather", "init", "finish", "init().finish")]
    assert calls[-2:] == ["gather", "init"] if logs else calls[calls.index("finish"):][:2] == ["finish", "gather"]
    wandb.init.return_value.finish = lambda: open("/dev/full", "w").write(10_000 * "x")
    record.close()  # what comes next is worth more
    assert logs == ("W&B's run did not end well ([Errno 28] No space left on device): make" in capsys.readouterr().out)


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
    """A checkpoint of an older version has none."""
    record = a_record(tmp_path)
    log(record, 1)
    record.close()
    a_record(tmp_path, start=1).close()
    assert "the checkpoint of step 1 has no metrics of the steps before" in capsys.readouterr().out
    assert len((tmp_path / "run.1" / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_a_run_in_progress_keeps_its_rows(world_of_one, tmp_path):
    """Whoever would go on in its folder is refused before anything there has another name."""
    first = a_record(tmp_path)
    log(first, 1, 2)
    for run_id in "0123", "another":
        with pytest.raises(ValueError, match="a run in progress writes"):
            a_record(tmp_path, first, 1, run_id=run_id)
    log(first, 3)
    first.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3]


def test_a_branch_leaves_what_it_does_not_go_on_from(world_of_one, tmp_path):
    """--resume RUN/step_00000001: rows, evaluations and curves of later steps stay beside, in run.1."""
    log(record := a_record(tmp_path), 1, 2, 3)
    record.evaluated(3, 2.0)
    record.close()
    log(record := a_record(tmp_path, record, 1, run_id="branch"), 2)
    record.close()
    for folder, steps in ("run.1", [1, 2, 3]), ("run", [1, 2]):
        assert [json.loads(line)["step"] for line in (tmp_path / folder / "metrics.jsonl").open()] == steps
        assert scalars(tmp_path / folder, "loss") == [(step, 5.0 - step) for step in steps]
    assert (tmp_path / "run.1" / EVALUATIONS).read_text() and not (tmp_path / "run" / EVALUATIONS).exists()


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
        seen, *others = (path.read_bytes().decode() for path in sorted(tmp_path.glob(f"{kind}[01]")))
        seen += "".join(others) * ("measuring memory" not in seen)  # the rank with the most memory measures it
        for bar in bars:
            assert re.search(rf"\r{bar}: .*\r +\r", seen) if kind == "xterm" else bar not in seen, f"{bar}: {seen!r}"
    if script != "generate.py":
        assert bars[-1] not in (tmp_path / "xterm1").read_bytes().decode()
