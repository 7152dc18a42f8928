"""One rank under spmd_types: a program of any size, with types on its tensors, in one process and without a message.

    with alone(0, 8).joined(), TypedRank({"dp": 4, "tp": 2}) as rank:  # rank 0 of a made-up group of 8
        rank.start({"up": up}, lambda name: {"tp": V})  # the weights' types; where nothing is said it is R
        ...                                             # what does not fit is refused with a TypeRefused

A tensor has a type along each axis of the grid, as in docs/TYPES.md: R and I are the same on each rank (of R, each
rank's gradient is a summand), V is unlike, and P is a summand. spmd_types knows what operations do with types. Here is
what else our programs need, outside of them:

- An autograd Function gets its types from what it does: which collectives its forward and its backward call (TYPES_OF).
  So one that is left out in a backward changes the types, though forward is right.
- Collectives are stood in for, and messages arrive as zeros: only types are looked at, no numbers.
- A gradient keeps its type until the optimizer takes it (typed_gradients.py).
"""

import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from lab.rank_alone import EndOfStep
from lab.watch.typed_gradients import I, P, R, TypedGradients, TypeRefused, V, set_types, spmd

__all__ = ["I", "P", "R", "TypedRank", "TypeRefused", "V", "set_types", "spmd"]
TYPES_OF = {  # what forward calls, what backward calls -> the types of the input and of the output
    ("", "all_reduce"): (I, R), ("all_reduce", ""): (P, I), ("all_reduce", "all_reduce"): (P, R),
    ("all_gather", "reduce_scatter"): (V, R), ("reduce_scatter", "all_gather"): (P, V),
    ("all_gather", "part"): (V, I), ("part", "all_gather"): (I, V),
    ("all_to_all", "all_to_all"): (V, V), ("messages", "messages"): (V, V),
}
current: "TypedRank | None" = None


def typed_apply(cls: type, *args):
    return current.apply(cls, args)


def functions(cls: type = torch.autograd.Function) -> list[type]:
    """All autograd Functions but those of libraries."""
    found = [each for below in cls.__subclasses__() for each in (below, *functions(below))]
    return [each for each in found if each.__module__.split(".")[0] not in ("torch", "spmd_types")]


def tensors_of(args) -> list[torch.Tensor]:
    return [each for each in args if isinstance(each, torch.Tensor)]


def copy(tensor: torch.Tensor, source: torch.Tensor, *args, original=torch.Tensor.copy_) -> torch.Tensor:
    """Tensor.copy_(): a copy has the type of what is copied."""
    with spmd.no_typecheck():
        original(tensor, source, *args)
    return set_types(tensor, spmd.get_local_type(source)) if spmd.has_local_type(source) else tensor


def kind_of(call: str, before: torch.Tensor, after: torch.Tensor) -> str:
    """A sum of which a rank keeps a part is a reduce-scatter, and without a sum it is only the part."""
    is_part = before.dim() == after.dim() and after.numel() < before.numel()
    return {"all_reduce": "reduce_scatter", "": "part"}.get(call, call) if is_part else call


class TypedRank(TypedGradients):
    """A context in which this process is rank 0 of a grid with these axes, the outermost first. From start() on, types
    are checked."""

    def __init__(self, axes: dict[str, int]):
        super().__init__()
        sizes = [*axes.values()]
        self.axes = {name: spmd.MeshAxis.of(size, math.prod(sizes[i + 1 :])) for i, (name, size) in enumerate(
            axes.items()) if size > 1}
        self.calls, self.weights = {}, {}
        self.received: dict = {}  # the types, by axis, of what another stage of a pipeline sends; elsewhere V

    def __enter__(self) -> "TypedRank":
        global current
        super().__enter__()
        current = self
        dist.init_process_group("gloo")
        self.enter_context(spmd.set_current_mesh(self.axes))
        self.originals = {name: getattr(dist, name) for name in (
            "all_reduce", "all_gather", "all_to_all_single", "irecv", "recv")}
        self.enter_context(mock.patch.multiple(
            dist, isend=spmd.no_typecheck(dist.isend), send=spmd.no_typecheck(dist.send),
            **{name: getattr(self, name) for name in self.originals},
            **{name: self.reduce_scatter for name in dir(dist) if name.startswith("reduce_scatter")}))
        self.enter_context(mock.patch.multiple(
            torch.nn.utils, get_total_norm=self.total_norm,
            clip_grads_with_norm_=spmd.no_typecheck(torch.nn.utils.clip_grads_with_norm_)))
        self.backward_of_torch = torch.autograd.backward
        self.enter_context(mock.patch("torch.autograd.backward", self.backward))
        after_sum, grad = torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.grad
        self.enter_context(mock.patch.multiple(
            torch.Tensor, backward=lambda loss: self.backward(loss), copy_=copy,
            grad=property(grad.__get__, spmd.no_typecheck(grad.__set__)),
            view_as=lambda tensor, other: tensor.view(other.shape),  # of the other one, only the shape counts
            register_hook=self.hook_of_gradient(torch.Tensor.register_hook),
            register_post_accumulate_grad_hook=self.hook_of_sum(after_sum)))
        return self

    def start(self, weights: dict[str, torch.nn.Parameter], types_of) -> None:
        """From here on types are checked. `weights` get those that types_of(name) says."""
        for name, weight in weights.items():
            self.weights[weight] = name
            self.annotate(weight, types_of(name))
            weight.register_post_accumulate_grad_hook(lambda weight: None)
        for cls in functions():
            cls.typecheck_forward = classmethod(typed_apply)
            spmd.register_autograd_function(cls)
        self.calls = None
        self.enter_context(spmd.checker.typecheck(local=True))
        self.mode = torch.overrides._get_current_function_mode()

    def annotate(self, tensor: torch.Tensor, types: dict, default=R) -> torch.Tensor:
        """Gives a tensor its type along each axis, by the axes' names."""
        return spmd.assert_type(tensor, {axis: types.get(name, default) for name, axis in self.axes.items()})

    def named(self, text: str) -> str:
        """A refusal in the axes' names, and without what spmd_types says of itself."""
        for name, axis in self.axes.items():
            text = text.replace(repr(axis), name)
        return text.replace("PerMeshAxisLocalSpmdType.", "").partition("\n\nSet SPMD_TYPES")[0]

    def refusal(self, program: Callable[[], object]) -> str:
        """What is refused of a program, "" where nothing is before it ends itself in front of its optimizer."""
        try:
            program()
        except TypeRefused as error:
            return self.named(str(error))
        except EndOfStep:
            return ""
        raise AssertionError("the program has ended before its optimizer")

    def axes_of(self, group: dist.ProcessGroup | None) -> list[spmd.MeshAxis]:
        return [axis for axis in self.axes.values() if group is None or axis <= spmd.MeshAxis.of(group)]

    # Collectives

    def note(self, kind: str, group: dist.ProcessGroup | None) -> bool:
        """Inside of an autograd Function a call is noted, and changes no types."""
        if self.calls is not None:
            for axis in self.axes_of(group):
                self.calls.setdefault(axis, kind)
        return self.calls is not None

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not self.note("all_reduce", group):
            self.sum_up(tensor, group)
        with spmd.no_typecheck():
            return self.originals["all_reduce"](tensor, op, group=group, async_op=async_op)

    def all_gather(self, tensors, tensor, group=None, async_op=False):
        self.note("all_gather", group)
        with spmd.no_typecheck():
            return self.originals["all_gather"](tensors, tensor, group=group, async_op=async_op)

    def reduce_scatter(self, output, tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
        """In each of its forms. Only its types count, and these a Function has, so it leaves `output` as it is."""
        self.note("reduce_scatter", group)

    def all_to_all_single(self, output, rows, output_sizes=None, input_sizes=None, group=None, async_op=False):
        """As if each rank sent the same rows."""
        with spmd.no_typecheck():
            part = rows[: len(rows) // group.size() if input_sizes is None else input_sizes[group.rank()]]
            for each in output.split(output_sizes or len(output) // group.size()):
                each.copy_(part if each.shape == part.shape else torch.zeros_like(each))
        if not self.note("all_to_all", group):
            for axis in self.axes_of(group):
                if (kind := spmd.get_local_type(rows).get(axis)) is not V:
                    self.refuse(f"all_to_all over {axis}: rows of type {kind}, where each rank has its own, V")
            set_types(output, spmd.get_local_type(rows))

    def irecv(self, tensor, src=None, group=None, *args, **kwargs):
        with spmd.no_typecheck():
            handle = self.originals["irecv"](tensor.zero_(), src, group, *args, **kwargs)
        if not self.note("messages", group):
            self.annotate(tensor, self.received, V)
        return handle

    def recv(self, *args, **kwargs) -> None:
        self.irecv(*args, **kwargs).wait()

    def replace(self, module, kind: str, group_of) -> None:
        """A function of a program that is named as the collective is, and made of messages. group_of(): its group."""
        original = getattr(module, kind)

        def typed(tensor, *args):
            if not self.note(kind, group_of()) and kind == "all_reduce":
                self.sum_up(tensor, group_of())
            with spmd.no_typecheck():
                return original(tensor, *args)

        setattr(module, kind, typed)

    # Autograd Functions

    def observe(self, cls: type, args: tuple) -> dict[spmd.MeshAxis, tuple[str, str]]:
        """What an autograd Function calls in forward and in backward, on the axes where it calls anything."""
        has_numbers = any(each.is_floating_point() for each in tensors_of(args))
        probes = [each.detach().clone().to(each.dtype if has_numbers else torch.float64)
                  if isinstance(each, torch.Tensor) else each for each in args]
        inputs = [each.requires_grad_() for each in tensors_of(probes) if each.is_floating_point()]
        probes = [each * 1 if any(each is other for other in inputs) else each for each in probes]  # g is in place
        with torch.enable_grad(), self.noted() as forward:
            output = cls.apply(*probes)
        with self.noted() as backward:
            gradient, *_ = torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
        return {axis: (kind_of(forward.get(axis, ""), inputs[0], output),
                       kind_of(backward.get(axis, ""), output, gradient)) for axis in {**forward, **backward}}

    def apply(self, cls: type, args: tuple) -> torch.Tensor:
        """Applies it, and gives its output types. Raises TypeRefused where an input has another type than it needs."""
        inputs = [each for each in tensors_of(args) if each.is_floating_point()]
        has_gradient, inputs = bool(inputs), inputs or tensors_of(args)
        observed, types = self.observe(cls, args), {}
        for axis in self.axes.values():
            given = {spmd.get_local_type(each).get(axis) for each in inputs}
            one, *others = {V} if given == {R, V} else given
            if others or one is None:
                self.refuse(f"{cls.__name__}: inputs of types {given} on axis {axis} do not fit")
            if axis not in observed:
                types[axis] = one
                continue
            words = "{} in forward and {} in backward".format(*(call or "nothing" for call in observed[axis]))
            if observed[axis] not in TYPES_OF:
                self.refuse(f"{cls.__name__} on axis {axis}: {words} are no pair")
            needed, types[axis] = TYPES_OF[observed[axis]]
            is_summand = (one, needed) == (V, P)
            is_alike_in_forward = not has_gradient and {one, needed} == {R, I}
            if one is not needed and not is_summand and not is_alike_in_forward:
                self.refuse(f"{cls.__name__} on axis {axis}: {words} take {needed.name} and give {types[axis].name}, "
                            f"but the input is {one.name}")
        with self.noted():
            return set_types(cls.apply(*args), types)
