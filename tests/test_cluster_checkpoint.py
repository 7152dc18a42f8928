"""Checkpoints of train_distributed.py: what is saved under one topology goes on under any other, and what files hold.

In float64, against one process that was never stopped.
"""

import json
import os
import zlib

import pytest
import torch
from lab.huggingface import ExactRMSNorm, their_name
from lab.launch import fork, losses, metrics, modules_of
from support.checkpoint_runs import (
    PROMPT, ROOT, SAVED, SCRIPT, STEPS, TOPOLOGIES, checkpoint, flags_of, tensors_of,
)

with modules_of(9):
    from model import Llama
    from utils import load_config

TOLERANCE, OF_LOSSES = 1e-9, 1e-12  # the latter is what the page promises of losses


@pytest.fixture(scope="module")
def moved(recorded, tmp_path_factory):
    """The folder of a run "moved", which goes on with "2;1" at step SAVED over tp ranks, and what it prints. Further
    pairs: test_random_runs.py."""
    folder, (ranks, flags) = tmp_path_factory.mktemp("moved"), TOPOLOGIES["tp2"]
    words = flags_of(folder, "moved", recorded / "model", dataset_name=recorded / "corpus", sample_every=STEPS,
                     prompt=PROMPT)
    return folder, fork(9, ranks, *words, *flags, "--resume", checkpoint(recorded, "2;1", SAVED), script=SCRIPT).stdout


def test_stopping_is_not_needed_for_equal_losses(recorded):
    """The runs that save compute as one process does; else the tests below would compare with something wrong."""
    expected, found = losses(recorded / "runs", "one"), losses(recorded / "runs", "2;1")
    assert len(found) == STEPS and found == pytest.approx(expected, rel=0, abs=OF_LOSSES)


def test_another_topology_goes_on_where_one_stopped(recorded, moved):
    folder, printed = moved
    assert f"going on after step {SAVED}: {checkpoint(recorded, '2;1', SAVED)}\n" in printed
    assert printed.count(f"checkpoint: {checkpoint(folder, 'moved', SAVED)} (") == 1, "where a branch begins"
    expected, found = metrics(recorded / "runs", "one"), metrics(folder / "runs", "moved")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), "those before the checkpoint as well"
    for key, off in {"loss": OF_LOSSES, "grad_norm": TOLERANCE, "learning_rate": 1e-15, "trained_tokens": 0}.items():
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=off), key
    a, b = tensors_of(checkpoint(recorded, "one", STEPS), ""), tensors_of(checkpoint(folder, "moved", STEPS), "")
    assert a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= TOLERANCE for name in a)


def test_the_directory(recorded):
    """One file a stage, the indices, the tokenizer, and state.json with a checksum of each other file."""
    from transformers import AutoTokenizer

    path = checkpoint(recorded, "2;1", SAVED)
    shards = {kind: [f"{kind}-0000{stage}-of-00002.safetensors" for stage in (1, 2)] for kind in ("model", "optimizer")}
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
             "optimizer.safetensors.index.json"}
    assert set(os.listdir(path)) == {"state.json", *small, *shards["model"], *shards["optimizer"]}
    state, tensors = json.loads((path / "state.json").read_text()), tensors_of(path, "")
    assert state["files"].keys() == set(os.listdir(path)) - {"state.json"}
    for name, facts in state["files"].items():
        content = (path / name).read_bytes()
        assert facts == {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}, name
    index = json.loads((path / "optimizer.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards["optimizer"])
    weights = {name for name in tensors if name.endswith((".weight", ".bias"))}
    averages = {f"{name}.{entry}" for name in weights for entry in ("exp_avg", "exp_avg_sq", "step")}
    assert averages == set(tensors) - weights and len(weights) == 4 * 9 + 3
    assert state["tokens"] == SAVED * 8 * 16 and AutoTokenizer.from_pretrained(path)("times")["input_ids"]


def test_transformers_reads_what_a_pipeline_and_tp_ranks_saved(recorded, moved):
    """The logits are those of the model that one process has trained, and our Llama's with its weights."""
    from lab.huggingface import reference
    from transformers import LlamaForCausalLM

    path = checkpoint(moved[0], "moved", STEPS)
    theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    weights = tensors_of(checkpoint(recorded, "one", STEPS))
    ours = reference(theirs.config, weights)  # its names are theirs already
    with torch.device("meta"):
        llama = Llama(load_config(path, num_attention_heads=None), torch.float64)
    llama.load_state_dict({name: weights[their_name(name)] for name in llama.state_dict()}, assign=True)
    for layer in theirs.model.layers:
        layer.input_layernorm = ExactRMSNorm(layer.input_layernorm)
        layer.post_attention_layernorm = ExactRMSNorm(layer.post_attention_layernorm)
    theirs.model.norm = ExactRMSNorm(theirs.model.norm)
    ids = torch.arange(32).view(2, 16)
    assert (theirs(ids).logits - ours(ids).logits).abs().max() <= TOLERANCE
    assert (theirs(ids).logits - llama(ids)).abs().max() <= TOLERANCE


def test_samples_and_generate_write_the_likeliest_words(recorded, moved):
    """One after the other, by transformers: the text of --sample_every from any topology, and that of generate.py."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    path = checkpoint(recorded, "one", STEPS)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    new = 16 - len(ids)  # up to --seq_len
    for _ in range(new):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert new > 8 and len(text) > len(PROMPT)
    for printed in (recorded / "one.txt").read_text(), (recorded / "2;1.txt").read_text(), moved[1]:
        assert printed.count(f"sample after step {STEPS}: {text!r}\n") == 1, printed
    done = fork(9, 1, "--checkpoint", path.parent, "--prompt", PROMPT, "--max_new_tokens", new, "--device", "cpu",
                script=ROOT / "cluster" / "generate.py")
    assert done.stdout == f"{text}\n"
