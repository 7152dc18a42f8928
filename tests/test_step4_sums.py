"""The loss of huge logits. The exchanges over tp: test_all_steps_same_math.py and the exercises of step 4."""

import pytest
import torch
import torch.nn.functional as F

from launch import modules_of

with modules_of(4):
    from model import cross_entropy


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
