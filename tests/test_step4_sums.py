"""Exchanges over tp by themselves: equal bits on all ranks for small and large messages; the loss of huge logits."""

import pytest
import torch
import torch.nn.functional as F

from launch import ROOT, fork, modules_of

with modules_of(4):
    from model import cross_entropy


@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_and_loss_over_ranks(ranks):
    """Small messages are summed by step 4 itself, where the number of ranks is a power of two."""
    fork(4, ranks, 4, script=ROOT / "tests" / "support" / "tensor_parallel_ranks.py", timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("center", [0.0, 1e4, -1e4])
def test_cross_entropy_of_huge_logits(dtype, center):
    """Their exponentials are infinite in float32."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 6, 50, generator=generator) * (1 if center else 1e4) + center).to(dtype).requires_grad_()
    targets = torch.randint(50, (2, 6), generator=generator)
    whole = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    loss = cross_entropy(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (logits.grad - whole.grad).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-3)
