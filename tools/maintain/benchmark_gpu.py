"""How fast is step 3 on one GPU, beside Hugging Face's Llama?

    python tools/maintain/benchmark_gpu.py --json gpu.json                 TinyLlama-1.1B, seq_len 1024 and 4096
    python tools/maintain/benchmark_gpu.py --device cpu --shape toy        the same code without a GPU

Both train in bf16 with float32 masters: the same initial weights, the same random token ids, the same loss, the same
fused AdamW, scaled_dot_product_attention. Ours has activations in bf16 and casts each weight where it multiplies;
theirs runs under torch.autocast, as in their Trainer(bf16=True), with norms and residual stream in float32.
Compiled means regional torch.compile: each decoder layer, the rest eager.

For each seq_len everyone trains interleaved, and each builds its model anew and frees it. A step is one micro-batch and
one update, between two synchronizations with the GPU; the first is dropped; a run's figure is the median step. A ratio
is the median of the rounds' ratios, given with its smallest and largest. All steps repeat one batch; where losses
differ by more than 1 %, someone did other work, and the program exits with 1.

Model FLOPs utilization (MFU, PaLM, Chowdhery et al. 2022, appendix B) = tokens/s * FLOPs a token / the chip's peak.
N parameters, L layers, H heads of hd, T tokens a sample; forward and backward, nothing recomputed:

    MFU             6N + 12 L (H hd) T    every parameter, and attention as if each token saw all T
    causal MFU      6M +  6 L (H hd) T    only what is multiplied: M is N without the embedding; a token sees T/2
"""

import tools_path  # noqa: F401  before launch

import argparse
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from launch import Help, modules_of

with modules_of(3):
    from model import Llama, cross_entropy, init_weights
    from utils import positive_int

SHAPES = {  # of the model, and the seq_len to measure
    "tinyllama": (dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                       num_key_value_heads=4, vocab_size=32000, max_position_embeddings=4096), [1024, 4096]),
    "toy": (dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=256, max_position_embeddings=64), [32, 64]),
}
# Dense bf16 peak by name, TFLOP/s, the first that fits: NVIDIA's and AMD's data sheets (half of what they give "with
# sparsity"), for GeForce the rate with float32 accumulation. A MIG slice has a part of the chip: none fits.
PEAK_TFLOPS = (
    (r"\bMIG\b", None), (r"\bGB200\b", 2500), (r"\bB200\b", 2250), (r"\bH[12]00 NVL\b", 835), (r"\bH100 PCIe\b", 756),
    (r"\bG?H[12]00\b", 989), (r"\bH800\b", 989), (r"\bH20\b", 148), (r"\bA[18]00\b", 312), (r"\bA40\b", 150),
    (r"\bA30\b", 165), (r"\bA10G\b", 70), (r"\bA10\b", 125), (r"\bL40S\b", 362), (r"\bL40\b", 181), (r"\bL4\b", 121),
    (r"\bRTX 5090$", 209), (r"\bRTX 4090$", 165), (r"\bRTX 3090$", 71), (r"\bMI300X\b", 1307),
)
SEED = 42
LEARNING_RATE = 0.2  # over the width, as Adam's has to be (muP, Yang et al. 2022): 1e-4 for TinyLlama
LOSS_TOLERANCE = 0.01  # relative: bf16 has 8 bits, and each update carries the difference on


class Contestant(NamedTuple):
    name: str
    is_ours: bool
    is_compiled: bool


CONTESTANTS = [Contestant("ours", True, False), Contestant("Hugging Face", False, False),
               Contestant("ours, compiled", True, True), Contestant("Hugging Face, compiled", False, True)]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    import transformers  # seconds, too many for benchmark.py's other modes

    shape, default_seq_lens = SHAPES[args.shape]
    config = transformers.LlamaConfig(**shape, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa")
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = args.peak_tflops or peak_tflops(name)
    weights = initial_weights(config)
    num_params = sum(weight.numel() for weight in weights.values())
    print(f"{num_params / 1e6:.1f} M parameters on {name}, dense bf16 peak: " + (
        f"{peak:g} TFLOP/s" if peak else "not in the table, so no MFU: give it with --peak_tflops"), flush=True)

    contestants = [one for one in CONTESTANTS if not (args.no_compile and one.is_compiled)]
    rows, records = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # empty: the first round compiles from scratch
        if not args.no_compile:
            torch.compile(torch.sin)(torch.ones(2, device=device))  # starts the compiler, at no contestant's cost
        for seq_len in args.seq_len or default_seq_lens:
            rounds = benchmark(contestants, weights, config, seq_len, device, args)
            flops = flops_per_token(config, num_params, seq_len)
            found = summarise(rounds, seq_len, args.micro_batch_size, flops, peak)
            rows += found
            records.append({"seq_len": seq_len, "rounds": rounds})
            print_table(found)
    if args.json:
        record = {"torch": torch.__version__, "transformers": transformers.__version__, "device": name,
                  "peak_tflops": peak, "parameters": num_params, "rows": rows, "seq_lens": records}
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    for row in rows:
        if not row["loss_difference"] <= LOSS_TOLERANCE:  # NaN is no smaller
            sys.exit(f"error: the losses of {row['name']!r} at seq_len {row['seq_len']} are off by "
                     f"{row['loss_difference']:.1%}: not the same work, nothing to compare")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="to compute on")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama", help="of the model")
    parser.add_argument("--seq_len", type=positive_int, nargs="+", help="tokens a sample (default: the shape's)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="everyone trains so often")
    parser.add_argument("--steps", type=positive_int, default=7, help="a run has, the first of which is dropped")
    parser.add_argument("--micro_batch_size", type=positive_int, default=4, help="samples of a step")
    parser.add_argument("--no_compile", action="store_true", help="the two eager runs only")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 peak of this GPU, TFLOP/s")
    parser.add_argument("--json", metavar="PATH", help="write every figure")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: at least 2, the first is dropped")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device: run this on a machine with a GPU and a CUDA build of torch, "
                 "or try the code with --device cpu --shape toy")
    return args


def peak_tflops(name: str) -> float | None:
    """The dense bf16 peak in TFLOP/s of a GPU by the name CUDA gives it; None: not known."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, name)), None)


def flops_per_token(config, num_params: int, seq_len: int) -> dict[str, float]:
    """Forward and backward FLOPs a token of the two conventions in this file's head.

    A multiply-add is 2 FLOPs; a weight has one forward and two backward. A token's query meets T keys, its scores T
    values: 4 (H hd) T FLOPs forward, three times that with the backward.
    """
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_len
    num_lookups = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return {"mfu": 6 * num_params + 12 * attention, "causal_mfu": 6 * (num_params - num_lookups) + 6 * attention}


def initial_weights(config) -> dict[str, torch.Tensor]:
    """Float32, on the CPU, by our names: everyone's start."""
    with torch.device("meta"):
        model = Llama(config)
    init_weights(model, SEED, torch.device("cpu"))
    return model.state_dict()


def benchmark(contestants, weights, config, seq_len: int, device, args) -> list[dict]:
    """One {name: what train returns} a round, for one sequence length."""
    rounds, size = [], args.micro_batch_size
    while len(rounds) < args.rounds:
        results = {one.name: measure(one, weights, config, device, size, seq_len, args.steps) for one in contestants}
        if None in results.values():
            sys.exit(f"error: {size} samples of {seq_len} tokens are more than this GPU's memory holds: take a smaller "
                     "--micro_batch_size or a shorter --seq_len")
        rounds.append(results)
        speeds = (f"{name} {size * seq_len / result['seconds']:.0f}" for name, result in results.items())
        print(f"seq_len {seq_len}, round {len(rounds)}/{args.rounds}, tokens/s: {', '.join(speeds)}", flush=True)
    return rounds


def measure(contestant: Contestant, *arguments) -> dict | None:
    """What train() returns, or None where the GPU's memory did not suffice; leaves that memory empty."""
    result = None
    try:
        result = train(contestant, *arguments)
    except torch.OutOfMemoryError:
        pass  # cleaned up below: inside this block the traceback keeps the step's tensors
    if contestant.is_compiled:
        torch.compiler.reset()  # or another shape would be a reason to compile for any shape, which is slower
    gc.collect()
    torch.cuda.empty_cache()  # without CUDA it does nothing
    return result


def train(contestant: Contestant, weights, config, device, size: int, seq_len: int, num_steps: int) -> dict:
    """Builds the model and trains it on `size` samples of `seq_len` random token ids, one update a step.

    Returns losses, steps (seconds of each), seconds (median without the first), compile_seconds (by how much the first
    step is longer) and peak_gib (GPU memory allocated, weights and optimizer included; None on the CPU).
    """
    if is_cuda := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, forward = build(contestant, weights, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / config.hidden_size, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(config.vocab_size, (size, seq_len + 1), generator=generator).to(device)
    input_ids, target_ids = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # (B, T)
    losses, steps = [], []
    for _ in range(num_steps):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(forward(input_ids), target_ids)
        loss.backward()
        optimizer.step()
        if is_cuda:
            torch.cuda.synchronize()  # kernels are only queued until now
        steps.append(time.perf_counter() - start)
        losses.append(loss.item())
    median = statistics.median(steps[1:])
    return {"seconds": median, "steps": steps, "losses": losses, "compile_seconds": max(0.0, steps[0] - median),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None}


def build(contestant: Contestant, weights, config, device) -> tuple[torch.nn.Module, Callable]:
    """The model with float32 weights on `device`, and its forward: (B, T) ids -> bf16 logits (B, T, V)."""
    from huggingface import their_name
    from transformers import LlamaForCausalLM

    with device:
        model = Llama(config, dtype=torch.bfloat16) if contestant.is_ours else LlamaForCausalLM(config)
    name_of = (lambda name: name) if contestant.is_ours else their_name
    model.load_state_dict({name_of(name): weight for name, weight in weights.items()})
    if contestant.is_compiled:
        for layer in model.decoder_layers if contestant.is_ours else model.model.layers:
            layer.compile()

    def their_forward(input_ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model(input_ids=input_ids, use_cache=False).logits

    return model, model if contestant.is_ours else their_forward


def summarise(rounds: list[dict], seq_len: int, size: int, flops: dict[str, float], peak: float | None) -> list[dict]:
    """One row a contestant; ours with the rounds' ratios to theirs, eager to eager and compiled to compiled."""
    rows, reference = [], torch.tensor(rounds[0]["ours"]["losses"])
    for name, first in rounds[0].items():
        runs = [results[name] for results in rounds]
        losses = torch.tensor([run["losses"] for run in runs])  # (rounds, steps)
        row = {"seq_len": seq_len, "micro_batch_size": size, "name": name, "peak_gib": first["peak_gib"],
               "tokens_per_second": statistics.median(size * seq_len / run["seconds"] for run in runs),
               "compile_seconds": first["compile_seconds"] if "compiled" in name else None,
               "first_loss": first["losses"][0], "last_loss": first["losses"][-1],
               "loss_difference": ((losses - reference).abs() / reference).max().item()}
        for kind, count in flops.items():
            row[kind] = row["tokens_per_second"] * count / (peak * 1e12) if peak else None
        other = name.replace("ours", "Hugging Face")
        ratios = [results[other]["seconds"] / results[name]["seconds"] for results in rounds]
        row["ratio"] = None if other == name else [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append(row)
    return rows


def print_table(rows: list[dict]) -> None:
    forms = {"tokens_per_second": ".0f", "mfu": ".1%", "causal_mfu": ".1%", "peak_gib": ".1f",
             "compile_seconds": ".0f", "first_loss": ".3f", "last_loss": ".3f", "loss_difference": ".2%"}
    print(f"\nseq_len {rows[0]['seq_len']}, micro-batch {rows[0]['micro_batch_size']}\n")
    print("| run | tokens/s | MFU | causal MFU | peak GiB | compile s | first loss | last | off by | ours / theirs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        cells = ("" if row[key] is None else format(row[key], form) for key, form in forms.items())
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]) if row["ratio"] else ""
        print(f"| {' | '.join([row['name'], *cells, ratio])} |")
    print(flush=True)


if __name__ == "__main__":
    main()
