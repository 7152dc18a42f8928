"""The learning rate of each step: a warm-up in a line, then constant or half a cosine, as textbooks write them."""

import math

import pytest
import torch
from lab.program import Program

make_scheduler = Program(3).load().utils.make_scheduler


def textbook(num_steps: int, warmup_steps: int, decay: str) -> list[float]:
    """Of the steps 1 to num_steps, in parts of the full rate."""
    rates = [step / (warmup_steps + 1) for step in range(1, min(warmup_steps, num_steps) + 1)]
    left = num_steps - len(rates)
    return rates + [(1 + math.cos(math.pi * i / left)) / 2 if decay == "cosine" else 1.0 for i in range(left)]


@pytest.mark.parametrize("decay", ["none", "cosine"])
@pytest.mark.parametrize("num_steps, warmup_steps", [
    (8, 2), (8, 0), (100, 10), (1, 0), (1, 1), (4, 3), (4, 4), (4, 5), (4, 60)])  # a run may end before the warm-up
def test_learning_rates(num_steps, warmup_steps, decay):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.003)
    scheduler, rates = make_scheduler(optimizer, num_steps, warmup_steps, decay), []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        assert optimizer.param_groups[0]["lr"] == rates[-1]
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.003 * part for part in textbook(num_steps, warmup_steps, decay)], rel=1e-12)
    if warmup_steps >= num_steps:
        assert rates == sorted(rates) and rates[-1] < 0.003, "it only rises"
    elif decay == "cosine":
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-15), "zero after the last step"
