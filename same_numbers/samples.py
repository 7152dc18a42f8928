"""What a rank reads: token ids, found where a model is given them, and digests that tell samples apart."""

import ctypes
import hashlib
import inspect
import re

import torch

NO_IDS = re.compile("pos|mask|label|target|type|seg|len|doc|cache")  # in names of arguments that are no token ids


def tensors(batch):
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)) or hasattr(batch, "values"):
        for each in batch.values() if hasattr(batch, "values") else batch:
            yield from tensors(each)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def token_ids(module: torch.nn.Module, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """(B, T), of the call of a model's first stage: `input_ids` or else the first argument, also in a list or a dict.
    Names are those of the innermost forward that has any. Later stages get numbers of a layer there: None."""
    def names_of(forward) -> list[str]:
        try:
            named = inspect.signature(forward).parameters.items()
        except (ValueError, TypeError):  # of what is no function of Python's
            return []
        return [name for name, each in named if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]

    while not (names := names_of(module.forward)) and (inner := next(module.children(), None)):
        module = inner
    given = dict(zip([*names, *map(str, range(len(args)))], args))
    return first_ids(given | {name: kwargs[name] for name in [*names, *kwargs] if name in kwargs})


def first_ids(given) -> torch.Tensor | None:
    if isinstance(given, torch.Tensor):
        is_integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        return given if is_integer and given.ndim > 1 else None
    if hasattr(given, "values"):
        known = given["input_ids"] if "input_ids" in given else None
        given = [known] if known is not None else [each for name, each in given.items() if not NO_IDS.search(str(name))]
    return next((first_ids(each) for each in given if next(tensors(each), None) is not None), None)


def digest(tensor: torch.Tensor) -> str:
    """Of the bytes of a CPU tensor, without numpy, which torch may come without."""
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    return hashlib.blake2b(ctypes.string_at(tensor.data_ptr(), size) if size else b"", digest_size=8).hexdigest()


def digests(batch) -> list[str]:
    """Of each sample: a row of a tensor, of a DTensor's part here, or of a nested tensor."""
    found = []
    for tensor in [own_part(each) for each in tensors(batch) if each.ndim]:
        rows = tensor.unbind() if tensor.is_nested else tensor.cpu().flatten(1 if tensor.ndim > 1 else 0)
        found += [f"{row.numel()}:{digest(row.cpu())}" for row in rows]
    return found


def number(value) -> float | None:
    """A loss or a norm as a Python number. A DTensor's summands are added first."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)
