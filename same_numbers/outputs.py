"""Outputs of chosen modules, and the gradients at them, sample by sample: they show where a wrong number comes from."""

import fnmatch
import functools
import types

import torch

from . import frameworks
from .samples import own_part, tensors
from .sketches import bounds_of, sketch


class Outputs:
    """Of the modules that `chosen` names. `found`, in the order of their calls: name -> `shape` of a sample, `bounds`
    of the part of it that this rank has, and of `output` and `gradient` a row a sample (NaN where there is none)."""

    def __init__(self, models: list, chosen, tokens):
        everything = {}
        for model in models:
            renamed = frameworks.renamer(model)
            everything |= {renamed(name): each for name, each in model.named_modules()}
        names = [name for name in everything if name]
        patterns = blocks(names) if chosen == "blocks" else chosen
        self.modules = {name: everything[name] for name in names
                        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        if chosen and names and not self.modules:
            raise ValueError(f"modules={chosen!r} names none of the model's: use some such as {names[-1]!r}")
        self.tokens = tokens and (torch.as_tensor(list(tokens[0])), tokens[1])
        self.forget()

    def forget(self) -> None:
        self.found, self.samples = {}, set()  # `samples`: how many go forward, of a DTensor on all ranks, too

    def begin(self, ids: torch.Tensor | None) -> None:
        """With the forward of a micro-batch of these token ids."""
        self.samples = set() if ids is None else {ids.size(0), own_part(ids).size(0)}

    def add(self, name: str, output, at_output) -> None:
        """Of a micro-batch's forward; at_output is add_gradient(). What is computed again in backward is left out."""
        whole = next((each for each in tensors(output) if each.is_floating_point()), None)
        is_again = getattr(torch._C, "_current_graph_task_id", lambda: -1)() >= 0  # in backward. The name may go
        if is_again or not torch.is_grad_enabled():
            return
        if whole is None or whole.ndim < 2 or whole.is_meta or whole.is_nested:
            return
        shape, index = frameworks.placed(whole)
        like, placements = types.SimpleNamespace(), getattr(whole, "placements", ())
        if placements and not any(each.is_partial() for each in placements):
            like.placements = placements
        sample_dim = int(bool(self.samples) and shape[0] not in self.samples)  # Megatron has tokens before samples
        if self.samples and shape[sample_dim] not in self.samples:
            return
        shape, index = ([each for dim, each in enumerate(both) if dim != sample_dim] for both in (shape, index))
        if self.tokens and shape and shape[0] == len(self.tokens[0]) == len(index[0]):
            index[0], shape[0] = self.tokens
        place = tuple(shape), index
        rows = sketch(frameworks.local(whole, like).movedim(sample_dim, 0), index, place[0])
        bounds = bounds_of(place)
        kept = self.found.setdefault(name, {"shape": place[0], "bounds": bounds, "output": [], "gradient": []})
        if kept["bounds"] != bounds:
            return  # a number of tokens that is not the same in each micro-batch
        kept["output"] += rows
        kept["gradient"] += torch.full_like(rows, torch.nan)
        if whole.requires_grad:
            first = len(kept["output"]) - len(rows)
            whole.register_hook(functools.partial(at_output, kept["gradient"], first, sample_dim, place, like))

    @staticmethod
    def add_gradient(rows: list, first: int, sample_dim: int, place: tuple, like, gradient: torch.Tensor) -> None:
        found = sketch(frameworks.local(gradient, like).movedim(sample_dim, 0), place[1], place[0])
        rows[first : first + len(found)] = found

    def packed(self) -> dict:
        return {name: {**kept, **{key: torch.stack(kept[key]) for key in ("output", "gradient")}}
                for name, kept in self.found.items() if kept["output"]}


def blocks(names: list[str]) -> list[str]:
    """Of a model's modules the numbered ones, such as its layers, the parts of these, and what is outside of them."""
    words = {name: name.split(".") for name in names}
    depth = {name: next((i for i, word in enumerate(each, 1) if word.isdigit()), 0) for name, each in words.items()}
    holders = {".".join(words[name][:i]) for name in names for i in range(depth[name])}  # these have layers in them
    return [name for name in names if (len(words[name]) in (depth[name], depth[name] + 1) if depth[name] else
                                       name not in holders and name.rpartition(".")[0] in holders | {""})]
