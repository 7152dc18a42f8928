"""Optimizers as people have them: one, a list or dict of them, an object that holds some, a wrapper of any name."""

import itertools

import torch

NO_SETTINGS = {"params", "param_names", "initial_lr", "step", "rank", "world_size", "foreach", "fused", "capturable",
               "differentiable"}  # keys of a group that do not change what a step does


def optimizers(held) -> list:
    """Whatever has groups of parameters, an outer one before those that it holds."""
    found, seen, todo = [], set(), [(held, 0)]
    for each, depth in todo:
        if id(each) in seen or depth > 5:
            continue
        seen.add(id(each))
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple, set)) else ()
        if callable(getattr(each, "step", None)):
            found += [each] * isinstance(getattr(each, "param_groups", None), (list, tuple))
        if each is held or callable(getattr(each, "step", None)):
            inner = inner or [value for name, value in getattr(each, "__dict__", {}).items()
                              if name not in ("state", "param_groups", "defaults")]
        todo += [(value, depth + 1) for value in itertools.islice(inner, 10_000)]
    return found


def groups(found: list) -> tuple[list[dict], dict[int, int]]:
    """The groups in use, and id of a parameter -> the number of its group: the innermost optimizer's that has it."""
    everything = [group for each in found for group in each.param_groups]
    last = {id(param): i for i, group in enumerate(everything) for param in group["params"]}
    used = sorted({*last.values()})
    return [everything[i] for i in used], {key: used.index(i) for key, i in last.items()}


def settings(group: dict) -> dict[str, list[float]]:
    """Of a group, all that are numbers."""
    every = {key: value if isinstance(value, (tuple, list)) else [value] for key, value in group.items()}
    some = {key: [each for each in every[key] if each is not None] for key in every.keys() - NO_SETTINGS}
    return {key: [float(each) for each in values] for key, values in some.items() if values and all(
        isinstance(each, (int, float)) or isinstance(each, torch.Tensor) and each.numel() == 1 for each in values)}


def state_dtypes(found: list) -> set[str]:
    """In which optimizers keep what is as large as a parameter."""
    return {str(value.dtype)[6:] for each in found for state in getattr(each, "state", {}).values()
            if isinstance(state, dict) for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()}
