"""LoRA of train_distributed.py with --tp_size: losses, gradients and files are those of plain transformers and peft."""

import pytest
import torch
from checkpoint_runs import SCRIPT, flags_of, newest, write_model
from huggingface import float64_throughout
from launch import fork, metrics
from test_cluster_lora import FAMILIES, MAX_GRAD_NORM, RANK, STEPS, TOLERANCE, TOPOLOGIES, in_plain_peft, read, run, write_data

NARROW = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=8, initializer_range=0.1, pad_token_id=0)
FAMILIES = {**FAMILIES, **dict.fromkeys(("qwen3", "olmo2", "glm4"), NARROW)}  # norms of heads; whole outputs; fused ones
FAMILIES["mixtral"] = {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2}
TOPOLOGIES.update({  # of 8 micro-batches
    "tp2": (2, ["--num_microbatches", "8", "--tp_size", "2"]),
    "tp2, recompute": (2, ["--num_microbatches", "8", "--tp_size", "2", "--recompute"]),
    "1,rest x tp2": (4, ["--num_microbatches", "8", "--pipelines", "1,2", "--tp_size", "2"]),
    "shares x tp2": (4, ["--num_microbatches", "5,3", "--tp_size", "2"]),
})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    for family, sizes in FAMILIES.items():
        write_model(folder / family, family, "float64", vocab_size=1024, max_position_embeddings=64, **sizes)
    write_data(folder)
    return folder


def whole(key: str, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A gradient out of those of the ranks of a tp group, of which those of what is not split are equal."""
    if parts[0].shape == shape:
        assert all((part - parts[0]).abs().max() <= TOLERANCE for part in parts), key
        return parts[0]
    dim = 1 if "lora_A" in key else 0
    chunks = [part.chunk(3 if "c_attn" in key else 1, dim) for part in parts]
    return torch.cat([chunk for each in zip(*chunks) for chunk in each], dim)


QUICK = [("llama", "pairs", "tp2"), ("gpt2", "text", "1,rest x tp2"), ("glm4", "text", "tp2")]
SLOW = [("llama", "text", "shares x tp2"), ("llama", "pairs", "1,rest x tp2"), ("llama", "text", "tp2, recompute"),
        ("gpt2", "pairs", "tp2"), ("qwen3", "text", "tp2"), ("olmo2", "text", "tp2")]


@pytest.mark.parametrize("family, data, topology", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_equal_to_plain_peft(folder, family, data, topology):
    """Losses, norms, every adapter's clipped gradient on each rank, and what is saved, whole."""
    name = f"{family} {data} {topology}".replace(",", "+")
    _, ranks = run(folder, name, family, data, topology)
    with float64_throughout():
        expected, model = in_plain_peft(folder, family, data)
    found = [(row["loss"], row["grad_norm"], row["learning_rate"]) for row in metrics(folder / "runs", name)]
    assert found == [pytest.approx(row, abs=TOLERANCE) for row in expected]
    gradients = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
    seen = set()
    for first in range(0, ranks, 2):
        grads = [torch.load(folder / f"out_{name}" / f"grads{rank}.pt") for rank in (first, first + 1)]
        assert grads[0].keys() == grads[1].keys() and all("lora_" in key for key in grads[0])
        for key in grads[0]:
            grad = gradients[f"base_model.model.{key}"]
            assert (whole(key, [each[key] for each in grads], grad.shape) - grad).abs().max() <= TOLERANCE, key
        seen |= grads[0].keys()
    assert len(seen) == len(gradients)
    saved = read(newest(folder, name) / "adapter_model.safetensors")
    trained = {key.replace(".default.", "."): param for key, param in model.named_parameters() if param.requires_grad}
    assert saved.keys() == trained.keys()
    assert all((saved[key] - param).abs().max() <= TOLERANCE for key, param in trained.items())


@pytest.mark.parametrize("before, after", [("tp2", "one"), pytest.param("one", "tp2", marks=pytest.mark.slow)])
def test_goes_on_with_another_tp_size(folder, before, after):
    """Three steps, of which the last is with another --tp_size: losses and the adapter are those of one process."""
    name = f"from {before} to {after}"
    run(folder, name, "gpt2", "text", before, "--max_steps", "2", lr_decay="none")
    done, _ = run(folder, name, "gpt2", "text", after, "--resume", "auto", lr_decay="none")
    assert "going on after step 2: " in done.stdout
    run(folder, f"{name}, at once", "gpt2", "text", "one", lr_decay="none")
    found, expected = (metrics(folder / "runs", each) for each in (name, f"{name}, at once"))
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], abs=TOLERANCE)
    assert len(found) == STEPS
    a, b = (read(newest(folder, each) / "adapter_model.safetensors") for each in (name, f"{name}, at once"))
    assert a.keys() == b.keys() and all((a[key] - b[key]).abs().max() <= TOLERANCE for key in a)


@pytest.mark.parametrize("family, ranks, more, tolerance", [
    ("llama", 4, ["--num_microbatches", "5,3", "--tp_size", 2], TOLERANCE),
    pytest.param("mixtral", 2, ["--num_microbatches", "8", "--tp_size", 2], 1e-7, marks=pytest.mark.slow)])
def test_equal_to_one_process(folder, family, ranks, more, tolerance):
    """Two pipelines of --tp_size 2; a mixture of experts, whose router is float32, and which plain peft can't run in
    float64. Losses, norms and the adapter."""
    name = f"{family}-divided"
    flags = flags_of(folder, name, folder / family, dataset_name=folder / "text.txt", seq_len=16, max_steps=STEPS,
                     lora_rank=RANK, learning_rate=0.01, max_grad_norm=MAX_GRAD_NORM)
    fork(9, ranks, *flags, *more, script=SCRIPT, modules=["peft"])
    fork(9, 1, *flags, "--num_microbatches", "8", "--run_name", f"{family}-whole", script=SCRIPT, modules=["peft"])
    found, expected = (metrics(folder / "runs", each) for each in (name, f"{family}-whole"))
    for key in "loss", "grad_norm":
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], abs=tolerance)
    a, b = (read(newest(folder, each) / "adapter_model.safetensors") for each in (name, f"{family}-whole"))
    assert len(found) == STEPS and a.keys() == b.keys()
    assert all((a[key] - b[key]).abs().max() <= tolerance for key in a)


@pytest.mark.parametrize("ranks, more, message", [
    (2, ["--tp_size", "2", "--lora_dropout", "0.1"], "--tp_size 2 with --lora_dropout 0.1: tensor-parallel ranks would"),
    (3, ["--tp_size", "3"], "num_attention_heads=4 cannot be split over tp_size=3: use a tp_size that divides 4")])
def test_mistakes(folder, tmp_path, ranks, more, message):
    flags = flags_of(tmp_path, "wrong", folder / "llama", dataset_name=folder / "text.txt", lora_rank=RANK, max_steps=3)
    result = fork(9, ranks, *flags, "--num_microbatches", "8", *more, script=SCRIPT, check=False, modules=["peft"])
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr
