"""One rank under spmd_types: a program of any size, with a type on each tensor, in one process and without a message.

    with TypedRank({"dp": 4, "tp": 2}) as rank:  # rank 0 of a made-up group of 8
        rank.annotate(weight, {"tp": V})         # for all else it is R
        ...                                      # what does not fit is refused with a TypeRefused

A tensor has a type along each axis of the grid:

    R  the same on each rank of the axis, the gradient of each is a summand       its gradient's type is P
    I  the same on each rank, and so is the gradient                                                      I
    V  unlike: other numbers on each rank                                                                 V
    P  a summand: the sum over the ranks is meant                                                         R

spmd_types knows what operations do with types. What is added here, in annotations outside of the programs:

- An autograd Function of a program gets its types from what it does: which collectives its forward and its backward
  call (TYPES_OF). So a collective that is left out in a backward changes its types, though forward is right.
- A gradient gets the type that belongs to its weight's, when backward has it, and keeps it through hooks, buckets,
  sums and norms. At the optimizer, no gradient may be a summand still (check_gradients).
"""

import contextlib
import math
from unittest import mock

import torch
import torch.distributed as dist

try:
    import spmd_types as spmd
    import spmd_types.checker
    from spmd_types import I, P, R, V
except ImportError:
    raise ImportError("types for collectives need a package: pip install -c constraints.txt spmd_types") from None

TypeRefused = spmd.SpmdTypeError
GRADIENT = {R: P, I: R, V: V}  # of a weight of this type: a summand, the same on each rank, or unlike
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


def set_types(tensor: torch.Tensor, types: dict) -> torch.Tensor:
    """Gives a tensor these types, whatever it had."""
    if spmd.has_local_type(tensor):
        spmd.get_local_type(tensor).update(types)
        return tensor
    return spmd.assert_type(tensor, dict(types))


def copy(tensor: torch.Tensor, source: torch.Tensor, *args, original=torch.Tensor.copy_) -> torch.Tensor:
    """Tensor.copy_(): a copy has the type of what is copied."""
    with spmd.no_typecheck():
        original(tensor, source, *args)
    return set_types(tensor, spmd.get_local_type(source)) if spmd.has_local_type(source) else tensor


def size_changed(kind: str, before: torch.Tensor, after: torch.Tensor) -> str:
    """A sum of which a rank keeps a part is a reduce-scatter, and without a sum it is only the part."""
    is_part = before.dim() == after.dim() and after.numel() < before.numel()
    return {"all_reduce": "reduce_scatter", "": "part"}.get(kind, kind) if is_part else kind


class TypedRank(contextlib.ExitStack):
    """A context in which this process is rank 0 of a made-up group, and torch's operations are checked."""

    def __init__(self, axes: dict[str, int]):
        super().__init__()
        self.sizes, self.calls, self.weights, self.received = axes, {}, {}, {}  # calls: None where types are checked

    def __enter__(self) -> "TypedRank":
        global current
        super().__enter__()
        current = self
        self.enter_context(mock.patch("sys.excepthook"))  # which the next line replaces
        dist.init_process_group("fake", rank=0, world_size=math.prod(self.sizes.values()))
        self.callback(dist.destroy_process_group)
        sizes = [*self.sizes.values()]
        self.axes = {name: spmd.MeshAxis.of(size, math.prod(sizes[i + 1 :])) for i, (name, size) in enumerate(
            self.sizes.items()) if size > 1}
        self.enter_context(spmd.set_current_mesh(self.axes))
        self.originals = {name: getattr(dist, name) for name in (
            "all_reduce", "all_gather", "all_to_all_single", "batch_isend_irecv", "irecv", "recv")}
        self.enter_context(mock.patch.multiple(
            dist, get_backend=lambda group=None: "gloo", init_process_group=mock.Mock(), send=spmd.no_typecheck(dist.send),
            isend=(isend := spmd.no_typecheck(dist.isend)), **{name: getattr(self, name) for name in self.originals}))
        self.enter_context(mock.patch.multiple(dist.distributed_c10d, isend=isend, irecv=dist.irecv))  # for P2POp
        self.backward_of_torch = torch.autograd.backward
        self.register_hook_of_sum = torch.Tensor.register_post_accumulate_grad_hook
        self.enter_context(mock.patch.multiple(
            torch.Tensor, backward=lambda loss: self.backward(loss), copy_=copy,
            grad=property(torch.Tensor.grad.__get__, spmd.no_typecheck(torch.Tensor.grad.__set__)),
            view_as=lambda tensor, other: tensor.view(other.shape),  # of the other one, only the shape counts
            register_hook=self.hook_of_gradient(torch.Tensor.register_hook),
            register_post_accumulate_grad_hook=self.hook_of_sum(self.register_hook_of_sum)))
        self.enter_context(mock.patch("torch.autograd.backward", self.backward))
        clip = torch.nn.utils.clip_grads_with_norm_
        self.enter_context(mock.patch.multiple(
            torch.nn.utils, get_total_norm=self.total_norm, clip_grads_with_norm_=spmd.no_typecheck(clip)))
        return self

    # Types of tensors

    def axes_of(self, group: dist.ProcessGroup | None) -> list[spmd.MeshAxis]:
        whole = None if group is None else spmd.MeshAxis.of(group)
        return [axis for axis in self.axes.values() if whole is None or axis <= whole]

    def annotate(self, tensor: torch.Tensor, types: dict, default=R) -> torch.Tensor:
        """Gives a tensor its type along each axis, by the axes' names."""
        spmd.assert_type(tensor, {axis: types.get(name, default) for name, axis in self.axes.items()})
        return tensor

    def start(self, weights: dict[str, torch.nn.Parameter], types_of) -> None:
        """From here on, operations are checked. `weights` get the types that types_of(name) says."""
        for name, weight in weights.items():
            self.weights[weight] = name
            self.annotate(weight, types_of(name))
            self.register_hook_of_sum(weight, self.accumulate)
        for cls in functions():
            cls.typecheck_forward = classmethod(typed_apply)
            spmd.register_autograd_function(cls)
        self.calls = None
        self.enter_context(spmd.checker.typecheck(local=True))
        self.mode = torch.overrides._get_current_function_mode()

    def annotate_buffer(self, buffer: torch.Tensor, weights: list[torch.nn.Parameter]) -> None:
        """A flat buffer for the gradients of these weights."""
        for axis in self.axes.values():
            kinds = {GRADIENT[spmd.get_local_type(weight)[axis]] for weight in weights}
            set_types(buffer, {axis: kinds.pop() if len(kinds) == 1 else V})

    def named(self, text: str) -> str:
        """A message, with the axes' names."""
        for name, axis in self.axes.items():
            text = text.replace(repr(axis), name)
        return text

    def refuse(self, sentence: str) -> None:
        raise TypeRefused(sentence)

    def sum_up(self, tensor: torch.Tensor, group) -> None:
        """The types after an all-reduce. A flat buffer of gradients changes those of the gradients that lie in it."""
        inside = [weight.grad for weight in self.weights if weight.grad is not None and weight.grad is not tensor
                  and weight.grad.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()]
        for each in [tensor, *inside] if spmd.has_local_type(tensor) else inside:
            types = spmd.get_local_type(each)
            for axis in self.axes_of(group):
                if types.get(axis) in (R, I) and each.dim():  # a mean of equal numbers, for the log, is no fault
                    self.refuse(f"all_reduce over {axis} of what is the same on each rank, {types[axis].name}: the sum is "
                                "too large by their number")
                types[axis] = R

    # Collectives

    def note(self, kind: str, group) -> bool:
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

    def all_to_all_single(self, output, rows, output_sizes=None, input_sizes=None, group=None, async_op=False):
        """As if each rank sent the same rows. Types stay: V on this axis, what they are on others."""
        with spmd.no_typecheck():
            part = rows[: len(rows) // group.size() if input_sizes is None else input_sizes[group.rank()]]
            for each in output.split(output_sizes or len(output) // group.size()):
                each.copy_(part if each.shape == part.shape else torch.zeros_like(each))
        if not self.note("all_to_all", group):
            set_types(output, spmd.get_local_type(rows))

    def irecv(self, tensor, *args, **kwargs):
        """What another stage of a pipeline sends has the types `received`."""
        with spmd.no_typecheck():
            handle = self.originals["irecv"](tensor.zero_(), *args, **kwargs)
        if self.calls is None:
            self.annotate(tensor, self.received, V)
        return handle

    def recv(self, *args, **kwargs):
        self.irecv(*args, **kwargs).wait()

    def batch_isend_irecv(self, operations):
        self.note("messages", operations[0].group)
        with spmd.no_typecheck():
            return self.originals["batch_isend_irecv"](operations)

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

    @contextlib.contextmanager
    def noted(self):
        """The collectives that are called in this block: axis -> kind."""
        before, self.calls = self.calls, {}
        try:
            yield self.calls
        finally:
            self.calls = before

    def observe(self, cls: type, args: tuple) -> dict[spmd.MeshAxis, tuple[str, str]]:
        """What an autograd Function calls in forward and in backward, for each axis."""
        has_numbers = any(each.is_floating_point() for each in tensors_of(args))
        probes = [each.detach().clone().to(each.dtype if has_numbers else torch.float64)
                  if isinstance(each, torch.Tensor) else each for each in args]
        inputs = [each.requires_grad_() for each in tensors_of(probes) if each.is_floating_point()]
        probes = [each * 1 if any(each is other for other in inputs) else each for each in probes]  # g is in place
        with torch.enable_grad(), self.noted() as forward:
            output = cls.apply(*probes)
        with self.noted() as backward:
            gradients = torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)
        return {axis: (size_changed(forward.get(axis, ""), inputs[0], output),
                       size_changed(backward.get(axis, ""), output, gradients[0])) for axis in {**forward, **backward}}

    def apply(self, cls: type, args: tuple):
        """Applies it, and gives its output types. Raises TypeRefused where an input has another type than it needs."""
        inputs = [each for each in tensors_of(args) if each.is_floating_point()] or tensors_of(args)
        types = {}
        observed = self.observe(cls, args)
        for axis in self.axes.values():
            calls = observed.get(axis, ("", ""))
            given = {spmd.get_local_type(each).get(axis) for each in inputs}
            found = {V} if given == {R, V} else given
            if len(found) > 1 or None in found:
                self.refuse(f"{cls.__name__}: inputs of the types {given} on axis {axis} do not fit")
            (one,) = found
            if calls == ("", ""):
                types[axis] = one
                continue
            if calls not in TYPES_OF:
                self.refuse(f"{cls.__name__}: {calls[0] or 'nothing'} in forward and {calls[1] or 'nothing'} in "
                            f"backward on axis {axis} are no pair")
            needed, types[axis] = TYPES_OF[calls]
            is_number = inputs[0].is_floating_point()  # what has no gradient is R and I at once
            if one is not needed and (one, needed) != (V, P) and (is_number or {one, needed} != {R, I}):
                self.refuse(f"{cls.__name__}: {calls[0] or 'nothing'} in forward and {calls[1] or 'nothing'} in "
                            f"backward need an input of type {needed} on axis {axis}, but it is {one}")
        with self.noted():
            output = cls.apply(*args)
        return set_types(output, types)

    # Gradients

    def backward(self, loss, *args, **kwargs) -> None:
        """Backward from a loss, or from an output with a gradient. What runs in it is no forward: only hooks are
        checked. A loss that is V or P is a summand; one that is R would be one, too, as often as there are ranks."""
        for axis in self.axes.values():
            if not args and spmd.get_local_type(loss).get(axis) is R:
                self.refuse(f"backward: the loss is Replicate on axis {axis}: each rank's gradient of 1 would be a "
                            "summand")
        self.complete = set()
        with spmd.no_typecheck(), self.noted():
            self.backward_of_torch(loss, *args, **kwargs)

    def gradient_types(self, weight: torch.nn.Parameter) -> dict:
        return {axis: GRADIENT[each] for axis, each in spmd.get_local_type(weight).items()}

    def accumulate(self, weight: torch.nn.Parameter) -> None:
        """Gives weight.grad its type when backward has added to it: summands may be added to summands only."""
        if weight in self.complete:
            return
        self.complete.add(weight)
        arriving = vars(weight).pop("arriving", None) or self.gradient_types(weight)
        for axis, before in spmd.get_local_type(weight.grad).items():
            if before is not arriving[axis]:
                self.refuse(f"gradient of {self.weights[weight]}: {arriving[axis]} on axis {axis} is added to {before}")
        set_types(weight.grad, arriving)

    @contextlib.contextmanager
    def checked(self):
        """Operations are checked in this block. While backward runs, torch has taken the mode away."""
        before, self.calls = self.calls, None
        with spmd.checker.typecheck(), self.mode:
            yield
        self.calls = before

    def hook_of_sum(self, register):
        """register_post_accumulate_grad_hook(), with hooks in which operations are checked."""
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
        """register_hook(), with hooks in which operations are checked. They get a gradient of the weight's type."""
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

    def total_norm(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """In place of torch.nn.utils.get_total_norm(): V where a rank has parts of its own."""
        kinds = {axis: {spmd.get_local_type(each)[axis] for each in tensors} for axis in self.axes.values()}
        for axis, found in kinds.items():
            if P in found:
                self.refuse(f"the norm of gradients of which one is still a summand on axis {axis}")
        return set_types(torch.ones(()), {axis: V if V in found else R for axis, found in kinds.items()})

    def check_gradients(self) -> None:
        """What the optimizer gets: of equal weights equal gradients, of unlike ones their own."""
        for weight, name in self.weights.items():
            for axis, kind in spmd.get_local_type(weight).items():
                gradient = kind if weight.grad is None else spmd.get_local_type(weight.grad).get(axis)
                if (gradient is V) != (kind is V) or gradient is P:
                    self.refuse(f"gradient of {name}: {gradient} on axis {axis} when the optimizer takes it, and the "
                                f"weight is {kind}: " + ("a sum over the ranks is missing" if gradient is P else
                                                         "it is not that of this weight"))
