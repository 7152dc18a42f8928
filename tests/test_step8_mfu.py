"""Model FLOPs utilization: the operations of a token against PyTorch's own count, and when a run shows it."""

import pytest
import torch
from lab.launch import fork, metrics
from lab.program import Program
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SHAPE = dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2)
BFLOAT16, GPU = torch.bfloat16, torch.device("cuda")


@pytest.mark.parametrize("step, experts", [(8, {}), (16, dict(num_experts=0, experts_per_token=2)),
                                           (16, dict(num_experts=4, experts_per_token=2))], ids=["8", "16", "experts"])
def test_operations_of_a_token(step, experts):
    """The library counts what runs, with attention by two matmuls, of which it does the whole."""
    modules = Program(step).load()
    config = modules.utils.load_config(modules.utils.TINY_LLAMA, **SHAPE, **experts)
    model, ids = modules.model.Llama(config), torch.randint(config.vocab_size, (2, 64))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        modules.model.cross_entropy(model(ids, *[torch.arange(64)] * (step == 16)), ids).backward()
    assert modules.metrics.flops_per_token(config, 64) * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name, dtype, peak", [
    ("NVIDIA H100 80GB HBM3", BFLOAT16, 989), ("NVIDIA H100 PCIe", BFLOAT16, 756), ("NVIDIA L40S", BFLOAT16, 362),
    ("NVIDIA A100-SXM4-80GB", BFLOAT16, 312), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", BFLOAT16, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", BFLOAT16, None), ("NVIDIA H100 80GB HBM3", torch.float32, None),
    ("Tesla K80", BFLOAT16, None)])
def test_peak_by_the_name_of_the_device(name, dtype, peak, parsed, monkeypatch):
    modules = Program(8).load()
    config = modules.utils.load_config(modules.utils.TINY_LLAMA, **SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    seconds = modules.metrics.seconds_at_peak(parsed(modules.train), config, GPU, dtype, 1000)
    assert seconds == (peak and pytest.approx(1000 * modules.metrics.flops_per_token(config, 128) / peak / 1e12))


def test_a_run_shows_it_where_the_peak_is_known(tmp_path):
    flags = ["--dp_size", 2, "--num_hidden_layers", 1, "--seq_len", 16, "--max_tokens", 2048, "--log_dir", tmp_path]
    without = fork(8, 2, *flags, "--run_name", "without")
    known = fork(8, 2, *flags, "--run_name", "known", "--peak_tflops", 0.1)
    assert " mfu " not in without.stdout and " mfu 0." in known.stdout
    modules = Program(8).load()
    flops = modules.metrics.flops_per_token(modules.utils.load_config(modules.utils.TINY_LLAMA, **{
        **SHAPE, "num_hidden_layers": 1, "num_attention_heads": None, "num_key_value_heads": None}), 16)
    for row in metrics(tmp_path, "known"):
        assert row["mfu"] == pytest.approx(row["tokens_per_second_per_rank"] * flops / 0.1e12)
    assert all("mfu" not in row for row in metrics(tmp_path, "without"))
