"""--base_bits 4: losses, adapters and memory beside those of plain transformers, peft and bitsandbytes."""

import importlib.util
import sys

import pytest
import torch
from lab.launch import fork, metrics, modules_of
from support.checkpoint_runs import SCRIPT, flags_of, newest, write_model
from test_cluster_auto_plan import run
from test_cluster_family_profiler import CPU, LAYERS
from test_cluster_family_profiler import SEQ_LEN as LENGTH
from test_cluster_family_profiler import adapters, make, measured
from test_cluster_lora import FAMILIES, RANK, SEQ_LEN, TOPOLOGIES, read, train_plainly, with_adapters, write_data

with modules_of(9):
    from models.loss import mean_cross_entropy
    from planning.profiler import LayerProfiler

if not importlib.util.find_spec("bitsandbytes"):  # to import it takes seconds, which only these tests need
    pytest.skip("bitsandbytes is not installed", allow_module_level=True)

STEPS, RATE = 12, 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    write_model(folder / "llama", "llama", "float32", vocab_size=1024, max_position_embeddings=64, **FAMILIES["llama"])
    write_data(folder)  # an epoch of one step
    return folder


def in_plain_peft(folder) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    """What train_plainly() says, and the adapter."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32, quantization_config=bits)
    model, trained = with_adapters(model, ("Linear4bit",), torch.float32)
    model.train()  # evaluation would pack the weights in another way, on some CPUs
    rows = train_plainly(folder, "text", model, trained, STEPS * [RATE])
    return rows, {name.replace(".default.", "."): param.detach() for name, param in trained.items()}


def test_equal_to_plain_peft_and_bitsandbytes(folder):
    """Losses and norms of 12 steps, and the adapter that they leave. In float32, so sums differ in their last digits."""
    ranks, topology = TOPOLOGIES["3;1,2"]
    flags = flags_of(folder, "packed", folder / "llama", dataset_name=folder / "text.txt", seq_len=SEQ_LEN,
                     dtype="float32", max_steps=STEPS, warmup_steps=0, lr_decay="none", learning_rate=RATE,
                     max_grad_norm=0, save_every=6, lora_rank=RANK, lora_alpha=8, base_bits=4, sample_every=5)
    done = fork(9, ranks, *flags, *topology, script=SCRIPT, modules=["peft", "bitsandbytes"])
    expected, adapter = in_plain_peft(folder)
    found = [(row["loss"], row["grad_norm"]) for row in metrics(folder / "runs", "packed")]
    assert len(found) == STEPS and expected[-1][0] < 0.8 * expected[0][0]
    for row, wanted in zip(found, expected):
        assert row == pytest.approx(wanted[:2], rel=1e-4)
    saved = read(newest(folder, "packed") / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert max((saved[key] - adapter[key]).abs().max() for key in saved) < 0.05 * RATE
    assert "of them in 4 bits" in done.stdout


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


def test_a_model_that_fits_in_4_bits_only(tmp_path, run_code):
    """Two machines, whose free memory is made up: together they have too little for the model in float32."""
    flags = dict(lora_rank=1, seq_len=4, batch_size=1, gradient_accumulation=1)
    sizes = dict(hidden_size=128, num_hidden_layers=8, num_key_value_heads=4, intermediate_size=384)
    settings = "[4e6, 4e6]", sizes, flags
    done = run(tmp_path / "whole", run_code, *settings, check=False)
    assert done.returncode and "not enough memory" in done.stderr, done.stdout + done.stderr
    flags["base_bits"] = 4
    done = run(tmp_path / "packed", run_code, *settings, modules=["peft", "bitsandbytes"])
    assert "plan:" not in done.stdout, "each machine may hold the whole model"


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="LoRA needs the library bitsandbytes: pip install bitsandbytes"):
        adapters(make("llama"), torch.float32, base_bits=4)
