"""How fast is step 3 on one GPU, beside Hugging Face's Llama?

    python tools/maintain/measure_gpu.py --gpu H100                      TinyLlama-1.1B, seq_len 1024 and 4096
    python tools/maintain/measure_gpu.py --device cpu --shape toy        the same code without a GPU

Step 3's train.py and peers.py train in bf16 with float32 masters: the same initial weights, samples, loss and fused
AdamW, and scaled_dot_product_attention. Ours has activations in bf16 and casts each weight where it multiplies; theirs
runs under torch.autocast, as in their Trainer(bf16=True), with norms and residual stream in float32. Ours computes the
gradient norm, too. Compiled means regional torch.compile: each decoder layer, the rest eager.

In each round everyone trains once, from its start to its end, since the GPU's memory does not hold all of them. A step
is one micro-batch and one update; a turn's figure is the median step without the first. Where losses differ by more
than 0.1, someone did other work, and the program exits with 1.

Model FLOPs utilization (MFU, PaLM, Chowdhery et al. 2022, appendix B) = tokens/s * FLOPs a token / the chip's peak, with
6N + 12 L (H hd) T FLOPs a token of forward and backward: N parameters, L layers, H heads of hd, and attention as if each
token saw all T of its sample.
"""

import tools_path  # noqa: F401  before launch

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

import torch
from contestants import Run
from data_sheets import DEVICES
from launch import Help, modules_of
from make_tiny_llama import resized
from measure_course import check_losses, make_tokens, read_results, start
from turns import keep, table, take_turns, times_as_fast

SHAPES = {  # of the model, and the seq_len to measure
    "tinyllama": (dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                       num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=4096), [1024, 4096]),
    "toy": (dict(num_hidden_layers=2), [32, 64]),
}
OURS, THEIRS, COMPILED = "ours", "Hugging Face, autocast", ", compiled"
TOLERANCE = {"of_loss": 0.1, "of_norm": 0.1}  # bf16 has 8 bits, and each update carries the difference on


def main() -> None:
    args = parse_args()
    shape, default_seq_lens = SHAPES[args.shape]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = DEVICES[args.gpu].bfloat16 if args.gpu else None  # FLOP/s
    with tempfile.TemporaryDirectory() as folder:
        num_params, per_token = size_of(resized(folder, initializer_range=0.02, **shape))
        print(f"{num_params / 1e6:.1f} M parameters on {name}" + (
            f", dense bf16 peak {peak / 1e12:g} TFLOP/s" if peak else ", no MFU without --gpu"), flush=True)
        for seq_len in args.seq_len or default_seq_lens:
            found = measure(seq_len, folder, args)
            keep(args.json, f"{name}, seq_len {seq_len}", {**found, "torch": torch.__version__, "gpu": args.gpu})
            flops = 6 * num_params + per_token * seq_len
            print(f"\nseq_len {seq_len}, micro-batch {args.micro_batch_size}\n\n"
                  + table_of(found, args.micro_batch_size * seq_len, flops, peak), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="to compute on")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama", help="of the model")
    parser.add_argument("--seq_len", type=int, nargs="+", help="tokens a sample (default: the shape's)")
    parser.add_argument("--rounds", type=int, default=3, help="of turns, and one before them to warm up")
    parser.add_argument("--steps", type=int, default=7, help="of a turn")
    parser.add_argument("--micro_batch_size", type=int, default=4, help="samples of a step")
    parser.add_argument("--no_compile", action="store_true", help="the two eager runs only")
    parser.add_argument("--gpu", choices=DEVICES, help="whose data sheet has the peak for the MFU (data centres: SXM)")
    parser.add_argument("--json", type=pathlib.Path, help="keep the seconds of each turn here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device: run this on a machine with a GPU and a CUDA build of torch, "
                 "or try the code with --device cpu --shape toy")
    return args


def size_of(model: pathlib.Path) -> tuple[int, int]:
    """The number of parameters, and the FLOPs of attention a token for each token of its sample."""
    with modules_of(1):
        from model import Llama
        from utils import load_config

        config = load_config(str(model), num_attention_heads=None)
        with torch.device("meta"):
            num_params = sum(param.numel() for param in Llama(config).parameters())
    return num_params, 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def measure(seq_len: int, folder: str, args) -> dict[str, dict]:
    """Of each contestant by name: the seconds of a step, turn by turn, and the GB at the peak."""
    size, steps = args.micro_batch_size, args.steps
    rate = 0.05 / SHAPES[args.shape][0].get("hidden_size", 128)  # as Adam's has to be (muP, Yang et al. 2022)
    both = f"--seq_len {seq_len} --learning_rate {rate} --device {args.device} --dtype bfloat16"
    runs = [Run(OURS, 3, 1, f"{both} --micro_batch_size {size} --gradient_accumulation_steps 1 --max_tokens "
                            f"{steps * size * seq_len}"),
            Run(THEIRS, None, 1, f"hf {both} --samples {size} --microbatches 1")]
    if not args.no_compile:
        runs += [run._replace(name=run.name + COMPILED, flags=run.flags + " --compile") for run in runs]
    tokens, results = make_tokens(folder, steps * size * seq_len + 1), {}

    def turn(run: Run) -> float:
        program = start(run, folder, tokens, steps, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
        try:
            program.end()
        finally:
            program.kill()
        results[run.name] = read_results(run, folder)
        check_losses(results, **TOLERANCE)
        return statistics.median(results[run.name]["seconds"][1:])

    seconds = take_turns({run.name: lambda run=run: turn(run) for run in runs}, args.rounds)
    return {"seconds": seconds, "memory_gb": {name: result["memory_gb"] for name, result in results.items()}}


def table_of(found: dict[str, dict], num_tokens: int, flops: float, peak: float | None) -> str:
    """Ours with the rounds' ratios to theirs, eager to eager and compiled to compiled. `flops`: of a token."""
    rows = []
    for name, seconds in found["seconds"].items():
        speed, other = num_tokens / statistics.median(seconds), name.replace(OURS, THEIRS)
        lower, median, upper = times_as_fast(seconds, found["seconds"][other])
        rows.append([name, f"{speed:.0f}", f"{speed * flops / peak:.1%}" if peak else "",
                     f"{found['memory_gb'][name]:.1f}",
                     f"{median:.2f} ({lower:.2f} to {upper:.2f})" if other != name else ""])
    return table(["run", "tokens/s", "MFU", "peak GB", "ours / theirs"], rows)


if __name__ == "__main__":
    main()
