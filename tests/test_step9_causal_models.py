"""Causal language models of transformers, cut by their own plans: tools/families.py, and run_causal_lm.py."""

import re
import shutil

import pytest
import torch
import transformers
from lab.launch import MODELS, ROOT, STEPS, fork, losses
from packaging.version import Version

SCRIPT = STEPS["9"] / "run_causal_lm.py"
TOY = dict(vocab_size=1024, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
           intermediate_size=48, max_position_embeddings=64)


def verdicts(*flags, timeout: float) -> list[tuple[str, str, str]]:
    """(class, stages or tp, verdict) of each line."""
    done = fork(9, 2, *flags, script=ROOT / "tools" / "families.py", modules=MODELS, timeout=timeout)
    return re.findall(r"^(\w+) +(stages|tp) +([a-z]+(?: built)?) ", done.stdout, re.M)


@pytest.mark.slow
def test_all_families():
    """As many as the page says of this transformers or, if it is another, of the one before."""
    page = (STEPS["9"] / "FAMILIES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| exact \| (\w+) \|.*\| (\d+): ", page, re.M)
    bars = {version: tuple(map(int, numbers)) for version, *numbers in re.findall(
        r"with ([\d.]+), (\d+) are exact in stages and (\d+) over tp", page)}
    [newest] = re.findall(r"printed this table with transformers ([\d.]+)\n", page)
    bars[newest] = sum(int(count) for _, count in rows), sum(int(count) for over_tp, count in rows if over_tp == "exact")
    known = [version for version in bars if Version(version) <= Version(transformers.__version__)]
    in_stages, over_tp = bars[max(known, key=Version)]
    found = verdicts("--all", timeout=500)
    assert sum(line[1:] == ("stages", "exact") for line in found) >= in_stages
    assert sum(line[1:] == ("tp", "exact") for line in found) >= over_tp
    assert not [line for line in found if line[2] in ("unequal", "failed")]


def test_the_script_trains_as_one_process(tmp_path):
    directory = shutil.copytree(ROOT / "assets" / "tiny_llama", tmp_path / "model")  # for its tokenizer
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**TOY))
    for param in model.parameters():
        param.data.normal_(0, 0.1).add_(1 if param.dim() == 1 else 0)
    model.save_pretrained(directory)
    flags = ["--model_name_or_path", directory, "--dtype", "float64", "--device", "cpu", "--seq_len", 16, "--log_dir",
             tmp_path, "--max_tokens", 16 * 4 * 3 * 5]
    topology = ["--pipelines", "4;3,1", "--num_microbatches", "2,1"]
    for name, ranks, more in ("cut", 3, topology), ("whole", 1, ["--gradient_accumulation_steps", 3]):
        fork(9, ranks, *flags, *more, "--run_name", name, script=SCRIPT, modules=MODELS)
    cut, whole = losses(tmp_path, "cut"), losses(tmp_path, "whole")
    assert len(cut) == 5 and whole[-1] < whole[0]
    assert max(abs(a - b) for a, b in zip(cut, whole)) <= 1e-11
