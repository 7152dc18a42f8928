"""What survivors hold: a step is made by all or by none, and state moves from any layout to any other in memory."""

import pathlib
import types

from launch import fork, modules_of

with modules_of(9):
    from run import live_state


def test_three_ranks_hold_one_training_together():
    """Over gloo; what each rank checks stands in support/held_ranks.py."""
    done = fork(9, 3, script=pathlib.Path(__file__).parent / "support" / "held_ranks.py")
    assert len([line for line in done.stdout.splitlines() if line.startswith("rank ")]) == 3 * 4, done.stdout


def test_adapters_and_what_they_are_beside():
    """A weight that an adapter has been put beside keeps its key; the adapters have theirs, and move by themselves."""
    stage = types.SimpleNamespace(tied=None)
    assert live_state.key_of(stage, "layers.0.base_layer.weight", "", 0) == ("layers.0.weight", "", 0)
    assert live_state.key_of(stage, "layers.0.lora_a", "exp_avg", 1) == ("layers.0.lora_a", "exp_avg", 1)
