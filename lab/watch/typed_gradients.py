"""Types after the graph: those of gradients, from backward through hooks, buckets, sums and norms to the optimizer.

A gradient gets the type that belongs to its weight's when backward adds to it:

    the weight is R: each rank's gradient is a summand, P      I: the same on each rank, R      V: the rank's own, V

Summands may be added to summands only, an all-reduce makes R of P, and the optimizer may take no P.
"""

import contextlib

import torch
import torch.distributed as dist

try:
    import spmd_types as spmd
    import spmd_types.checker
    from spmd_types import I, P, R, V
except ImportError:
    raise ImportError("types for collectives need a package of their own: pip install -c constraints.txt "
                      "spmd_types") from None

GRADIENT = {R: P, I: R, V: V}
TypeRefused = spmd.SpmdTypeError


def set_types(tensor: torch.Tensor, types: dict) -> torch.Tensor:
    """Gives a tensor these types, whatever it had."""
    if spmd.has_local_type(tensor):
        spmd.get_local_type(tensor).update(types)
        return tensor
    return spmd.assert_type(tensor, dict(types))


class TypedGradients(contextlib.ExitStack):
    """What TypedRank knows of gradients. `weights` are the model's, and `calls` is None where types are checked."""

    weights: dict[torch.nn.Parameter, str]
    calls: dict | None
    axes: dict[str, spmd.MeshAxis]
    complete: set[torch.nn.Parameter]  # those to which this backward has added

    def refuse(self, sentence: str) -> None:
        raise TypeRefused(sentence)

    def gradient_types(self, weight: torch.nn.Parameter) -> dict:
        return {axis: GRADIENT[each] for axis, each in spmd.get_local_type(weight).items()}

    @contextlib.contextmanager
    def noted(self):
        """In this block collectives are noted, axis -> kind, and change no types."""
        before, self.calls = self.calls, {}
        try:
            yield self.calls
        finally:
            self.calls = before

    @contextlib.contextmanager
    def checked(self):
        """In this block, a hook of backward, operations are checked: torch has taken the mode away for backward."""
        before, self.calls = self.calls, None
        try:
            with spmd.checker.typecheck(), self.mode:
                yield
        finally:
            self.calls = before

    def backward(self, loss: torch.Tensor, *args, **kwargs) -> None:
        """In place of torch.autograd.backward(). A loss that is V is a summand; one that is R would be added up as
        often as there are ranks."""
        for axis in self.axes.values():
            if not args and spmd.get_local_type(loss).get(axis) is R:
                self.refuse(f"the loss is R on axis {axis}: each rank's gradient of 1 would count as a summand")
        self.complete = set()
        with spmd.no_typecheck(), self.noted():
            self.backward_of_torch(loss, *args, **kwargs)

    def accumulate(self, weight: torch.nn.Parameter) -> None:
        """Gives weight.grad its type, when backward has added to it."""
        if weight in self.complete:
            return
        self.complete.add(weight)
        arriving = vars(weight).pop("arriving", None) or self.gradient_types(weight)
        for axis, before in spmd.get_local_type(weight.grad).items():
            if before is not arriving[axis]:
                self.refuse(f"gradient of {self.weights[weight]}: {arriving[axis].name} is added to {before.name} on "
                            f"axis {axis}: what is summed already and what is not")
        set_types(weight.grad, arriving)

    def hook_of_sum(self, register):
        """register_post_accumulate_grad_hook(), whose hooks are checked."""
        def registered(weight, hook):
            def typed(weight):
                if weight not in self.weights:
                    return hook(weight)
                self.accumulate(weight)
                with self.checked():
                    return hook(weight)
            return register(weight, typed)
        return registered

    def hook_of_gradient(self, register):
        """register_hook(), whose hooks are checked. They get a gradient of the weight's type."""
        def registered(weight, hook):
            def typed(gradient):
                if weight not in self.weights:
                    return hook(gradient)
                with self.checked():
                    result = hook(set_types(gradient, self.gradient_types(weight)))
                weight.arriving = None if result is None else dict(spmd.get_local_type(result))
                return result
            return register(weight, typed)
        return registered

    def annotate_buffer(self, buffer: torch.Tensor, weights: list[torch.nn.Parameter]) -> None:
        """A flat buffer for the gradients of these weights."""
        for axis in self.axes.values():
            kinds = {self.gradient_types(weight)[axis] for weight in weights}
            set_types(buffer, {axis: kinds.pop() if len(kinds) == 1 else V})

    def sum_up(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """The types after an all-reduce, of the tensor and of the gradients that lie in it."""
        storage = tensor.untyped_storage().data_ptr()
        inside = [weight.grad for weight in self.weights if weight.grad is not None and weight.grad is not tensor
                  and weight.grad.untyped_storage().data_ptr() == storage]
        for each in [tensor, *inside] if spmd.has_local_type(tensor) else inside:
            types = spmd.get_local_type(each)
            for axis in self.axes_of(group):
                if types.get(axis) in (R, I) and each.dim():  # of a number for the log, the mean may be taken
                    self.refuse(f"all_reduce over {axis} of what is the same on each rank, {types[axis].name}: the sum "
                                "is too large by their number")
                types[axis] = R

    def total_norm(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """In place of torch.nn.utils.get_total_norm(): V where a rank has parts of its own."""
        found = {axis: {spmd.get_local_type(each)[axis] for each in tensors} for axis in self.axes.values()}
        return set_types(torch.ones(()), {axis: V if V in kinds else R for axis, kinds in found.items()})

    def check_norm(self, norm: torch.Tensor) -> torch.Tensor:
        for axis, kind in spmd.get_local_type(norm).items():
            if kind in (V, P):
                self.refuse(f"the gradient norm is {kind.name} on axis {axis}: other ranks clip by another one")
        return norm

    def check_gradients(self) -> None:
        """What the optimizer gets: of equal weights equal gradients, of unlike ones their own."""
        for weight, name in self.weights.items():
            for axis, kind in spmd.get_local_type(weight).items():
                gradient = kind if weight.grad is None else spmd.get_local_type(weight.grad).get(axis)
                if gradient is P:
                    self.refuse(f"gradient of {name}: still a summand, P, on axis {axis} when the optimizer takes it")
                if (gradient is V) != (kind is V):
                    self.refuse(f"gradient of {name}: {gradient.name} on axis {axis}, where the weight is {kind.name}")
