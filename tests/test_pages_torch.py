"""docs/TORCH.md: what it names of PyTorch is there, and computes our numbers."""

import importlib
import json
import re

import pytest
import torch
from lab.launch import ROOT, fork, metrics

PAGE = (ROOT / "docs" / "TORCH.md").read_text(encoding="utf-8")
LIMIT = 1e-9


def test_what_the_table_names_is_there():
    table = re.findall(r"^\|[^|]*\| `([\w.]+)` \|", PAGE, re.M)  # the column of PyTorch
    names = [name if name.startswith("torch.") else f"torch.distributed.{name}" for name in table]
    names += re.findall(r"`(torch(?:\.\w+)+)`", PAGE)
    assert len(table) >= 25
    for name in names:
        module, _, last = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ImportError:
            assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("grid", [(1, 2, 2), *(
    pytest.param(grid, marks=pytest.mark.slow(drawn=1)) for grid in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)))], ids=str)
def test_torchs_parts_train_as_step_8_does(grid, tmp_path):
    """The rows of steps 2 to 8 and 13 at once: losses, and the last gradient norm."""
    (dp, pp, tp), ranks = grid, grid[0] * grid[1] * grid[2]
    common = ["--dp_size", dp, "--pp_size", pp, "--tp_size", tp, "--seq_len", 16, "--learning_rate", 1e-3, "--dtype",
              "float64"]
    fork(8, ranks, *common, "--steps", 2, "--samples", 16, "--microbatches", 4, "--out", tmp_path / "torch.json",
         script=ROOT / "tools" / "with_torch.py")
    fork(8, ranks, *common, "--max_tokens", 2 * 16 * 16, "--micro_batch_size", 4 // dp, "--max_grad_norm", 0,
         "--gradient_accumulation_steps", 4, "--log_dir", tmp_path)
    theirs, rows = json.loads((tmp_path / "torch.json").read_text()), metrics(tmp_path)
    assert [row["loss"] for row in rows] == pytest.approx(theirs["losses"], abs=LIMIT, rel=0)
    assert rows[-1]["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=LIMIT)


def test_a_sampler_interleaves_as_ours_does():
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
    assert [*sampler] == [1, 3, 5, 7]


def test_the_norm_is_ours():
    params = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    for param in params:
        param.grad = torch.arange(param.numel(), dtype=torch.float64).view_as(param).to(param.dtype)
    ours = torch.nn.utils.get_total_norm([torch.linalg.vector_norm(param.grad, dim=-1) for param in params])  # step 3's
    assert torch.nn.utils.clip_grad_norm_(params, 1.0).item() == pytest.approx(ours.item(), rel=1e-6)
