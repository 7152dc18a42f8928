"""--base_bits 4: losses, adapters and memory beside those of plain transformers, peft and bitsandbytes."""

import json
import math
import sys

import pytest
import torch
from checkpoint_runs import ROOT, SCRIPT, flags_of, newest, write_model
from launch import fork, losses, metrics, modules_of
from test_cluster_family_profiler import CPU, LAYERS, SEQ_LEN as LENGTH, adapters, make, measured
from test_cluster_lora import FAMILIES, RANK, SAMPLES, SEQ_LEN, TOPOLOGIES, read, samples, with_adapters, write_data

with modules_of(9):
    from pipeline_stage import PipelineStage
    from pipeline_template import PipelineTemplate
    from planning.profiler import LayerProfiler
    from models.four_bits import is_matrix
    from models.loss import mean_cross_entropy

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

STEPS, RATE = 20, 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    for family in "llama", "gpt2":
        write_model(folder / family, family, "float32", vocab_size=1024, max_position_embeddings=64, **FAMILIES[family])
    write_data(folder)  # an epoch of one step
    return folder


def in_plain_peft(folder, family: str, dtype=torch.float32) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms of steps of one process without any code of ours, and the adapter. `dtype`: of all but that."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=dtype, quantization_config=bits)
    model, trained = with_adapters(model, ("Linear4bit",), torch.float32)
    model.train()  # evaluation would pack the weights in another way, on some CPUs
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE)
    rows = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for tokens, _ in samples(folder, "text"):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].float()
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])) / SAMPLES
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), math.inf)
        rows.append((total.item(), norm.item()))
        optimizer.step()
    return rows, {name.replace(".default.", "."): param.detach() for name, param in trained.items()}


def run(folder, name: str, family: str, topology: str, *more, **changes):
    ranks, flags = TOPOLOGIES[topology]
    defaults = dict(dataset_name=folder / "text.txt", seq_len=SEQ_LEN, dtype="float32", max_steps=STEPS, warmup_steps=0,
                    lr_decay="none", learning_rate=RATE, max_grad_norm=0, save_every=10, lora_rank=RANK, lora_alpha=8,
                    base_bits=4)
    flags = [*flags_of(folder, name, folder / family, **{**defaults, **changes}), *flags, *more]
    return fork(9, ranks, *flags, script=SCRIPT, modules=["peft", "bitsandbytes"])


@pytest.mark.parametrize("family, topology", [("llama", "3;1,2"),
                                              pytest.param("gpt2", "1,1,1", marks=pytest.mark.slow)])
def test_equal_to_plain_peft_and_bitsandbytes(folder, family, topology):
    """Losses and norms of 20 steps, and the adapter that they leave. In float32, so sums differ in their last digits."""
    name = f"{family} {topology}".replace(";", "+")
    done = run(folder, name, family, topology, *(["--sample_every", 5] if family == "gpt2" else []))
    expected, adapter = in_plain_peft(folder, family)
    found = [(row["loss"], row["grad_norm"]) for row in metrics(folder / "runs", name)]
    assert len(found) == STEPS and expected[-1][0] < 0.8 * expected[0][0]
    for row, wanted in zip(found, expected):
        assert row == pytest.approx(wanted, rel=1e-4)
    saved = read(newest(folder, name) / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert max((saved[key] - adapter[key]).abs().max() for key in saved) < 0.05 * RATE
    assert "of them in 4 bits" in done.stdout


@pytest.mark.slow
def test_bfloat16(folder):
    """Losses of 20 steps to 1e-3, as bfloat16 rounds: a number has three digits, and stages round in other places."""
    run(folder, "bfloat16", "llama", "3;1,2", dtype="bfloat16")
    expected, _ = in_plain_peft(folder, "llama", torch.bfloat16)
    found = losses(folder / "runs", "bfloat16")
    assert len(found) == STEPS and found == pytest.approx([loss for loss, _ in expected], rel=1e-3)


def test_what_a_frozen_parameter_takes(world_of_one):
    """Half a byte and a 64th of a float32 in a matrix of a decoder layer; beside it as many bytes as the dtype has."""
    model, dtype = make("llama"), torch.bfloat16
    lora = adapters(model, dtype, base_bits=4)
    profiler = LayerProfiler(model, LENGTH, dtype, CPU, lora, mean_cross_entropy)
    cluster, layers = measured(profiler), [model.get_submodule(name) for name in profiler.layers]
    packed = sum(param.numel() for layer in layers for param in layer.parameters() if param.dim() == 2)
    others = sum(param.numel() for param in model.parameters()) - packed
    assert packed == lora.num_packed > 0 and len(layers) == LAYERS
    frozen = 0.5625 * packed + dtype.itemsize * others
    assert lora.frozen_bytes == frozen and cluster.weight_bytes((0, len(cluster.names))) == pytest.approx(
        frozen + 18 * lora.num_trained, rel=1e-9)


def test_one_layer_at_a_time_is_not_packed(world_of_one):
    """While a stage loads. In the end it has all of its modules, in their places."""
    model, seen = make("qwen3"), []
    names, give = [name for name, _ in model.named_modules()], adapters(model, torch.bfloat16, base_bits=4).weights
    stage = PipelineStage(model, PipelineTemplate.from_layers_per_stage(model, [LAYERS]), 0)
    layers = stage.own_layers()

    def load(stage):
        for name, param in stage.model.named_parameters():
            module, _, key = name.rpartition(".")
            setattr(stage.model.get_submodule(module), key, torch.nn.Parameter(torch.randn(param.shape).to(param.dtype)))
        matrices = [each for layer in layers for each in layer.modules() if is_matrix(each)]
        seen.append(sum(each.weight.dim() == 2 and not each.weight.is_meta and each.weight.size(1) > 1
                        for each in matrices))

    give(load, None, CPU)(stage)
    assert seen == [0, *[7] * LAYERS], "7 matrices of a layer"
    assert {*names} <= {name.replace(".base_layer", "") for name, _ in model.named_modules()}
    packed = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    assert len(packed) == 7 * LAYERS and not any(param.is_meta for param in model.parameters())
    assert next(model.parameters()).dtype == model.dtype == torch.bfloat16


def test_a_model_that_fits_in_4_bits_only(tmp_path):
    """Two machines, whose free memory is made up: together they have too little for the model in float32."""
    model = write_model(tmp_path / "model", "llama", "float32", vocab_size=1024, hidden_size=128, num_hidden_layers=8,
                        num_attention_heads=4, num_key_value_heads=4, intermediate_size=384, max_position_embeddings=64)
    flags = ["--lora_rank", 1, "--seq_len", 4, "--batch_size", 1, "--gradient_accumulation", 1, "--dtype", "float32"]
    script = ROOT / "tests" / "support" / "auto_plan_ranks.py"
    options = dict(script=script, modules=["peft", "bitsandbytes"])
    done = fork(9, 2, model, "4e6,4e6", *flags, check=False, **options)
    assert done.returncode and "not enough memory" in done.stderr, done.stdout + done.stderr
    done = fork(9, 2, model, "4e6,4e6", *flags, "--base_bits", 4, **options)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["plan"] for line in found] == [None, None], "each machine may hold the whole model"


@pytest.mark.slow
def test_a_plan(folder, tmp_path):
    """From the machines to plan.json, and a step of training by it."""
    path, out, flags = tmp_path / "cluster.json", tmp_path / "plan.json", ["--lora_rank", 4, "--base_bits", 4]
    options = dict(modules=["peft", "bitsandbytes"])
    done = fork(9, 2, "--measure", path, "--measure_seconds", 1, "--model_name", folder / "llama", "--seq_len", SEQ_LEN,
                *flags, "--dtype", "float32", "--micro_batch_size", 1, "--global_batch", 4, "--out", out,
                script=ROOT / "cluster" / "plan.py", **options)
    assert json.loads(out.read_text())["base_bits"] == 4 and "--lora_targets all-linear --base_bits 4" in done.stdout
    words = flags_of(tmp_path, "planned", folder / "llama", dataset_name=folder / "text.txt", dtype="float32",
                     batch_size=None, max_steps=1, warmup_steps=0)
    done = fork(9, 2, *words, "--plan", out, *flags, script=SCRIPT, **options)
    assert "of them in 4 bits" in done.stdout and len(losses(tmp_path / "runs", "planned")) == 1


@pytest.mark.parametrize("ranks, flags, message", [
    (1, ["--base_bits", 4], "--base_bits are for LoRA: add --lora_rank, or leave them out"),
    (2, ["--base_bits", 4, "--lora_rank", 4, "--tp_size", 2], "--tp_size 2 with --base_bits 4: numbers share a scale"),
    (1, ["--base_bits", 4, "--lora_rank", 4, "--dtype", "float64"], "--base_bits 4 with --dtype float64: what is unpacked"),
    (1, ["--base_bits", 8, "--lora_rank", 4], "argument --base_bits: invalid choice: 8 (choose from 4)")])
def test_mistakes(folder, tmp_path, ranks, flags, message):
    words = flags_of(tmp_path, "wrong", folder / "llama", dataset_name=folder / "text.txt", dtype="float32", max_steps=3)
    done = fork(9, ranks, *words, "--num_microbatches", "8", *flags, script=SCRIPT, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="LoRA needs the library bitsandbytes: pip install bitsandbytes"):
        adapters(make("llama"), torch.float32, base_bits=4)
