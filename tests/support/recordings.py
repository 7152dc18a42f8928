"""Recorded runs: train.py of any step in float64 on a small model, and the proof that two runs computed the same.

A Run is what its metrics and its ranks have recorded, in processes or on ranks in this one.
"""

import json
import pathlib
import shutil
from collections import defaultdict
from typing import NamedTuple

import torch
from lab.launch import ROOT
from lab.program import Program
from lab.ranks import run, threads
from lab.watch.numbers import WholeNumbers

TOLERANCE = 1e-11  # splitting the batch of one process differently moves its losses by 1e-15
NUM_LAYERS = 5  # unlike numbers of them on two, three and four stages
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # Llama 3.2's, for a first training with shorter texts
NARROW = {"hidden_size": 32, "intermediate_size": 88, "head_dim": 4}
VARIANTS = {  # of the tiny Llama, which is narrowed
    "plain": {}, "tied": {"tie_word_embeddings": True}, "vocab1022": {"vocab_size": 1022},
    "thirds": {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 66},
    "llama3": {"rope_parameters": LLAMA3},
}
COLUMN_PARALLEL = ("embedding", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "final_proj")  # split along dim 0
ROW_PARALLEL = ("out_proj", "down_proj")  # split along dim 1
DEFAULTS = dict(dp=1, ep=1, pp=1, cp=1, tp=1, pipelines="", num_microbatches="", engine=None, virtual_stages=1,
                samples=16, accumulation=8, variant="plain", num_steps=3, num_hidden_layers=NUM_LAYERS, seq_len=8,
                dtype="float64", max_grad_norm=1.0, num_experts=0, balance_loss=0.0, optimizer="")
FLAGS = {"engine": "pp_engine", "accumulation": "gradient_accumulation_steps",
         **{axis: f"{axis}_size" for axis in ("dp", "ep", "pp", "cp", "tp")}}  # shorter names -> flags
NOT_FLAGS = ("samples", "variant", "num_steps")
OF_BASELINE = (*NOT_FLAGS, "num_hidden_layers", "seq_len", "dtype", "max_grad_norm", "num_experts",
               "experts_per_token", "balance_loss", "balance_bias", "optimizer")


class Case:
    """A run of a step: flags, by their names or those of FLAGS, the `variant` of the model, and `num_steps`.

    The `samples` of an optimizer step are split into micro-batches, `accumulation` of them on each dp rank. With
    `pipelines`, as step 9 has them, all micro-batches have two samples.
    """

    def __init__(self, step: int, **options):
        self.step, self.options = step, options
        self.name = "-".join([f"step{step}", *(f"{name}{value}" for name, value in options.items())])
        vars(self).update(DEFAULTS | options)

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other) -> bool:
        return self.name == other.name

    @property
    def num_processes(self) -> int:
        stages = self.pipelines.replace(";", ",").count(",") + 1 if self.pipelines else self.dp * self.pp * self.cp
        return stages * self.tp

    @property
    def baseline(self) -> "Case":
        """One process that takes the same optimizer steps; with experts, step 16's, and the balance loss is one of
        micro-batches, which then have the same size; with Muon, step 18's."""
        kept = {name: self.options[name] for name in OF_BASELINE if name in self.options}
        accumulation = self.dp * self.accumulation if self.balance_loss else 2
        return Case(18 if self.optimizer else 16 if self.num_experts else 3, accumulation=accumulation, **kept)

    def flags(self, folder: pathlib.Path) -> list:
        own = {name: value for name, value in self.options.items() if name not in NOT_FLAGS}
        size = 2 if self.pipelines else self.samples // (self.accumulation * self.dp)
        flags = {"accumulation": self.accumulation, **own, "num_hidden_layers": self.num_hidden_layers,
                 "eval_every": own.get("local_steps", 2),
                 "dtype": self.dtype, "seq_len": self.seq_len, "max_grad_norm": self.max_grad_norm,
                 "micro_batch_size": size, "max_tokens": self.num_steps * self.samples * self.seq_len,
                 "model_name": folder / f"model_{self.variant}"}
        if self.pipelines:
            del flags["accumulation"]
        return words({FLAGS.get(name, name): value for name, value in flags.items()})


def words(flags: dict) -> list:
    """On the command line. A switch is True or False."""
    return [word for name, value in flags.items() if value is not False
            for word in (f"--{name}", value)[: 1 + (value is not True)]]


def write_models(folder: pathlib.Path) -> None:
    """Writes folder/model_<variant> for each variant."""
    for variant, change in VARIANTS.items():
        target = shutil.copytree(ROOT / "assets" / "tiny_llama", folder / f"model_{variant}")
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **NARROW, **change}))


class Run(NamedTuple):
    rows: list[dict]  # of metrics.jsonl
    ranks: list[dict]  # what each rank recorded, see WholeNumbers


def record(step, flags: list, ranks) -> Run:
    """The step's train.py, or that script, with these flags on these ranks."""
    rows = run(Program(step, flags), ranks, [whole := WholeNumbers()]).rows
    return Run(rows, [whole.of[rank] for rank in sorted(whole.of)])


def train_here(case: Case, folder: pathlib.Path) -> Run:
    """The case on ranks in this process, which takes a tenth of the time, on random tokens."""
    return record(case.step, case.flags(folder), threads(case.num_processes))


def assemble(ranks: list[dict], what: str) -> dict[str, torch.Tensor]:
    """Full tensors out of all ranks' parts; copies of the same part have to be equal to the last bit."""
    parts = defaultdict(dict)  # name -> tp rank -> tensor
    for rank in ranks:
        for name, tensor in rank[what].items():
            tp = rank["place"]["tp"]
            if tp in parts[name]:
                assert torch.equal(parts[name][tp], tensor), f"{what} of {name}: copies differ, {rank['place']}"
            parts[name][tp] = tensor
    full = {}
    for name, by_rank in parts.items():
        tensors = [by_rank[tp] for tp in sorted(by_rank)]
        module = name.split(".")[-2]
        if module in COLUMN_PARALLEL + ROW_PARALLEL:
            full[name] = torch.cat(tensors, dim=0 if module in COLUMN_PARALLEL else 1)
        else:  # norms are held whole by each tp rank
            assert all(torch.equal(tensors[0], other) for other in tensors), f"{what} of {name}: tp ranks differ"
            full[name] = tensors[0]
    return full


def assert_same_math(one: Run, many: Run, num_steps: int) -> None:
    """The run `many` computed what the single process `one` did: losses, norms, first and last weights, gradients.

    The gradients are those that the optimizer sees, after clipping. A norm is that before.
    """
    try:
        compare(one, many, num_steps)
    except AssertionError as error:  # rounding chooses the expert where two of them are as probable
        gap = min((rank["gap"] for rank in one.ranks + many.ranks if rank["gap"] is not None), default=1)
        raise AssertionError(f"{error} (an expert was chosen by {gap:.1e})" if gap < 1e-9 else str(error)) from None


def compare(one: Run, many: Run, num_steps: int) -> None:
    [base], ranks = one.ranks, many.ranks
    expected, found = one.rows, many.rows
    assert len(expected) == len(found) == num_steps
    for what in ("grad_norm", "loss", "validation_loss"):  # the last one after some of the steps
        off = [abs(a.get(what, 0) - b.get(what, 0)) for a, b in zip(expected, found)]
        assert max(off) <= TOLERANCE, f"{what} of the steps: {', '.join(f'{each:.1e}' for each in off)} apart"
    for what in ("initial", "grads", "final"):
        full = assemble(ranks, what)
        if "final_proj.weight" not in base[what] and "final_proj.weight" in full:  # tied, on the first and last stage
            assert torch.equal(full["embedding.weight"], full.pop("final_proj.weight")), f"{what}: tied copies differ"
        assert full.keys() == base[what].keys()
        for name, tensor in base[what].items():
            worst = (full[name] - tensor).abs().max().item()
            # AdamW divides by the gradient's size: after some steps a difference of rounding has grown by orders.
            assert worst <= (1e-8 if what == "final" else TOLERANCE), f"{what} of {name}: {worst:.1e} apart"
