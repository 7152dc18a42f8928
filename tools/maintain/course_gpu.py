"""How fast is step 3 on one GPU, beside Hugging Face's Llama? Of the shape of TinyLlama-1.1B.

Step 3's train.py and peers.py train in bf16 with float32 masters: the same initial weights, samples, loss and fused
AdamW, and scaled_dot_product_attention. Ours has activations in bf16 and casts each weight where it multiplies; theirs
runs under torch.autocast, as in their Trainer(bf16=True), with norms and residual stream in float32. Ours computes the
gradient norm, too. Compiled means regional torch.compile: each decoder layer, the rest eager.

In each round everyone trains once, from its start to its end, since the GPU's memory does not hold all of them. A step
is one micro-batch and one update; a turn's figure is the median step without the first. Where losses differ by more
than 0.1, someone did other work, and the program exits with 1.

Model FLOPs utilization (MFU, PaLM, Chowdhery et al. 2022, appendix B) = tokens/s * FLOPs a token / the chip's peak.
Forward and backward of a token are 6N + 12 L (H hd) T FLOPs: N parameters, L layers, H heads of hd, and attention as if
each token saw all T of its sample (data_sheets.py).
"""

import json
import os
import re
import statistics
import sys
import tempfile

from maintain.contestants import Run, check_losses, make_tokens, read_results, start
from maintain.make_tiny_llama import resized
from maintain.turns import keep, table, take_turns, times_as_fast

STEPS = 7  # of a turn
SHAPES = {  # changes of the tiny Llama, and tokens a step
    "tinyllama": (dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                       num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=4096,
                       initializer_range=0.02), 16384),
    "toy": (dict(num_hidden_layers=2), 128),
}
OURS, THEIRS, COMPILED = "ours", "Hugging Face, autocast", ", compiled"


def gpu(args) -> None:
    import torch

    from sizes.data_sheets import DEVICES, MODEL, Shape

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device: run this on a machine with a GPU and a CUDA build of torch, "
                 "or try the code with --device cpu --shape toy")
    if args.gpu and args.gpu not in DEVICES:
        sys.exit(f"error: no data sheet of --gpu {args.gpu}: choose among {', '.join(DEVICES)}")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = DEVICES[args.gpu].bfloat16 if args.gpu else None  # FLOP/s
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((resized(folder, **SHAPES[args.shape][0]) / "config.json").read_text())
        flops = Shape(*(config[name] for name in (*MODEL, "head_dim"))).flops(args.seq_len)
        found = measure(folder, args)
    keep(args.json, f"{name}, seq_len {args.seq_len}", {**found, "torch": torch.__version__})
    print(f"{name}, seq_len {args.seq_len}\n\n{table_of(found, SHAPES[args.shape][1], flops, peak)}")


def measure(folder: str, args) -> dict[str, dict]:
    """Of each contestant by name: the seconds of a step, turn by turn, and the GB at the peak."""
    shape, num_tokens = SHAPES[args.shape]
    size, rate = num_tokens // args.seq_len, 0.05 / shape.get("hidden_size", 128)  # Adam's (muP, Yang et al. 2022)
    both = f"--seq_len {args.seq_len} --learning_rate {rate} --device {args.device} --dtype bfloat16"
    runs = [Run(OURS, 3, 1, f"{both} --micro_batch_size {size} --gradient_accumulation_steps 1 --max_tokens "
                            f"{STEPS * num_tokens}"),
            Run(THEIRS, None, 1, f"hf {both} --samples {size} --microbatches 1")]
    runs += [run._replace(name=run.name + COMPILED, flags=run.flags + " --compile") for run in runs]
    tokens, results = make_tokens(folder, STEPS * num_tokens + 1), {}

    def turn(run: Run) -> float:
        program = start(run, folder, tokens, STEPS, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
        try:
            program.end()
        finally:
            program.kill()
        results[run.name] = read_results(run, folder)
        check_losses(results, of_loss=0.1, of_norm=0.1, of_compiled=1)  # bf16 has 8 bits
        return statistics.median(results[run.name]["seconds"][1:])

    seconds = take_turns({run.name: lambda run=run: turn(run) for run in runs if re.search(args.only, run.name)},
                         args.rounds)
    return {"seconds": seconds, "memory_gb": {name: result["memory_gb"] for name, result in results.items()}}


def table_of(found: dict[str, dict], num_tokens: int, flops: int, peak: float | None) -> str:
    """Ours with the rounds' ratios to theirs, eager to eager and compiled to compiled. `flops`: of a token."""
    rows = []
    for name, seconds in found["seconds"].items():
        speed, other = num_tokens / statistics.median(seconds), name.replace(OURS, THEIRS)
        lower, median, upper = times_as_fast(seconds, found["seconds"].get(other, seconds))
        rows.append([name, f"{speed:.0f}", f"{speed * flops / peak:.1%}" if peak else "",
                     f"{found['memory_gb'][name]:.1f}",
                     f"{median:.2f} ({lower:.2f} to {upper:.2f})" if other != name else ""])
    return table(["run", "tokens/s", "MFU", "peak GB", "ours / theirs"], rows)
