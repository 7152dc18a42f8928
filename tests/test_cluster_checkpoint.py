"""Checkpoints of train_distributed.py: what is saved under one topology goes on under any other, and what files hold.

In float64, against one process that was never stopped.
"""

import json
import os
import zlib

import pytest
import torch
from lab.huggingface import ExactRMSNorm, their_name
from lab.launch import fork, losses, metrics, modules_of, start_fork
from support.checkpoint_runs import (
    ROOT, SAVED, SCRIPT, STEPS, TOPOLOGIES, checkpoint, flags_of, write_corpus, write_model,
)
from support.recordings import LLAMA3

with modules_of(9):
    from model import Llama
    from utils import load_config

TOLERANCE, OF_LOSSES = 1e-9, 1e-12  # the latter is what the page promises of losses
TEXT = "It was"  # what samples begin with
PAIR = ("2;1", "tp2")  # further ones: test_random_runs.py


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs: those named like a topology save at step 7 and 12, "A>B" goes on at 7 under B."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = write_model(folder / "model", rope_parameters=LLAMA3)
    write_corpus(folder)

    def start(name: str, topology: str, *more):
        ranks, flags = TOPOLOGIES[topology]
        flags = [*flags_of(folder, name, model, sample_every=STEPS, prompt=TEXT), *flags]
        return start_fork(9, ranks, *flags, *more, script=SCRIPT)

    first = {name: start(name, name) for name in ("one", PAIR[0])}
    printed = {name: job.result().stdout for name, job in first.items()}
    name = ">".join(PAIR)
    printed[name] = start(name, PAIR[1], "--resume", checkpoint(folder, PAIR[0], SAVED)).result().stdout
    return folder, printed


def test_stopping_is_not_needed_for_equal_losses(runs):
    """The runs that save compute as one process does; else the tests below would compare with something wrong."""
    folder, _ = runs
    expected, found = losses(folder / "runs", "one"), losses(folder / "runs", "2;1")
    assert len(found) == STEPS and found == pytest.approx(expected, rel=0, abs=OF_LOSSES)


def test_another_topology_goes_on_where_one_stopped(runs):
    folder, printed = runs
    name = ">".join(PAIR)
    assert f"going on after step {SAVED}: {checkpoint(folder, PAIR[0], SAVED)}\n" in printed[name]
    assert printed[name].count(f"checkpoint: {checkpoint(folder, name, SAVED)} (") == 1, "where a branch begins"
    expected, found = metrics(folder / "runs", "one"), metrics(folder / "runs", name)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), "those before the checkpoint as well"
    for key, off in {"loss": OF_LOSSES, "grad_norm": TOLERANCE, "learning_rate": 1e-15, "trained_tokens": 0}.items():
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=off), key
    a, b = (read_all(checkpoint(folder, name, STEPS)) for name in ("one", name))
    assert a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= TOLERANCE for name in a)


def read_all(path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights and AdamW's state."""
    from safetensors.torch import load_file

    found = {}
    for file in path.glob("*.safetensors"):
        part = load_file(file)
        assert not part.keys() & found.keys(), "a tensor is in two files"
        found.update(part)
    return found


def test_the_directory(runs):
    """One file a stage, the indices, the tokenizer, and state.json with a checksum of each other file."""
    from transformers import AutoTokenizer

    folder, _ = runs
    path = checkpoint(folder, "2;1", SAVED)
    shards = {kind: [f"{kind}-0000{stage}-of-00002.safetensors" for stage in (1, 2)] for kind in ("model", "optimizer")}
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
             "optimizer.safetensors.index.json"}
    assert set(os.listdir(path)) == {"state.json", *small, *shards["model"], *shards["optimizer"]}
    state, tensors = json.loads((path / "state.json").read_text()), read_all(path)
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


def test_transformers_reads_what_a_pipeline_and_tp_ranks_saved(runs):
    """The logits are those of the model that one process has trained, and our Llama's with its weights."""
    from lab.huggingface import reference
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    folder, _ = runs
    path = checkpoint(folder, "2;1>tp2", STEPS)
    [alone] = checkpoint(folder, "one", STEPS).glob("model-*.safetensors")
    theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    ours = reference(theirs.config, weights := load_file(alone))  # its names are theirs already
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


def test_samples_and_generate_write_the_likeliest_words(runs):
    """One after the other, by transformers: the text of --sample_every from any topology, and that of generate.py."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder, printed = runs
    path = checkpoint(folder, "one", STEPS)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    new = 16 - len(ids)  # up to --seq_len
    for _ in range(new):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert new > 8 and len(text) > len(TEXT)
    for name in "one", "2;1", "2;1>tp2":
        assert printed[name].count(f"sample after step {STEPS}: {text!r}\n") == 1, printed[name]
    done = fork(9, 1, "--checkpoint", path.parent, "--prompt", TEXT, "--max_new_tokens", new, "--device", "cpu",
                script=ROOT / "cluster" / "generate.py")
    assert done.stdout == f"{text}\n"
