"""--base_bits 4: losses, adapters and memory beside those of plain transformers, peft and bitsandbytes."""

import json
import math
import zlib

import pytest
import torch
from checkpoint_runs import ROOT, SCRIPT, checkpoint, flags_of, newest, write_model
from launch import fork, launch, metrics
from test_cluster_lora import FAMILIES, RANK, SAMPLES, SEQ_LEN, TOPOLOGIES, read, samples, write_data

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

STEPS, RATE = 20, 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    for family, sizes in FAMILIES.items():
        write_model(folder / family, family, "float32", vocab_size=1024, max_position_embeddings=64, **sizes)
    write_data(folder)  # an epoch of one step
    return folder


def initial_value(name: str, shape: torch.Size) -> torch.Tensor:
    bound = 1 / math.sqrt(shape[1]) if "lora_A" in name else 0.0
    generator = torch.Generator().manual_seed(42 + zlib.crc32(name.replace(".default.", ".").encode()))
    return torch.zeros(shape).uniform_(-bound, bound, generator=generator)


def in_plain_peft(folder, family: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms of steps of one process without any code of ours, and the adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32, quantization_config=bits)
    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if ".0." in name
                     and type(module).__name__ == "Linear4bit"})
    assert len(linear) == (7 if family == "llama" else 3)
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules=linear)
    model = get_peft_model(model, config).train()  # evaluation would pack the weights in another way, on some CPUs
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in trained.items():
        param.data = initial_value(name, param.shape)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE)
    rows = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for tokens, _ in samples(folder, "text"):
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])) / SAMPLES
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), math.inf)
        rows.append((total.item(), norm.item()))
        optimizer.step()
    return rows, {name.replace(".default.", "."): param.detach() for name, param in trained.items()}


def run(folder, name: str, family: str, topology: str, *more, **changes):
    ranks, flags = TOPOLOGIES[topology]
    flags = [*flags_of(folder, name, folder / family, **{**dict(
        dataset_name=folder / "text.txt", seq_len=SEQ_LEN, dtype="float32", max_steps=STEPS, warmup_steps=0, lr_decay="none", learning_rate=RATE,
        max_grad_norm=0, save_every=10, lora_rank=RANK, lora_alpha=8, base_bits=4), **changes}), *flags, *more]
    return fork(9, ranks, *flags, script=SCRIPT, modules=["peft", "bitsandbytes"])


@pytest.mark.parametrize("family, topology", [("llama", "3;1,2"), ("gpt2", "1,1,1"),
                                              pytest.param("llama", "one", marks=pytest.mark.slow)])
def test_equal_to_plain_peft_and_bitsandbytes(folder, family, topology):
    """Losses and norms of 20 steps, and the adapter that they leave. In float32, so sums differ in their last digits."""
    name = f"{family} {topology}".replace(";", "+")
    done = run(folder, name, family, topology)
    expected, adapter = in_plain_peft(folder, family)
    found = [(row["loss"], row["grad_norm"]) for row in metrics(folder / "runs", name)]
    print(f"{name}: loss {expected[0][0]:.4f} to {expected[-1][0]:.4f}, off by up to "
          f"{max(abs(a / b - 1) for (a, _), (b, _) in zip(found, expected)):.1e}")
    assert len(found) == STEPS and expected[-1][0] < 0.8 * expected[0][0]
    for row, wanted in zip(found, expected):
        assert row == pytest.approx(wanted, rel=1e-4)
    saved = read(newest(folder, name) / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert max((saved[key] - adapter[key]).abs().max() for key in saved) < 0.05 * RATE
    assert "of them in 4 bits" in done.stdout
