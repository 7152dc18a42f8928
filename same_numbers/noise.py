"""How much of a difference is rounding: a value, computed once for each step, and passed on."""

from typing import NamedTuple

import torch

# By dtype, relative: what rounding changes in gradients of the first step, in later ones, and in weights at the start
NOISE = {"float64": (1e-9, 1e-6, 1e-12), "float32": (3e-4, 3e-2, 2e-6), "bfloat16": (5e-2, 2e-1, 1e-2)}
RESOLUTION = {"float64": 1e-13, "float32": 2.4e-7, "float16": 1e-3, "bfloat16": 4e-3}  # of a weight, to see an update
ROUNDING = {"float64": 2e-6, "float32": 2e-2}  # what looks like rounding in the next coarser dtype


def coarsest(*dtypes: str) -> str:
    """The name in NOISE of the one with the fewest digits. Integers have no noise of their own."""
    known = [each for name in dtypes if (each := getattr(torch, name)).is_floating_point or each.is_complex]
    eps = max((torch.finfo(each).eps for each in known), default=1e-7)
    return "float64" if eps < 1e-12 else "float32" if eps < 1e-6 else "bfloat16"


class Noise(NamedTuple):
    """Relative to the length of what is right."""
    computed: str  # the coarsest dtype of weights and of what layers returned so far
    kept: str  # of the optimizer's states, too
    is_rounded: bool  # something computes in float32, though these are float64
    first: float  # of gradients in the first step
    drift: float  # of this step's, without a limit
    gradients: float
    totals: float  # of what follows from gradients: norm, loss, causes. These may round to float32 by themselves
    updates: float
    rounding: float  # what is no fault, but noted

    def of_loss(self, size: float) -> float:  # absolute. GRPO's is about 0, and its terms are of the size of 1
        return max(self.totals * abs(size), RESOLUTION[self.computed])


def noise(computed: str, kept: str, drift: float = 0.0, is_rounded: bool = False) -> Noise:
    """`drift`: what weights that have come apart add."""
    first, rounding = NOISE[computed][0], ROUNDING["float64"]
    gradients = min(0.5, first + drift)
    updates = max(gradients, NOISE[coarsest(computed, kept, *["float32"] * is_rounded)][1])
    return Noise(computed, kept, is_rounded, first, first + drift, gradients, max(gradients, rounding), updates,
                 rounding * (computed == "float64"))
