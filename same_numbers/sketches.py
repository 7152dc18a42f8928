"""Sketches: a few numbers for a tensor, by which it can be compared with another one. They are linear.

A sketch has, for each dimension, a vector of at most BINS sums, in which all other dimensions are added with
pseudo-random signs (Alon, Matias and Szegedy, 1996). The length of the difference of two sketches is about that of the
difference of their tensors, and the sketches of a tensor's parts add up to that of the whole.
"""

import functools

import torch

BINS = 256
CHUNK = 1 << 24  # numbers that are sketched at once
Place = tuple[tuple[int, ...], list[torch.Tensor]]  # shape of the whole, and the indices held along each dimension


@functools.lru_cache(maxsize=64)
def signs(size: int) -> torch.Tensor:
    """(size,): a 1 or -1 for each index, the same on each rank and in each version of torch."""
    x = torch.arange(1, size + 1)
    for _ in range(3):
        x = (x ^ (x >> 15)) * 0x2C1B3C6D % (1 << 32)
    return 1.0 - 2.0 * (x >> 16 & 1)


def sketch(stacked: torch.Tensor, index: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """(N, sum of min(n, BINS)) in float64: of N tensors, each the part `index` of a tensor of the global `shape`."""
    if stacked.is_complex():
        stacked, index, shape = torch.view_as_real(stacked), [*index, torch.arange(2)], (*shape, 2)
    stacked = (stacked.cpu() if stacked.device.type == "mps" else stacked).double()
    if not shape:
        return stacked.cpu().view(-1, 1)
    vectors = []
    for dim, size in enumerate(shape):
        rest = stacked
        for other in reversed(range(len(shape))):
            if other != dim:
                rest = torch.tensordot(rest, signs(shape[other])[index[other]].to(rest), dims=([other + 1], [0]))
        bins = torch.zeros(len(rest), min(size, BINS), dtype=torch.float64)
        vectors.append(bins.index_add_(1, index[dim] * bins.shape[1] // size, rest.cpu()))
    return torch.cat(vectors, dim=1)


def bounds_of(place: Place) -> tuple:
    """For each dimension (first, last + 1), and what tells parts with gaps apart. It identifies a part."""
    bounds = []
    for indices in place[1]:
        first, stop = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
        gaps = stop - first != len(indices)
        bounds.append((first, stop, int((indices * (indices + 7)).sum())) if gaps else (first, stop))
    return tuple(bounds)


def sketch_all(tensors: dict[str, torch.Tensor | None], places: dict[str, Place], keys: dict) -> tuple[dict, dict]:
    """name -> sketch, and name -> sum of squares; None and 0 where there is no tensor. `keys` are the bounds of places.

    Tensors of one shape are sketched together: thousands of small ones take as long as a few large ones.
    """
    alike: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device, places[name][0], keys[name]), []).append(name)
    vectors, squares = dict.fromkeys(tensors), dict.fromkeys(tensors, 0.0)
    for names in alike.values():
        shape, index = places[names[0]]
        count = max(1, CHUNK // max(1, tensors[names[0]].numel()))
        for some in (names[i : i + count] for i in range(0, len(names), count)):
            few = [tensors[name].detach() for name in some]
            stacked = few[0][None] if len(few) == 1 else torch.stack(few)
            if not stacked.is_complex() and stacked.element_size() < 4:
                stacked = stacked.float()
            norms = torch.linalg.vector_norm(stacked.flatten(1) if shape else stacked.view(-1, 1), dim=1).tolist()
            vectors |= zip(some, sketch(stacked, index, shape))
            squares |= zip(some, (norm**2 for norm in norms))
    return vectors, squares


def section(vector: torch.Tensor, shape: tuple, bounds: tuple) -> torch.Tensor:
    """The bins that only this part of a parameter fills: those of the dimension along which it is cut."""
    cut = [dim for dim, size in enumerate(shape) if bounds[dim] != (0, size)]
    if len(cut) != 1 or len(bounds[cut[0]]) > 2:
        return vector[:0] if cut else vector
    (start, stop), size = bounds[cut[0]], shape[cut[0]]
    bins, offset = min(size, BINS), sum(min(other, BINS) for other in shape[: cut[0]])
    return vector[offset - (-start * bins // size) : offset + stop * bins // size]


def factor(a: torch.Tensor, b: torch.Tensor, noise: float, floor: float = 0.0) -> float | None:
    """c where a is c times b but for noise: 1 where they differ by noise only, None where there is no such c."""
    if (a - b).norm() <= max(noise * b.norm(), floor):
        return 1.0
    c = float(a @ b / (b @ b)) if b.any() else 0.0
    rounding = 2e-6 if abs(c - 1) > 1e-3 else 0.0  # a norm may round to float32, whatever the dtype of the weights is
    if not c or (a - c * b).norm() > max(noise * a.norm(), rounding * a.norm(), floor):
        return None  # else without the digits that are noise. Clipping may add a difference of 1e-6
    return 1.0 if abs(c - 1) < 1e-5 else float(f"{c:.{6 if noise < 1e-5 else 4}g}")


def has_few_signs(a: torch.Tensor, b: torch.Tensor, shape: tuple, noise: float) -> bool:
    """Whether sketches of updates are the same but for two numbers, which may have gone the other way."""
    sizes, count = [min(size, BINS) for size in shape], torch.Size(shape).numel()
    if count < 16 or len(a) != sum(sizes):
        return False
    parts = [each.abs().sort().values for each in (a - b).split(sizes)]
    step = b.norm() / (len(shape) * count) ** 0.5
    return torch.cat([each[:-2] for each in parts]).norm() <= noise * b.norm() and all(
        each[-1] <= 5 * step for each in parts)
