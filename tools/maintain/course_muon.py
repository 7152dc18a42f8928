"""AdamW and Muon on the tiny Llama: losses after the same tokens and seconds, and what a step's optimizer takes.

measure_course.py muon prints both in tables, and make_figures.py muon draws the first. Models are trained in one
process, of one thread, and take turns step by step on the same samples. Seconds are those of the processor, so that what
else the machine does hardly counts.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

from launch import ROOT, modules_of
from turns import table

RATES, SEEDS, STEPS, SAMPLES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2), (42, 43, 44), 150, 8  # learning rates; samples a step
LAST = 20  # steps at the end, whose mean loss is compared
MATRIX = "decoder_layers.3.mlp.up_proj.weight"  # whose singular values are drawn


class Trained:
    """One training: `losses` and `seconds`, one of each for a step so far."""

    def __init__(self, optimizer: str, rate: float, seed: int):
        import torch
        from data_parallel import DataParallelBucket
        from model import Llama, init_weights
        from muon import choose_owners, make_optimizers
        from tensor_parallel import split_over_tp
        from utils import TINY_LLAMA, load_config, make_scheduler

        self.name, self.losses, self.seconds = (optimizer, rate, seed), [], []
        with torch.device("meta"):
            names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            model = Llama(load_config(TINY_LLAMA, **dict.fromkeys(names)))
        init_weights(model, seed, torch.device("cpu"), split_over_tp)
        matrices = choose_owners(model, None) if optimizer == "muon" else []
        self.args, self.model = argparse.Namespace(zero=0, max_grad_norm=1.0), DataParallelBucket(model)
        self.optimizers = make_optimizers(self.model, matrices, rate)
        self.schedulers = [make_scheduler(each, STEPS, 10, "cosine") for each in self.optimizers]

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


def train_in_turns(names: list[tuple[str, float, int]], folder: pathlib.Path) -> Iterator[Trained]:
    """The trainings (optimizer, learning rate, seed), after all of their steps. Each seed reads samples of its own."""
    from dataloader import collate_batch, load_samples
    from utils import TINY_LLAMA

    samples = load_samples("sotu", TINY_LLAMA, 128, 1024, len(SEEDS) * STEPS * SAMPLES, str(folder))
    trained = [Trained(*name) for name in names]
    for i in range(STEPS):
        for each in trained:
            first = (SEEDS.index(each.name[2]) * STEPS + i) * SAMPLES
            each.step(collate_batch([samples[k] for k in range(first, first + SAMPLES)]))
        print(f"step {i + 1}/{STEPS}:", *(f"{each.losses[-1]:.3f}" for each in trained), file=sys.stderr, flush=True)
    return trained


def final(losses: list[float]) -> float:
    return statistics.mean(losses[-LAST:])


def compare(folder: pathlib.Path) -> dict:
    """All learning rates with the first seed; then the best one of each optimizer with the others, too."""
    import torch

    torch.set_num_threads(1)
    with modules_of(18):
        import process_group_manager as pgm
        from muon import orthogonalize

        pgm.init_process_group("gloo")
        pgm.setup_process_group_manager(1, 1, 1)
        found = train_in_turns([(kind, rate, SEEDS[0]) for rate in RATES for kind in ("adamw", "muon")], folder)
        best = {kind: min((final(each.losses), each.name[1]) for each in found if each.name[0] == kind)[1]
                for kind in ("adamw", "muon")}
        muon = next(each for each in found if each.name[:2] == ("muon", best["muon"]))
        update = muon.optimizers[1].average(muon.model.module.get_parameter(MATRIX)).detach()
        values = [torch.linalg.svdvals(each).tolist() for each in (update / update.norm(), orthogonalize(update))]
        found += train_in_turns([(kind, rate, seed) for seed in SEEDS[1:] for kind, rate in best.items()], folder)
    return {"best": best, "singular_values": values,
            "runs": [{"name": each.name, "losses": each.losses, "seconds": each.seconds} for each in found]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(compare(pathlib.Path(folder))))
