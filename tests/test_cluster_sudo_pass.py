"""--sudo_pass of three_stages_simple_pp.py: accepted, and its value is nowhere."""

import subprocess
import sys

import pytest
from launch import ROOT, environment, modules_of, torchrun

with modules_of(9):
    import three_stages_simple_pp as script

SECRET = "c0rrect-h0rse"
SCRIPT = ROOT / "cluster" / "three_stages_simple_pp.py"


@pytest.mark.parametrize("arguments", [["--sudo_pass", SECRET], [f"--sudo_pass={SECRET}"]])
def test_it_is_dropped(monkeypatch, capsys, arguments):
    """Neither the run's flags nor what W&B takes for the command line have it. One rank warns."""
    for rank, warnings in ("0", 1), ("1", 0):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments, "--train_steps", "5"])
        args = script.parse_args()
        assert args.train_steps == 5 and SECRET not in f"{vars(args)} {sys.argv}"
        assert capsys.readouterr().err.count(script.WARNING) == warnings


def test_it_is_hidden_and_nothing_repeats_it(monkeypatch, capsys):
    done = subprocess.run([sys.executable, SCRIPT, "--sudo_pass", SECRET, "--batch_size", "10"],
                          env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == script.WARNING
    assert done.stderr.splitlines()[1].startswith("error: --batch_size 10") and len(done.stderr.splitlines()) == 2
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        script.parse_args()
    helped = capsys.readouterr().out
    assert "--train_steps" in helped and "sudo" not in helped


@pytest.mark.slow
def test_the_password_is_nowhere(command, tmp_path):
    """Neither in what is printed nor in what is written."""
    (corpus := tmp_path / "corpus.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    run = command(torchrun(1, SCRIPT, "--sudo_pass", SECRET, "--train_steps", 30, "--batch_size", 4, "--dataset_name",
                           corpus, "--log_dir", tmp_path, "--checkpoint_dir", tmp_path / "checkpoints"))
    printed = run.end(240)
    assert run.process.returncode == 0, printed[-3000:]
    assert SECRET not in printed
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
