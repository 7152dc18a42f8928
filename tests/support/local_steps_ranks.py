"""Trains with local steps, as 3 ranks: `local_steps_ranks.py FOLDER`. FOLDER/cases.json: name -> what differs.

Each rank writes FOLDER/<name>_<rank>.pt: the weights at the end of each epoch, and the loss of each round.
"""

import argparse
import functools
import json
import pathlib
import sys

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

from dataloader import collate_batch  # noqa: E402
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin  # noqa: E402
from model import cross_entropy  # noqa: E402
from pipeline_template import PipelineTemplate  # noqa: E402
from run.local_steps import train_locally  # noqa: E402
from models.causal import make_llama  # noqa: E402
from utils import TINY_LLAMA, load_config  # noqa: E402

DEFAULTS = dict(local_steps=2, steps=[3, 1, 2], sizes=[1, 1, 1], overlap_steps=0, outer_learning_rate=0.7,
                outer_momentum=0.9, gradient_wire_dtype=None, inner="AdamW", learning_rate=3e-3, max_grad_norm=1.0,
                warmup_steps=2, lr_decay="none", epochs=2, rounds=2, seq_len=8)


def tiny_llama() -> torch.nn.Module:
    config = load_config(TINY_LLAMA, num_attention_heads=None, num_hidden_layers=1)
    return make_llama(config, 0, torch.device("cpu"), torch.float64)


def samples(case: dict) -> torch.Tensor:
    """Of an epoch: one for each micro-batch of its rounds."""
    count = case["rounds"] * sum(n * size for n, size in zip(case["steps"], case["sizes"]))
    return torch.randint(1024, (count, case["seq_len"] + 1), generator=torch.Generator().manual_seed(1))


def train(folder: pathlib.Path, name: str, case: dict) -> None:
    model = tiny_llama()
    plugin = HeterogeneousParallelPlugin(precision="float64", device="cpu")
    whole = PipelineTemplate.from_layers_per_stage(model, [1])
    plugin.set_pipelines([whole] * 3, [n * size for n, size in zip(case["steps"], case["sizes"])])
    batches = iter(plugin.prepare_dataloader(samples(case).repeat(case["epochs"], 1), collate_fn=collate_batch))
    inner = functools.partial(getattr(torch.optim, case["inner"]), lr=case["learning_rate"])
    args, epochs, losses = argparse.Namespace(**case), [], []
    for step in train_locally(args, plugin, model, inner(model.parameters()), batches,
                              lambda logits, batch: cross_entropy(logits, batch["target_ids"]), case["steps"],
                              case["rounds"]):
        losses.append(step.loss)
        if step.number % case["rounds"] == 0:
            epochs.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    torch.save((epochs, losses), folder / f"{name}_{dist.get_rank()}.pt")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    for name, changes in json.loads((folder / "cases.json").read_text()).items():
        train(folder, name, {**DEFAULTS, **changes})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
