"""--recompute changes memory and time but no bit: losses, norms and each gradient, with dropout as well."""

import json

import pytest
import torch
from lab.launch import MODELS, ROOT, fork
from support.recordings import Case, train_here

EIGHT = Case(8, num_steps=2, dtype="bfloat16", tp=2, pp=2, accumulation=4, engine="1f1b")
NINE = Case(9, num_steps=2, dtype="bfloat16", tp=2, pipelines="2,3;5", num_microbatches="5,3")


@pytest.mark.parametrize("case", [EIGHT, NINE], ids=str)
def test_no_bit_changes(case, models):
    kept, recomputed = (train_here(each, models) for each in (case, Case(case.step, **case.options, recompute=True)))
    for one, other in zip(kept.rows, recomputed.rows, strict=True):
        assert [one[name] for name in ("loss", "grad_norm")] == [other[name] for name in ("loss", "grad_norm")]
    for rank, (one, other) in enumerate(zip(kept.ranks, recomputed.ranks, strict=True)):
        assert one["grads"].keys() == other["grads"].keys() and len(one["grads"]) > 5
        for what in ("grads", "final"):
            unlike = [name for name in one[what] if not torch.equal(one[what][name], other[what][name])]
            assert not unlike, f"rank {rank}: {what} of {unlike}"


@pytest.mark.parametrize("ranks", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_backward_draws_the_masks_of_forward(tmp_path, ranks):
    """GPT-2 with dropout in pipelines of two stages and of one, over one tp rank or two: the same bits."""
    script = ROOT / "tests" / "support" / "dropout_over_ranks.py"
    fork(9, ranks, tmp_path, "recompute", "bfloat16", script=script, modules=MODELS)
    for rank in range(ranks):
        kept, recomputed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kept == recomputed and kept["loss"] > 1 and len(kept["gradients"]) > 10
