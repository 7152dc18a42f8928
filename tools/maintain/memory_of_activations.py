"""Bytes of activations that a rank keeps for backward, measured beside the formulas of the chapters 14 and 15.

    python tools/maintain/memory_of_activations.py                        two minutes
    python tools/maintain/memory_of_activations.py --only sequence --seq_len 512

Counted is what autograd keeps of a micro-batch of one sample, see tests/support/saved_for_backward.py: of a model with
1 and with 3 layers, so half of the difference is a layer. The formulas are those of this code on the CPU in float32,
where the norm keeps its input, the input divided by its root mean square, and this root.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import math
import pathlib
import re
import tempfile

from launch import ROOT, STEPS, Help, launch

SCRIPT = ROOT / "tests" / "support" / "saved_for_backward.py"
LAYERS = (1, 3)
CONFIG = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
D, I, V = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
H, HD = CONFIG["num_attention_heads"], CONFIG["head_dim"]
Q, K = H * HD, CONFIG["num_key_value_heads"] * HD  # widths of all query heads, and of all key/value heads


def layer(tp: int = 1, sequence: bool = False, cp: int = 1) -> float:
    """Numbers a token of the text that a rank keeps of a decoder layer."""
    norms = 2 * (2 * D + 1) / (tp if sequence else 1)  # input, normalised input, 1 / root mean square
    inputs = 2 * D  # what q, k, v and what gate, up multiply: gathered, so whole
    attention = (Q + K + K + Q + H) / tp  # q and k after the rotation, v, the output, the log-sum-exp of each head
    mlp = 4 * I / tp  # gate, silu(gate), up, and their product
    return (norms + inputs + attention + mlp) / cp


def rest(tp: int = 1, sequence: bool = False, cp: int = 1) -> float:
    """Numbers a token of the text that a rank keeps beyond its layers."""
    ids = 2 * (2 + 1 / 4) if tp > 1 else 4 if cp > 1 else 2  # int64, tokens and targets: each with a mask, or in one
    final_norm = (2 * D + 1) / (tp if sequence else 1) + D  # and what the projection multiplies
    return (ids + 2 * HD + final_norm + V / tp) / cp  # 2 HD: cos and sin; V / tp: the softmax


SETTINGS = {  # name -> step, flags, sizes that the formulas need
    "one process": (14, "", {}),
    "tensor parallelism, tp 4": (14, "--tp_size 4", {"tp": 4}),
    "sequence parallelism, tp 4": (14, "--tp_size 4 --sequence_parallel", {"tp": 4, "sequence": True}),
    "context parallelism, cp 2": (15, "--cp_size 2", {"cp": 2}),
    "context parallelism, cp 4": (15, "--cp_size 4", {"cp": 4}),
    "context and sequence parallelism, cp 2, tp 2": (15, "--cp_size 2 --tp_size 2 --sequence_parallel",
                                                     {"cp": 2, "tp": 2, "sequence": True}),
}


def measure(step: int, flags: str, seq_len: int) -> dict[str, float]:
    """Bytes that the rank which keeps most keeps of a layer, and of a model with the more layers."""
    ranks = math.prod(map(int, re.findall(r"_size (\d+)", flags)))
    with tempfile.TemporaryDirectory() as folder:
        kept = []
        for layers in LAYERS:
            out = pathlib.Path(folder, str(layers))
            words = ["--num_hidden_layers", layers, "--seq_len", seq_len, "--micro_batch_size", 1, "--log_dir", folder,
                     "--gradient_accumulation_steps", 1, "--max_tokens", seq_len, "--dtype", "float32", *flags.split()]
            launch(step, ranks, out, STEPS[str(step)] / "train.py", *words, script=SCRIPT, timeout=580)
            found = [json.loads(path.read_text()) for path in out.glob("rank*.json")]
            # In float32 no weight has a copy. What counts as one has the shape of one by chance.
            kept.append(max(rank["others"] + rank.get("weights", 0) for rank in found))
    return {"layer": (kept[1] - kept[0]) / (LAYERS[1] - LAYERS[0]), "whole": kept[1]}


def formula(sizes: dict, seq_len: int) -> dict[str, float]:
    """What measure() should find."""
    return {"layer": 4 * seq_len * layer(**sizes), "whole": 4 * seq_len * (LAYERS[1] * layer(**sizes) + rest(**sizes))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--only", default="", help="a regular expression: which settings")
    parser.add_argument("--seq_len", type=int, default=4096, help="tokens in a sample")
    args = parser.parse_args()
    print(f"MB a rank keeps of {args.seq_len} tokens, whole: {LAYERS[1]} layers and what is beyond them\n")
    print("| setting | a layer, formula | measured | whole, formula | measured |\n| --- | ---: | ---: | ---: | ---: |")
    for name, (step, flags, sizes) in SETTINGS.items():
        if re.search(args.only, name):
            found, expected = measure(step, flags, args.seq_len), formula(sizes, args.seq_len)
            cells = [f"{each[what] / 1e6:.2f}" for what in found for each in (expected, found)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
