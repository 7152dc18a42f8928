"""What a rank holds of a parameter, to compare ranks that should hold the same to the last bit (find_faults.py)."""

import hashlib
import itertools
from typing import NamedTuple

import torch


class Held(NamedTuple):
    """How many numbers, the SHA-256 of their bytes, and their sum, which is for messages only."""

    numel: int
    digest: str
    sum: float


def held(param: torch.Tensor) -> Held:
    """Of a tensor of any shape and data type."""
    numbers = param.detach().cpu().contiguous().view(-1)
    as_bytes = numbers.view(torch.uint8).numpy().tobytes()  # a view, because NumPy does not know bfloat16
    return Held(numbers.numel(), hashlib.sha256(as_bytes).hexdigest(), numbers.double().sum().item())


def difference(ranks: dict[int, Held]) -> str | None:
    """How the first two ranks that hold other bytes differ, in a few words; None where all hold the same."""
    for (first, one), (other, two) in itertools.combinations(ranks.items(), 2):
        if one.digest != two.digest:
            a, b = f"{one.sum:.6f}", f"{two.sum:.6f}"
            return f"sums to {a} on rank {first} and {b} on rank {other}" + ", but elements differ" * (a == b)
    return None
