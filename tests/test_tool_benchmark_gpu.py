"""The GPU benchmark without a GPU: its arithmetic, its errors, and the toy shape on the CPU."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

import benchmark_gpu
from benchmark_gpu import CONTESTANTS, SHAPES, flops_per_token, initial_weights, peak_tflops
from launch import ROOT, environment

CPU = torch.device("cpu")


def test_flops_are_those_that_torch_counts():
    """In both conventions: torch counts matmuls, and an attention without a fused kernel as if not causal."""
    config = LlamaConfig(**SHAPES["toy"][0], tie_word_embeddings=False)
    model = benchmark_gpu.build(CONTESTANTS[0], initial_weights(config), config, CPU)[0]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(3, 32, dtype=torch.long)).float().sum().backward()
    num_params = sum(param.numel() for param in model.parameters())
    norms, table, attention = 5 * 64, 256 * 64, 12 * 2 * 64 * 32  # what is no matmul, and attention's FLOPs a token
    flops = flops_per_token(config, num_params, seq_len=32)
    assert counter.get_total_flops() / (3 * 32) == flops["mfu"] - 6 * (norms + table)
    assert counter.get_total_flops() / (3 * 32) == flops["causal_mfu"] - 6 * norms + attention / 2


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
    ("NVIDIA GH200 480GB", 989), ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125),
    ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA B200", 2250),
    ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("Tesla V100-SXM2-16GB", None), ("CPU", None),
])
def test_peak_by_name(name, tflops):
    assert peak_tflops(name) == tflops


def fake_run(seconds: float, losses: list[float]) -> dict:
    return {"seconds": seconds, "steps": [9.0, seconds], "losses": losses, "compile_seconds": 9 - seconds,
            "peak_gib": 7.0}


def test_mfu_and_ratios_of_known_times():
    """1000 tokens in half a second at 3e9 FLOPs a token are 6 TFLOP/s: 60 % of 10."""
    rounds = [{"ours": fake_run(ours, [8.0, 4.0]), "Hugging Face": fake_run(1.0, [8.0, 4.2])}
              for ours in (0.5, 0.4, 0.8)]
    ours, theirs = benchmark_gpu.summarise(rounds, 100, 10, {"mfu": 3e9, "causal_mfu": 2e9}, peak=10)
    assert (ours["tokens_per_second"], ours["ratio"], theirs["ratio"]) == (2000, [2.0, 1.25, 2.5], None)
    assert (ours["mfu"], ours["causal_mfu"]) == pytest.approx((0.6, 0.4))
    assert ours["loss_difference"] == 0 and theirs["loss_difference"] == pytest.approx(0.05)
    assert benchmark_gpu.summarise(rounds, 100, 10, {"mfu": 3e9, "causal_mfu": 2e9}, peak=None)[0]["mfu"] is None


def toy(*flags) -> None:
    benchmark_gpu.main(["--device", "cpu", "--shape", "toy", "--no_compile", "--seq_len", "32", *map(str, flags)])


def test_out_of_memory_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(benchmark_gpu, "train", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(SystemExit, match="error: 4 samples of 32 tokens are more than .* smaller --micro_batch_size"):
        toy()


def test_toy_run_on_the_cpu(tmp_path, capsys):
    toy("--rounds", 2, "--steps", 3, "--micro_batch_size", 2, "--peak_tflops", 0.5, "--json", tmp_path / "gpu.json")
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "gpu.json").read_text())
    (found,), (ours, theirs) = record["seq_lens"], record["rows"]
    assert f"| ours | {ours['tokens_per_second']:.0f} | {ours['mfu']:.1%} |" in out
    assert [list(results) for results in found["rounds"]] == 2 * [["ours", "Hugging Face"]]
    assert ours["loss_difference"] == 0 and theirs["loss_difference"] <= 0.002
    assert ours["last_loss"] < 0.95 * ours["first_loss"]  # so that a run that does not learn is off by more than 1 %
    assert 0 < ours["causal_mfu"] < ours["mfu"] < 1 and ours["peak_gib"] is None


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_other_work_is_an_error(factor, monkeypatch):
    train = benchmark_gpu.train

    def train_astray(contestant, *arguments):
        result = train(contestant, *arguments)
        if not contestant.is_ours:
            result["losses"][-1] *= factor
        return result

    monkeypatch.setattr(benchmark_gpu, "train", train_astray)
    with pytest.raises(SystemExit, match="error: the losses of 'Hugging Face' at seq_len 32 are off by"):
        toy("--rounds", 1, "--steps", 2, "--micro_batch_size", 1)


def test_without_cuda_it_is_one_clear_error():
    command = [sys.executable, ROOT / "tools/maintain/benchmark_gpu.py"]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: torch sees no CUDA device") and done.stderr.count("\n") == 1
