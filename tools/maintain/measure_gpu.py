"""How fast is step 3 on one GPU, beside Hugging Face's Llama?

    python tools/maintain/measure_gpu.py --json gpu.json                 TinyLlama-1.1B, seq_len 1024 and 4096
    python tools/maintain/measure_gpu.py --device cpu --shape toy        the same code without a GPU

Both train in bf16 with float32 masters: the same initial weights, the same random token ids, the same loss, the same
fused AdamW, scaled_dot_product_attention. Ours has activations in bf16 and casts each weight where it multiplies;
theirs runs under torch.autocast, as in their Trainer(bf16=True), with norms and residual stream in float32.
Compiled means regional torch.compile: each decoder layer, the rest eager.

For each seq_len all train in turns, and each builds its model anew and frees it. A step is one micro-batch and one
update, between two synchronizations with the GPU; the first is dropped; a turn's figure is the median step. A ratio is
the median of the rounds' ratios, given with its quartiles. All steps repeat one batch; where losses differ by more than
1 %, someone did other work, and the program exits with 1.

Model FLOPs utilization (MFU, PaLM, Chowdhery et al. 2022, appendix B) = tokens/s * FLOPs a token / the chip's peak, with
6N + 12 L (H hd) T FLOPs a token of forward and backward: N parameters, L layers, H heads of hd, and attention as if each
token saw all T of its sample.
"""

import tools_path  # noqa: F401  before launch

import argparse
import functools
import gc
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from data_sheets import DEVICES
from launch import Help, modules_of
from turns import keep, table, take_turns, times_as_fast

with modules_of(3):
    from model import Llama, cross_entropy, init_weights
    from utils import positive_int

SHAPES = {  # of the model, and the seq_len to measure
    "tinyllama": (dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                       num_key_value_heads=4, vocab_size=32000, max_position_embeddings=4096), [1024, 4096]),
    "toy": (dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=256, max_position_embeddings=64), [32, 64]),
}
SEED = 42
LEARNING_RATE = 0.05  # over the width, as Adam's has to be (muP, Yang et al. 2022): 2.4e-5 for TinyLlama
LOSS_TOLERANCE = 0.01  # relative: bf16 has 8 bits, and each update carries the difference on


class Contestant(NamedTuple):
    name: str
    is_ours: bool
    is_compiled: bool


CONTESTANTS = [Contestant("ours", True, False), Contestant("Hugging Face", False, False),
               Contestant("ours, compiled", True, True), Contestant("Hugging Face, compiled", False, True)]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    import transformers  # seconds, too many for --help

    shape, default_seq_lens = SHAPES[args.shape]
    config = transformers.LlamaConfig(**shape, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = args.peak_tflops or peak_tflops(name)
    weights = initial_weights(config)
    num_params = sum(weight.numel() for weight in weights.values())
    print(f"{num_params / 1e6:.1f} M parameters on {name}, dense bf16 peak: " + (
        f"{peak:g} TFLOP/s" if peak else "not known, so no MFU: give it with --peak_tflops"), flush=True)
    for seq_len in args.seq_len or default_seq_lens:
        found = measure(weights, config, seq_len, args)
        keep(args.json, f"{name}, seq_len {seq_len}", {**found, "torch": torch.__version__, "peak_tflops": peak})
        flops = 6 * num_params + 12 * config.num_hidden_layers * config.hidden_size * seq_len
        print(f"\nseq_len {seq_len}, micro-batch {args.micro_batch_size}\n\n"
              + table_of(found, args.micro_batch_size * seq_len, flops, peak), flush=True)
        check_losses(found["losses"])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="to compute on")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama", help="of the model")
    parser.add_argument("--seq_len", type=positive_int, nargs="+", help="tokens a sample (default: the shape's)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="of turns, and one before them to warm up")
    parser.add_argument("--steps", type=positive_int, default=7, help="of a turn, the first of which is dropped")
    parser.add_argument("--micro_batch_size", type=positive_int, default=4, help="samples of a step")
    parser.add_argument("--no_compile", action="store_true", help="the two eager runs only")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 peak of this GPU, TFLOP/s")
    parser.add_argument("--json", type=pathlib.Path, help="keep the seconds of each turn here")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: at least 2, the first is dropped")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device: run this on a machine with a GPU and a CUDA build of torch, "
                 "or try the code with --device cpu --shape toy")
    return args


def peak_tflops(name: str) -> float | None:
    """By the name that CUDA gives a GPU; None: not known. Data sheets are of whole chips, in data centres of SXM."""
    if re.search(r"\b(MIG|PCIe|NVL)\b", name):
        return None
    return next((device.bfloat16 / 1e12 for short, device in DEVICES.items()
                 if device.bfloat16 and re.search(rf"{short}(?![a-zA-Z0-9])", name.replace("RTX ", "RTX"))), None)


def initial_weights(config) -> dict[str, torch.Tensor]:
    """Float32, on the CPU, by our names: everyone's start."""
    with torch.device("meta"):
        model = Llama(config)
    init_weights(model, SEED, torch.device("cpu"))
    return model.state_dict()


def measure(weights, config, seq_len: int, args) -> dict[str, dict]:
    """Of each contestant by name: the seconds of a step and the losses, turn by turn, and the GiB at the peak."""
    found = {"losses": {}, "peak_gib": {}}

    def turn(contestant: Contestant) -> float:
        if (done := try_to_train(contestant, weights, config, seq_len, args)) is None:
            sys.exit(f"error: {args.micro_batch_size} samples of {seq_len} tokens are more than this GPU's memory "
                     "holds: take a smaller --micro_batch_size or a shorter --seq_len")
        seconds, losses, found["peak_gib"][contestant.name] = done
        found["losses"].setdefault(contestant.name, []).append(losses)
        return seconds

    turns = {one.name: functools.partial(turn, one) for one in CONTESTANTS if not (args.no_compile and one.is_compiled)}
    return {"seconds": take_turns(turns, args.rounds), **found}


def try_to_train(contestant: Contestant, *arguments) -> tuple | None:
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


def train(contestant: Contestant, weights, config, seq_len: int, args) -> tuple[float, list[float], float | None]:
    """Builds the model and trains it on samples of `seq_len` random token ids, one update a step.

    Returns the seconds of a step (the median without the first), the losses, and the GiB of GPU memory at the peak,
    weights and optimizer included; None on the CPU.
    """
    device = torch.device(args.device)
    if is_cuda := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, forward = build(contestant, weights, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / config.hidden_size, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(config.vocab_size, (args.micro_batch_size, seq_len + 1), generator=generator).to(device)
    input_ids, target_ids = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # (B, T)
    losses, steps = [], []
    for _ in range(args.steps):
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
    return statistics.median(steps[1:]), losses, torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None


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


def table_of(found: dict[str, dict], num_tokens: int, flops: float, peak: float | None) -> str:
    """Ours with the rounds' ratios to theirs, eager to eager and compiled to compiled. `flops`: of a token."""
    rows = []
    for name, seconds in found["seconds"].items():
        speed, other = num_tokens / statistics.median(seconds), name.replace("ours", "Hugging Face")
        lower, median, upper = times_as_fast(seconds, found["seconds"][other])
        rows.append([name, f"{speed:.0f}", f"{speed * flops / peak / 1e12:.1%}" if peak else "",
                     f"{gib:.1f}" if (gib := found["peak_gib"][name]) else "",
                     f"{median:.2f} ({lower:.2f} to {upper:.2f})" if other != name else ""])
    return table(["run", "tokens/s", "MFU", "peak GiB", "ours / theirs"], rows)


def check_losses(losses: dict[str, list[list[float]]]) -> None:
    """Exits where a turn of somebody did not have the losses of our first turn."""
    reference = torch.tensor(losses["ours"][0])  # (steps,)
    for name, turns in losses.items():
        difference = ((torch.tensor(turns) - reference).abs() / reference).max().item()
        if not difference <= LOSS_TOLERANCE:  # NaN is no smaller
            sys.exit(f"error: the losses of {name!r} are off by {difference:.1%}: not the same work, nothing to compare")


if __name__ == "__main__":
    main()
