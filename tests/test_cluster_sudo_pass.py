"""--sudo_pass of three_stages_simple_pp.py: accepted, and its value is nowhere."""

import pathlib
import subprocess
import sys

import pytest
from launch import ROOT, environment, fork, modules_of, torchrun

with modules_of(9):
    import three_stages_simple_pp as script

SECRET = "c0rrect-h0rse"
SCRIPT = ROOT / "cluster" / "three_stages_simple_pp.py"


@pytest.mark.parametrize("arguments, kept", [
    (["--sudo_pass", SECRET, "--train_steps", "5"], ["--train_steps", "5"]),
    (["--train_steps", "5", f"--sudo_pass={SECRET}"], ["--train_steps", "5"]),
    (["--sum", "1", "--sudo_passes", "2", "--su=3", "-su"], None),
    (["--sudo_pass", f"--su{SECRET}", "--run_name", "a"], ["--run_name", "a"]),
    (["--run_name", "a"], None),
])
def test_the_process_starts_anew_without_it(monkeypatch, capsys, arguments, kept):
    """No other flag is dropped, whatever it begins with. One rank warns."""
    started = []
    monkeypatch.setattr(script.os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "script.py", *arguments])
    for rank, warnings in ("0", 1), ("1", 0):
        monkeypatch.setenv("RANK", rank)
        script.drop_password()
        assert capsys.readouterr().err.count(script.WARNING) == (warnings if kept is not None else 0)
    assert started == ([] if kept is None else [[sys.executable, "-u", "script.py", *kept]] * 2)


def test_it_is_hidden_and_nothing_repeats_it():
    done = subprocess.run([sys.executable, SCRIPT, "--sudo_pass", SECRET, "--batch_size", "10"],
                          env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == script.WARNING
    assert done.stderr.splitlines()[1].startswith("error: --batch_size 10") and len(done.stderr.splitlines()) == 2
    helped = fork(9, 1, "--help", script=SCRIPT).stdout
    assert "--train_steps" in helped and "sudo" not in helped


@pytest.mark.slow
def test_the_password_is_nowhere(command, tmp_path):
    """Neither in what is printed or written, nor in the title of a worker while it runs."""
    (corpus := tmp_path / "corpus.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    run = command(torchrun(1, SCRIPT, "--sudo_pass", SECRET, "--train_steps", 30, "--batch_size", 4, "--dataset_name",
                           corpus, "--log_dir", tmp_path, "--checkpoint_dir", tmp_path / "checkpoints"))
    run.wait_for_step(tmp_path / "three_stages" / "metrics.jsonl", 1)
    title = pathlib.Path(f"/proc/{run.ranks()[0]}/cmdline").read_bytes()
    printed = run.end(240)
    assert run.process.returncode == 0, printed[-3000:]
    assert b"--train_steps" in title and SECRET.encode() not in title
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
