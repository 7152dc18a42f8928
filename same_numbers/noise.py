"""How much of a difference is rounding: a value, computed once for each step."""

import dataclasses

import torch

# By dtype, relative: what rounding changes in gradients of the first step, in later ones, and in weights at the start
NOISE = {"float64": (1e-9, 1e-6, 1e-12), "float32": (3e-4, 3e-2, 2e-6), "bfloat16": (5e-2, 2e-1, 1e-2)}
RESOLUTION = {"float64": 1e-13, "float32": 2.4e-7, "float16": 1e-3, "bfloat16": 4e-3}  # of a weight, to see an update
ROUNDING = {"float64": 2e-6, "float32": 2e-2}  # what looks like rounding in the next coarser dtype


def coarsest(*dtypes: str) -> str:
    """The name in NOISE of the one with the fewest digits. Integers have no noise of their own."""
    infos = [torch.finfo(dtype) for name in dtypes if (dtype := getattr(torch, name)).is_floating_point
             or dtype.is_complex]
    eps = max((info.eps for info in infos), default=1e-7)
    return "float64" if eps < 1e-12 else "float32" if eps < 1e-6 else "bfloat16"


@dataclasses.dataclass(frozen=True)
class Noise:
    """`computed`: the coarsest dtype of weights and of what layers returned so far; `kept`: of the optimizer's states,
    too. `drift`: of gradients, relative: what weights have come apart makes of rounding. `is_rounded`: something has
    computed in float32, though all of these are float64."""

    computed: str
    kept: str
    drift: float = 0.0
    is_rounded: bool = False

    @property
    def first(self) -> float:
        """Of gradients in the first step."""
        return NOISE[self.computed][0]

    @property
    def gradients(self) -> float:
        return min(0.5, self.first + self.drift)

    @property
    def rounding(self) -> float:
        """What is no fault, but noted."""
        return ROUNDING["float64"] if self.computed == "float64" else 0.0

    @property
    def totals(self) -> float:
        """Of what follows from gradients: the norm, the loss. These may round to float32 by themselves."""
        return max(self.gradients, ROUNDING["float64"])

    @property
    def together(self) -> float:
        """Of a factor that all gradients have."""
        return max(0.2 * (self.first + self.drift), self.rounding * self.is_rounded)

    @property
    def updates(self) -> float:
        return max(NOISE[coarsest(self.computed, self.kept, *["float32"] * self.is_rounded)][1], self.gradients)

    @property
    def has_few_signs(self) -> bool:
        """Whether an update may go the other way where a gradient is almost zero."""
        return self.is_rounded or coarsest(self.computed, self.kept) != "float64"

    def resolution(self, dtype: str) -> float:
        """Of a weight, beside its length: what an update has to be to be seen."""
        return max(RESOLUTION[coarsest(dtype)], RESOLUTION[self.kept], RESOLUTION["float32"] * self.is_rounded)
