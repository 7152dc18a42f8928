"""Bytes a parameter that a data-parallel rank holds, measured beside the formulas of the chapters 12 and 13.

    python tools/maintain/memory_of_shards.py                  minutes, and 8 GB of memory
    python tools/maintain/memory_of_shards.py --only 'zero 1' --layers 2

Counted are all tensors that live in the process: weights, gradients, the optimizer's averages, copies in bfloat16,
buffers of messages. In the second optimizer step the ranks count after each gradient, before the optimizer's step and
after it. Printed are the largest count of a step and that before the optimizer's step, of the rank that holds most.
Activations are kept small: a micro-batch is one sample of 16 tokens.
"""

import tools_path  # noqa: F401  before launch

import argparse
import gc
import json
import os
import pathlib
import re
import runpy
import shutil
import sys
import tempfile

import torch
from launch import ROOT, STEPS, Help, launch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

RANKS, ACCUMULATION, SEQ_LEN = 4, 2, 16
MODEL = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 128}
SETTINGS = {  # name -> step, flags, bytes a parameter at the most, and before the optimizer's step
    "zero 0": (12, "", 16, 16),
    "zero 1": (12, "--zero 1", 8 + 8 / RANKS, 4 + 12 / RANKS),
    "zero 2": (12, "--zero 2", 4 + 12 / RANKS, 4 + 12 / RANKS),
    "zero 1, shares 4,2,1,1": (12, "--zero 1 --zero_shares 4,2,1,1", 8 + 8 / 2, 4 + 12 / 2),
    "zero 3": (13, "--zero 3", 16 / RANKS, 16 / RANKS),
    "zero 0, bfloat16": (12, "--dtype bfloat16", 18, 16),
    "zero 1, bfloat16": (12, "--zero 1 --dtype bfloat16", 10 + 8 / RANKS, 4 + 12 / RANKS),
    "zero 2, bfloat16": (12, "--zero 2 --dtype bfloat16", 6 + 12 / RANKS, 4 + 12 / RANKS),
    "zero 3, bfloat16": (13, "--zero 3 --dtype bfloat16", 16 / RANKS, 16 / RANKS),
}


def live_bytes() -> int:
    """Of all tensors, those that share memory once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def run_rank(out: str, script: str) -> None:
    """train.py, which counts in its second step."""
    counts, steps = [], []

    def before_step(optimizer, _args, _kwargs) -> None:
        steps.append(live_bytes())
        params = {thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter}
        for param in params if len(steps) == 1 else ():
            param.register_post_accumulate_grad_hook(lambda _: counts.append(live_bytes()))

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(lambda *_: counts.append(live_bytes()))
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script)["main"]()
    with open(os.path.join(out, f"{os.environ['RANK']}.json"), "w") as file:
        json.dump({"most": max(counts), "before": steps[1]}, file)


def measure(step: int, flags: str, layers: int) -> dict[str, float]:
    """Bytes a parameter of the rank that holds most."""
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(shutil.copytree(ROOT / "assets" / "tiny_llama", pathlib.Path(folder, "model")))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **MODEL, "num_hidden_layers": layers}))
        words = ["--dp_size", RANKS, "--model_name", model, "--log_dir", folder, "--micro_batch_size", 1,
                 "--gradient_accumulation_steps", ACCUMULATION, "--seq_len", SEQ_LEN,
                 "--max_tokens", 2 * RANKS * ACCUMULATION * SEQ_LEN, *flags.split()]
        launch(step, RANKS, "one_rank", folder, STEPS[str(step)] / "train.py", *words, script=__file__, timeout=580)
        ranks = [json.loads(pathlib.Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {what: max(rank[what] for rank in ranks) / num_params(config["vocab_size"], layers) for what in ranks[0]}


def num_params(vocab_size: int, layers: int) -> int:
    width, heads = MODEL["hidden_size"], MODEL["head_dim"] * MODEL["num_key_value_heads"]
    layer = 2 * width + 2 * width * width + 2 * width * heads + 3 * width * MODEL["intermediate_size"]
    return layers * layer + width + 2 * vocab_size * width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--only", default="", help="a regular expression: which settings")
    parser.add_argument("--layers", type=int, default=9, help="9 are 108 million parameters")
    args = parser.parse_args()
    print(f"{RANKS} ranks, {num_params(1024, args.layers) / 1e6:.1f} million parameters\n")
    print("| setting | at most, formula | measured | before the optimizer's step, formula | measured |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, (step, flags, most, before) in SETTINGS.items():
        if re.search(args.only, name):
            found = measure(step, flags, args.layers)
            print(f"| {name} | {most:.2f} | {found['most']:.2f} | {before:.2f} | {found['before']:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one_rank"]:
        sys.argv = sys.argv[2:]
        run_rank(sys.argv.pop(0), sys.argv[0])
    else:
        main()
