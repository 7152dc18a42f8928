"""Sequence and context parallelism: what ranks keep for backward. (That it computes the same: test_all_steps_same_math.py.)"""

import pytest

from memory_of_activations import SETTINGS, formula, measure


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_rank_keeps_for_backward(name):
    """Each tensor of the formula is there, and no other: with tensor parallelism alone, norms keep all tokens."""
    step, flags, sizes = SETTINGS[name]
    assert measure(step, flags, seq_len=768) == pytest.approx(formula(sizes, 768), rel=0.01)
