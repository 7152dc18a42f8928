"""compare_trainer.py: the flags of both programs, its figures from made-up measurements, and a round of both."""

import json
import re
import subprocess
import sys

import compare_trainer
import pytest
from compare_trainer import Steps, check_same_work, flags_of_ours, parse_args, summary
from launch import ROOT, environment

TINY = str(ROOT / "assets" / "tiny_llama")


def test_flags_are_those_of_the_script():
    done = subprocess.run([sys.executable, ROOT / "cluster" / "train_distributed.py", "--help"], env=environment(),
                          capture_output=True, text=True, check=True)
    words = map(str, flags_of_ours(parse_args(["--model", TINY]), "folder"))
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--\w+", done.stdout))


def test_figures():
    rounds = [Steps([1.0, 2.0, 1.0], [1.5, 2.0, 1.0], (3.0, 3.0)), Steps([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], (3.0, 3.0))]
    ours, theirs, ratio = summary(rounds, 100)
    assert ours.split()[-2:] == ["100.0", "tokens/s"] and theirs.split()[-2:] == ["50.0", "tokens/s"]
    assert ratio == "ratio: 1.750 (of the rounds 1.000 to 2.000)"


def test_other_work_is_not_compared():
    check_same_work((3.4984, 3.4992), "float32")
    with pytest.raises(SystemExit, match="3.4984 and 3.6000: not the same work"):
        check_same_work((3.4984, 3.6), "bfloat16")


@pytest.mark.parametrize("words, message", [
    (["--model", TINY, "--steps", "2"], "--steps 2: more than the 2"),
    (["--model", TINY, "--rounds", "0"], "must be at least 1"),
    (["--model", "nowhere"], "tools/get_smollm2.py"),
])
def test_bad_flags(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_args(words)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_round_of_both(tmp_path, capsys):
    """With a toy model: the losses of the first step are equal, so both read the same samples."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(TINY, num_hidden_layers=2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    compare_trainer.main(["--model", str(tmp_path), "--rounds", "1", "--steps", "4", "--seq_len", "32", "--dtype",
                          "float32", "--threads", "1"])
    printed = capsys.readouterr().out
    assert "round 1/1: ours: " in printed and re.search(r"^ratio: \d\.\d{3} ", printed, re.MULTILINE)
