"""The sanity check's own judgement, on made-up runs: no training here."""

import json
import subprocess
import sys

import pytest

import sanity_check

CONFIG = dict(model_name="tiny_llama", num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None,
              dataset_name="sotu", seed=42, learning_rate=3e-3, seq_len=128, dtype="float32", micro_batch_size=4,
              gradient_accumulation_steps=8, max_grad_norm=1.0, warmup_steps=0, lr_decay="none",
              topology=dict(dp_size=1, pp_size=1, tp_size=1, world_size=1))
CURVE = [7 - step / 10 for step in range(30)]
NORMS = [2 + step % 3 for step in range(30)]


def write_run(folder, losses, norms=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    config = {**CONFIG, **config}
    tokens = config["micro_batch_size"] * config["gradient_accumulation_steps"] * config["seq_len"]
    rows = [{"step": i, "loss": loss, "grad_norm": norm, "tokens_per_second": 100.0 * i, "trained_tokens": i * tokens}
            for i, (loss, norm) in enumerate(zip(losses, norms or NORMS), 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs the tool with these words and a figure in tmp_path; gives its exit code and what it printed."""
    def run(*words):
        figure = ["--figure", tmp_path / "figure.png"]
        monkeypatch.setattr(sys, "argv", ["sanity_check.py", *map(str, [*figure, *words])])
        return sanity_check.main(), capsys.readouterr().out
    return run


@pytest.fixture
def no_figure(monkeypatch):
    """Leaves out the drawing, which takes the most of a test's time."""
    monkeypatch.setattr(sanity_check, "draw", lambda *args: None)


@pytest.mark.parametrize("what, dtype, gap, at, code", [
    ("loss", "float32", 9e-5, 20, 0), ("loss", "float32", 2e-4, 20, 1), ("loss", "float32", 2e-4, 21, 0),  # 20 steps
    ("loss", "float64", 9e-12, 30, 0), ("loss", "float64", 2e-11, 30, 1),  # all steps are judged
    ("loss", "bfloat16", 0.04, 1, 0), ("loss", "bfloat16", 0.06, 1, 1), ("loss", "float32", float("nan"), 3, 1),
    ("gradient norm", "float32", 1.9e-3, 20, 0), ("gradient norm", "float32", 2.1e-3, 20, 1),
    ("gradient norm", "float32", 1, 21, 0), ("gradient norm", "float64", 9e-12, 30, 0),
    ("gradient norm", "float64", 2e-11, 30, 1), ("gradient norm", "bfloat16", 0.04, 5, 0),
    ("gradient norm", "bfloat16", 0.06, 5, 1), ("gradient norm", "bfloat16", 0.06, 6, 0),
    ("gradient norm", "float32", float("nan"), 3, 1),
])
def test_the_tolerance_decides_the_exit_code(check, no_figure, tmp_path, what, dtype, gap, at, code):
    """Losses are compared as they are, gradient norms relative to the baseline's."""
    is_loss, losses, norms = what == "loss", list(CURVE), list(NORMS)
    if is_loss:
        losses[at - 1] -= gap
    else:
        norms[at - 1] *= 1 + gap
    runs = [write_run(tmp_path / name, *curves, dtype=dtype)
            for name, curves in {"baseline": (CURVE, NORMS), "tp4": (losses, norms)}.items()]
    found, printed = check("--plot", *runs)
    assert found == code, printed
    if gap == gap:  # the table shows what is not judged too
        judged = gap if at <= (20 if is_loss else {"float64": 30, "float32": 20, "bfloat16": 5}[dtype]) else 0
        cells = f"| {judged:.1e} | {gap:.1e} |" if is_loss else f"| 0.0e+00 | 0.0e+00 | {judged:.1e} |"
        assert cells in " ".join(printed.split()), printed
        assert (f"TP 4: its {what} is" in printed) == bool(code)
    if not is_loss and dtype == "float32" and at <= 20 and gap == gap:
        code, printed = check("--preset", "1b", "--plot", *runs)
        assert code == 1 and "float32 allows 1e-4" in printed, "the large model has its own limits"


@pytest.mark.parametrize("flags", [{"max_grad_norm": 2.0}, {"warmup_steps": 3}, {"lr_decay": "cosine"}])
def test_clipping_and_schedule_are_of_the_recipe(check, no_figure, tmp_path, flags):
    code, printed = check("--plot", write_run(tmp_path / "a", CURVE), write_run(tmp_path / "b", CURVE, **flags))
    assert code == 1 and f"b can't be compared: its {next(iter(flags))} is" in printed


def test_plot_draws_and_prints_the_table(check, tmp_path):
    lengths = {"a": 30, "b": 12, "c": 1}
    runs = [write_run(tmp_path / name, CURVE[:steps], NORMS[:steps]) for name, steps in lengths.items()]
    code, printed = check("--plot", *runs)
    assert code == 0, printed
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    header, _, baseline, *others = (line for line in printed.splitlines() if line.startswith("|"))
    cells = [cell.strip() for cell in baseline.strip("|").split("|")]
    assert cells == ["a", "1", "30", "4.1000", "", "", "", "1,600"], "the speed is the median without the first step"
    assert len(others) == 2 and all(len(line) == len(header) for line in others)


def test_missing_runs_are_reported(check, no_figure, tmp_path):
    run, gone = write_run(tmp_path / "run", CURVE), tmp_path / "gone"
    code, printed = check("--plot", run, gone, run)
    assert code == 1 and f"{gone} holds no run" in printed and "| run" in printed
    code, printed = check("--plot", gone, run)
    assert code == 1 and f"{gone} holds no run" in printed and "| run" not in printed, "there is no baseline"
    code, printed = check("--plot", write_run(tmp_path / "empty", []), run)
    assert code == 1 and "without a step" in printed


def fake_run(words: tuple, stdout, **_) -> subprocess.CompletedProcess:
    """In place of a run with these flags."""
    flags = {str(name)[2:]: value for name, value in zip(words[::2], words[1::2])}
    if flags["run_name"] == "tp2":
        stdout.write("error: out of paper")
        return subprocess.CompletedProcess(words, 1)
    dp_size = flags.get("dp_size", 1)
    flags["topology"] = {"dp_size": dp_size, "world_size": dp_size * flags.get("pp_size", 1) * flags.get("tp_size", 1)}
    samples = flags["micro_batch_size"] * flags["gradient_accumulation_steps"] * dp_size
    steps = flags["max_tokens"] // (samples * flags["seq_len"])
    write_run(flags.pop("log_dir") / flags["run_name"], CURVE[:steps], **flags)
    return subprocess.CompletedProcess(words, 0)


def test_rows_read_the_same_samples_and_a_failing_one_stops_no_other(check, no_figure, tmp_path, monkeypatch):
    monkeypatch.setattr(sanity_check, "torchrun", lambda ranks, path, *words: words)
    monkeypatch.setattr(sanity_check.subprocess, "run", fake_run)
    code, printed = check("--log_dir", tmp_path / "runs", "--max_tokens", 81920)
    assert code == 1 and "TP 2 did not run" in printed and "out of paper" in printed
    configs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/config.json")}
    assert set(configs) == set(sanity_check.DEFAULT_ROWS) - {"tp2"}
    for name, config in configs.items():
        samples = config["micro_batch_size"] * config["gradient_accumulation_steps"] * config["topology"]["dp_size"]
        assert samples == 32 and config["gradient_accumulation_steps"] > 1, name
    lines = [line.split("|") for line in printed.splitlines() if line[:1] == "|"][2:]
    ranks_and_steps = {line[1].strip(): [int(cell) for cell in line[2:4]] for line in lines}
    assert ranks_and_steps["Baseline"] == [1, 20] and ranks_and_steps["3D 2x2x2"] == [8, 20]
    assert len(ranks_and_steps) == len(configs)
    code, printed = check("--log_dir", tmp_path / "runs", "--steps", 20, "--rows", "tp4")
    assert code == 0 and "Baseline:" not in printed and "| Baseline" in printed, "an earlier baseline is used"
