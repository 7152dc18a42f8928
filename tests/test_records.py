"""What a run leaves: config.json, metrics.jsonl, an offline W&B run with the same numbers, a timeline on one clock."""

import json
import os
import pty
import subprocess
import sys
from collections import defaultdict

import pytest

from launch import STEPS, environment, launch, metrics, torchrun

SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 4, "--num_hidden_layers", 4]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on dp 2 x pp 2 with W&B and a timeline of step 3, after a longer run of the same name."""
    log_dir = tmp_path_factory.mktemp("runs")
    launch(8, 1, *SHORT, "--max_tokens", 1280, "--log_dir", log_dir, "--run_name", "again")
    assert len(metrics(log_dir, "again")) == 10
    env = {name: "" for name in ("WANDB_API_KEY", "WANDB_MODE")}
    flags = ["--dp_size", 2, "--pp_size", 2, "--max_tokens", 1024, "--profile_batch", 3, "--use_wandb"]
    done = launch(8, 4, *SHORT, *flags, "--log_dir", log_dir, "--run_name", "again", env={**env, "HOME": str(log_dir)})
    return log_dir / "again", done


def test_metrics_and_config(run):
    folder, done = run
    rows = metrics(folder.parent, "again")
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "a rerun under the same name starts the files anew"
    for row in rows:
        assert row.keys() == {"step", "loss", "trained_tokens", "tokens_per_second", "tokens_per_second_per_rank",
                              "memory_gb", "step_seconds"}
        assert row["trained_tokens"] == 256 * row["step"]
        assert row["tokens_per_second"] == pytest.approx(256 / row["step_seconds"])
        assert row["tokens_per_second_per_rank"] == pytest.approx(row["tokens_per_second"] / 4)
        assert 0.05 < row["memory_gb"] < 5
    config = json.loads((folder / "config.json").read_text())
    assert config["topology"] == {"dp_size": 2, "pp_size": 2, "tp_size": 1, "world_size": 4}
    show_help = [sys.executable, STEPS["8"] / "train.py", "--help"]
    help_text = subprocess.run(show_help, capture_output=True, text=True).stdout
    flags = {word.strip("[],").removeprefix("--") for word in help_text.split() if word.strip("[").startswith("--")}
    assert flags - {"help"} <= config.keys()
    assert done.stdout.count("step 4/4 | loss") == 1, "one rank prints, a line a step"


def test_wandb_offline_run_holds_the_same_losses(run):
    folder, _ = run
    [offline] = folder.glob("wandb/offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(offline)]
    done = subprocess.run(inspect, capture_output=True, text=True, timeout=60, env=environment(HOME=str(folder)))
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) == 1 and "records" in rows[0]:
        rows = rows[0]["records"]
    history = [row for row in rows if row.get("type") == "history"]
    assert len(history) == 4, (done.stdout + done.stderr)[-2000:]
    text = done.stdout
    for row in metrics(folder.parent, "again"):
        assert json.dumps(row["loss"]) in text, f"the loss of step {row['step']} is not in the W&B run"
    assert "again_DP(2)-PP(2)-TP(1)-Rank(2)" in text and "picotron_tutorial" in text


def test_timeline(run):
    folder, done = run
    assert "bubble: " in done.stdout and "20.0% ideal" in done.stdout  # (p-1)/(m+p-1) = 1/5
    trace = json.loads((folder / "timeline_batch3_all.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    by_kind = defaultdict(list)
    for event in spans:
        by_kind[event["cat"], event["pid"]].append(event)
    for rank in range(4):
        for kind in ("forward", "backward"):
            assert sorted(event["args"]["microbatch"] for event in by_kind[kind, rank]) == [0, 1, 2, 3]
        assert len(by_kind["optimizer", rank]) == 1 and by_kind["all-reduce", rank] and by_kind["wait", rank]
        assert len(by_kind["send", rank]) == len(by_kind["receive", rank]) == 4
    tracks = defaultdict(list)
    for event in spans:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track, times in tracks.items():
        times.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in zip(times, times[1:])), f"spans overlap on track {track}"
    error = trace["otherData"]["clock_error_us"]
    for first, last in ((0, 1), (2, 3)):  # the pipelines: ranks are dp 2 x pp 2 x tp 1
        sent = {event["args"]["microbatch"]: event["ts"] for event in by_kind["forward", first]}
        for event in by_kind["receive", last]:
            arrived = event["ts"] + event["dur"]
            assert arrived >= sent[event["args"]["microbatch"]] - 2 * error, "received before it was computed"


def test_a_terminal_gets_a_bar_and_never_a_question(tmp_path):
    command = torchrun(1, STEPS["3"] / "train.py", *SHORT, "--max_tokens", 512, "--use_wandb", "--log_dir", tmp_path)
    terminal, other_end = pty.openpty()
    env = environment(HOME=str(tmp_path), COLUMNS="120")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        env.pop(name, None)
    process = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=env)
    os.close(other_end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux ends a terminal that nobody writes to any more with an error
        pass
    assert process.wait(timeout=60) == 0, shown.decode()
    assert b"4/4" in shown and b"step 4/4 |" not in shown, "a bar instead of lines"
    assert len(metrics(tmp_path)) == 4 and list(tmp_path.glob("default_run/wandb/offline-run-*"))
