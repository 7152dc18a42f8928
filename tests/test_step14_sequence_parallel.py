"""Sequence and context parallelism: what ranks keep for backward. (That it computes the same: test_all_steps_same_math.py.)"""

import pytest

from course_memory import ACTIVATIONS, formula_of_activations, measure_activations


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_a_rank_keeps_for_backward(name):
    """Each tensor of the formula is there, and no other: with tensor parallelism alone, norms keep all tokens."""
    step, flags, sizes = ACTIVATIONS[name]
    expected = formula_of_activations(768, **sizes)
    assert measure_activations(step, flags, seq_len=768) == pytest.approx(expected, rel=0.01)
