"""What ranks hold: the most of a whole process, and what is divided beside the formulas of the chapters 12 to 15.

peaks         GB of the process that needs most, as its operating system counts them, for several topologies.
shards        Bytes a parameter: all tensors that live in the process, weights, gradients, the optimizer's averages,
              copies in bfloat16, buffers of messages. In the second optimizer step the ranks count after each gradient,
              before the optimizer's step and after it: the most of these, and that before the optimizer's step.
              Activations are kept small: a micro-batch is one sample of 16 tokens.
activations   Bytes that autograd keeps of a micro-batch of one sample, see lab/watch/kept.py: of a
              model with 1 and with 3 layers, so half of the difference is a layer. The formula of a layer is
              data_sheets.kept_by_layer(), on the CPU in float32.

All are of the rank that holds most.
"""

import gc
import json
import math
import re
import tempfile

from lab.launch import ROOT, launch, metrics
from lab.watch import Watch
from maintain.make_tiny_llama import resized
from maintain.turns import table

PEAKS = {  # name -> step, ranks, flags
    "one process": (3, 1, "--gradient_accumulation_steps 16"),
    "tp 4": (4, 4, "--gradient_accumulation_steps 16 --tp_size 4"),
    "dp 4": (6, 4, "--gradient_accumulation_steps 4 --dp_size 4"),
    "pp 4, AFAB": (8, 4, "--gradient_accumulation_steps 16 --pp_size 4 --pp_engine afab"),
    "pp 4, 1F1B": (8, 4, "--gradient_accumulation_steps 16 --pp_size 4"),
    "pp 4, 1F1B, recompute": (8, 4, "--gradient_accumulation_steps 16 --pp_size 4 --recompute"),
    "dp 2 x pp 2 x tp 2": (8, 8, "--gradient_accumulation_steps 8 --dp_size 2 --pp_size 2 --tp_size 2"),
    "almost nothing": (3, 1, f"--model_name {ROOT}/assets/tiny_llama --num_hidden_layers 1 --micro_batch_size 1"),
}
RANKS, ACCUMULATION, SEQ_LEN = 4, 2, 16
WIDTH, MLP_WIDTH, KEYS_WIDTH, VOCABULARY = 1024, 2816, 512, 1024
SHARDS = {  # name -> step, flags, bytes a parameter at the most, and before the optimizer's step
    "zero 0": (12, "", 16, 16),
    "zero 1": (12, "--zero 1", 8 + 8 / RANKS, 4 + 12 / RANKS),
    "zero 2": (12, "--zero 2", 4 + 12 / RANKS, 4 + 12 / RANKS),
    "zero 1, shares 4,2,1,1": (12, "--zero 1 --zero_shares 4,2,1,1", 8 + 8 / 2, 4 + 12 / 2),
    "zero 3": (13, "--zero 3", 16 / RANKS, 16 / RANKS),
    "zero 3, gathered once": (13, "--zero 3 --gather_once", 8 + 16 / RANKS, 16 / RANKS),
    "zero 0, bfloat16": (12, "--dtype bfloat16", 18, 16),
    "zero 1, bfloat16": (12, "--zero 1 --dtype bfloat16", 10 + 8 / RANKS, 4 + 12 / RANKS),
    "zero 2, bfloat16": (12, "--zero 2 --dtype bfloat16", 6 + 12 / RANKS, 4 + 12 / RANKS),
    "zero 3, bfloat16": (13, "--zero 3 --dtype bfloat16", 16 / RANKS, 16 / RANKS),
    "zero 3, gathered once, bfloat16": (13, "--zero 3 --gather_once --dtype bfloat16", 6 + 16 / RANKS, 16 / RANKS),
}
ACTIVATIONS = {  # name -> step, flags, sizes that the formulas need
    "one process": (14, "", {}),
    "tensor parallelism, tp 4": (14, "--tp_size 4", {"tp": 4}),
    "sequence parallelism, tp 4": (14, "--tp_size 4 --sequence_parallel", {"tp": 4, "sequence": True}),
    "context parallelism, cp 2": (15, "--cp_size 2", {"cp": 2}),
    "context parallelism, cp 4": (15, "--cp_size 4", {"cp": 4}),
    "context and sequence parallelism, cp 2, tp 2": (15, "--cp_size 2 --tp_size 2 --sequence_parallel",
                                                     {"cp": 2, "tp": 2, "sequence": True}),
}
LAYERS = (1, 3)  # of activations


def on_ranks(step: int, ranks: int, flags: list, watch: Watch) -> Watch:
    """What the watch finds in so many processes of a step's train.py, with micro-batches of one sample, in float32."""
    from lab.program import Program
    from lab.ranks import processes, run

    flags = ["--micro_batch_size", 1, "--dtype", "float32", *flags]
    return run(Program(step, flags), processes(ranks), [watch], timeout=200).watches[0]


def live_bytes() -> int:
    """Of all tensors, those that share memory once."""
    import torch

    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Counted(Watch):
    """Bytes of all tensors of a process in its second optimizer step: the `most`, and `before` the optimizer's."""

    places = ("processes",)

    def __init__(self):
        self.most, self.before = {}, {}

    def begin(self, modules, rank: int) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def count() -> None:
            self.most[rank] = max(self.most.get(rank, 0), live_bytes())

        def before_step(*_) -> None:
            is_first, self.before[rank] = rank not in self.before, live_bytes()
            for param in {each for each in gc.get_objects() if type(each) is torch.nn.Parameter} if is_first else ():
                param.register_post_accumulate_grad_hook(lambda _: count())

        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(lambda *_: count())


def measure_shards(step: int, flags: str, layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        model = resized(folder, hidden_size=WIDTH, intermediate_size=MLP_WIDTH, head_dim=KEYS_WIDTH // 4,
                        num_hidden_layers=layers)
        flags = ["--dp_size", RANKS, "--model_name", model, "--num_hidden_layers", layers, "--seq_len", SEQ_LEN,
                 "--gradient_accumulation_steps", ACCUMULATION,
                 "--max_tokens", 2 * RANKS * ACCUMULATION * SEQ_LEN, *flags.split()]
        found = on_ranks(step, RANKS, flags, Counted())
    return {what: max(getattr(found, what).values()) / num_params(layers) for what in ("most", "before")}


def num_params(layers: int) -> int:
    layer = 2 * WIDTH + 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS_WIDTH + 3 * WIDTH * MLP_WIDTH
    return layers * layer + WIDTH + 2 * VOCABULARY * WIDTH


def measure_activations(step: int, flags: str, seq_len: int) -> dict[str, float]:
    """Bytes kept of a layer, and of a model with the more layers."""
    from lab.watch.kept import Kept

    kept = []
    for layers in LAYERS:
        found = on_ranks(step, math.prod(map(int, re.findall(r"_size (\d+)", flags))), [
            "--num_hidden_layers", layers, "--seq_len", seq_len, "--gradient_accumulation_steps", 1,
            "--max_tokens", seq_len, *flags.split()], Kept()).most.values()
        # In float32 no weight has a copy. What counts as one has the shape of one by chance.
        kept.append(max(rank["others"] + rank.get("weights", 0) for rank in found))
    return {"layer": (kept[1] - kept[0]) / (LAYERS[1] - LAYERS[0]), "whole": kept[1]}


def formula_of_activations(seq_len: int, tp: int = 1, sequence: bool = False, cp: int = 1) -> dict[str, float]:
    """What measure_activations() should find. Below are bytes for each token of the text."""
    from sizes.data_sheets import MODEL, Shape, kept_by_layer

    config = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
    shape = Shape(*(config[name] for name in (*MODEL, "head_dim")))
    kept = kept_by_layer(shape, tp, 4, is_gpu=False)
    kept["two norms"] /= tp if sequence else 1
    layer = sum(kept.values())
    ids = 2 * (2 + 1 / 4) if tp > 1 else 4 if cp > 1 else 2  # int64, tokens and targets: each with a mask, or in one
    # cos and sin, what the projection multiplies, the softmax, the last norm
    rest = 4 * (ids + 2 * shape.head_dim + shape.hidden + shape.vocab / tp) + kept["two norms"] / 2
    return {"layer": seq_len * layer / cp, "whole": seq_len * (LAYERS[1] * layer + rest) / cp}


def peaks(args) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = resized(folder, hidden_size=512, intermediate_size=1376, head_dim=64)
        for name, (step, ranks, flags) in PEAKS.items():
            if re.search(args.only, name):
                launch(step, ranks, "--model_name", model, "--log_dir", folder, "--micro_batch_size", 2, "--max_tokens",
                       2 * 32 * 128, *flags.split(), timeout=300)
                rows.append([name, f"{metrics(folder)[-1]['memory_gb']:.2f}"])
    print(table(["", "GB"], rows))


def shards(args) -> None:
    print(f"{RANKS} ranks, {num_params(args.layers) / 1e6:.1f} million parameters, bytes a parameter\n")
    rows = []
    for name, (step, flags, most, before) in SHARDS.items():
        if re.search(args.only, name):
            found = measure_shards(step, flags, args.layers)
            rows.append([name, *(f"{each:.2f}" for each in (most, found["most"], before, found["before"]))])
    print(table(["setting", "at most, formula", "measured", "before the optimizer's step, formula", "measured"], rows))


def activations(args) -> None:
    print(f"MB a rank keeps of {args.seq_len} tokens, whole: {LAYERS[1]} layers and what is beyond them\n")
    rows = []
    for name, (step, flags, sizes) in ACTIVATIONS.items():
        if re.search(args.only, name):
            found = measure_activations(step, flags, args.seq_len)
            expected = formula_of_activations(args.seq_len, **sizes)
            rows.append([name, *(f"{each[what] / 1e6:.2f}" for what in found for each in (expected, found))])
    print(table(["setting", "a layer, formula", "measured", "whole, formula", "measured"], rows))
