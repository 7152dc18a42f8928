"""Numbers as the optimizer sees them: gradients and weights, whole ones out of shards, and same_numbers' recordings."""

import contextlib
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

import same_numbers
from lab.watch import Watch


@contextlib.contextmanager
def hooked(*hooks) -> Iterator[None]:
    """Inside of the block these hooks are there."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Numbers(Watch):
    """`gradients` that the optimizer saw, and `weights` after its step: of each rank a list, an entry a step, by the
    parameter's name."""

    places = ("threads", "processes")

    def __init__(self):
        self.gradients: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)
        self.weights: dict[int, list[dict[str, torch.Tensor]]] = defaultdict(list)

    def around(self, ranks) -> contextlib.AbstractContextManager:
        def note(records: dict, what: str, optimizer: torch.optim.Optimizer) -> None:
            group = optimizer.param_groups[0]
            with _disable_current_modes():  # what is kept here is not the program's: Memory does not count it
                records[dist.get_rank()].append({name.removeprefix("module."): getattr(param, what).detach().clone()
                                                 for name, param in zip(group["param_names"], group["params"])
                                                 if getattr(param, what) is not None})

        return hooked(register_optimizer_step_pre_hook(lambda optimizer, *_: note(self.gradients, "grad", optimizer)),
                      register_optimizer_step_post_hook(lambda optimizer, *_: note(self.weights, "data", optimizer)))


class WholeNumbers(Watch):
    """Numbers of the whole model where ranks divide it over dp ranks, too, which put them together for that.

    `of[rank]`: parameters before the first step ("initial") and after the last one ("final"), the gradients that the
    first step uses ("grads"), the rank's "place" in the grid, and the most micro-batches whose activations it held
    ("peak", None without a pipeline). "gap" is how near the choice of experts came to a tie, None without experts.
    """

    places = ("threads", "processes")
    apart = {"memory": "it would count what is put together"}

    def __init__(self):
        self.of: dict[int, dict] = {}
        self._wrappers, self._readers, self._gaps = {}, {}, defaultdict(list)

    def around(self, ranks) -> contextlib.AbstractContextManager:
        return hooked(register_optimizer_step_pre_hook(self.before_step), register_module_forward_hook(self.after))

    def after(self, module: torch.nn.Module, _args, output) -> None:
        """After each module's forward: finds what wraps the model for data parallelism, and looks at routers.

        A choice jumps where two values are equal. Rounding, which differs between runs, must not decide any: kept is
        the smallest gap between the value of the k-th expert and that of the next one. Without a bias, experts are
        chosen by their logits, of which scores are softmax: logarithms differ as these do.
        """
        if any(each.__name__ == "DataParallelBucket" for each in type(module).__mro__):
            self._wrappers[dist.get_rank()] = module
        if type(module).__name__ == "Router" and module.k < output[0].size(-1):
            scores, bias = output[0].detach(), module.bias_of_choice
            values = scores + bias if torch.is_tensor(bias) and bias.any() else scores.log()
            values = values.topk(module.k + 1).values
            self._gaps[dist.get_rank()].append((values[..., -2] - values[..., -1]).min().item())

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Only the first step counts."""
        rank = dist.get_rank()
        if rank in self.of or "param_names" not in optimizer.param_groups[0]:  # it is only timed
            return
        group, wrapper = optimizer.param_groups[0], self._wrappers.get(rank)
        if any(getattr(each, "shard", None) is group["params"][0] for each in getattr(wrapper, "buckets", ())):
            self._readers[rank] = lambda what: from_shards(wrapper, what)
        else:
            module = wrapper and getattr(wrapper.module, "model", wrapper.module)  # of step 9's stage
            params = dict(module.named_parameters() if wrapper else zip(
                (name.removeprefix("module.") for name in group["param_names"]), group["params"]))
            self._readers[rank] = lambda what: {name: read(param, what).clone() for name, param in params.items()}
        self.of[rank] = {"initial": self._readers[rank]("data"), "grads": self._readers[rank]("grad")}

    def end(self, modules, rank: int) -> None:
        grid = modules.process_group_manager.process_group_manager
        if rank not in self.of:  # it has no optimizer: a generator of step 19
            return
        self.of[rank] |= {"final": self._readers.pop(rank)("data"), "gap": min(self._gaps[rank], default=None),
                          "peak": getattr(self._wrappers.pop(rank, None), "peak_live_activations", None),
                          "place": {"dp": grid.dp_rank, "pp": grid.pp_rank, "tp": grid.tp_rank}}


def read(param: torch.Tensor, what: str) -> torch.Tensor:
    return getattr(param, what).detach()


def part_of(wrapper: torch.nn.Module, param: torch.Tensor, what: str) -> torch.Tensor:
    """This rank's part of a parameter ("data") or its gradient ("grad") which ZeRO divides, in the parameter's shape.

    A bucket's parameters lie one behind the other, and its shards, too, in the order of ranks: a shard begins and ends
    inside of a parameter. Numbers of other ranks are zeros here, so all parts add up to the whole.
    """
    bucket = wrapper.bucket_of[param]
    start = param.storage_offset() - sum(bucket.sizes[: bucket.group.rank()])  # seen from the shard
    part = read(bucket.shard, what)[max(start, 0) : max(start + param.numel(), 0)]
    full = part.new_zeros(param.numel())
    full[max(-start, 0) :][: len(part)] = part
    return full.view(param.shape)


def from_shards(wrapper: torch.nn.Module, what: str) -> dict[str, torch.Tensor]:
    """The whole weights or gradients, which all dp ranks put together from all shards. Where ranks hold whole weights
    as well, these are read: they have to be equal on all ranks."""
    whole = {}
    for name, param in wrapper.module.named_parameters():
        if what == "data" and param.untyped_storage().nbytes():
            whole[name] = param.detach().clone()
        else:
            dist.all_reduce(part := part_of(wrapper, param, what), group=wrapper.bucket_of[param].group)
            whole[name] = part
    return whole


def variable(name: str):
    """The local variable of this name in the innermost function of a train.py that is running, None without it."""
    frame = sys._getframe(1)
    while frame and not (pathlib.Path(frame.f_code.co_filename).name.startswith("train.py") and name in frame.f_locals):
        frame = frame.f_back
    return frame and frame.f_locals[name]


class SameNumbers(Watch):
    """Records the first `steps` optimizer steps into `folder`, for same_numbers.compare(), as a Recorder in train.py
    would: with its variables `model`, `loss` and `grad_norm`."""

    places = ("threads", "processes")
    apart = {"memory": "it would count what is recorded"}

    def __init__(self, folder, steps: int = 3):
        self.folder, self.steps = str(folder), steps
        self._recorders: dict[int, same_numbers.Recorder] = {}

    def begin(self, modules, rank: int) -> None:
        """From the call of make_scheduler() on, when all is set up."""
        make_scheduler = modules.utils.make_scheduler

        def record_and_make(optimizer, *args):
            self._recorders[rank] = self.recorder(variable("model"), optimizer, modules)
            return make_scheduler(optimizer, *args)

        modules.utils.make_scheduler = record_and_make

    def recorder(self, model: torch.nn.Module, optimizer, modules) -> same_numbers.Recorder:
        """Each tp rank has the gradient of what all hold whole, so it gives a part of that."""
        split = {getattr(each, name) for each in model.modules() for name in getattr(each, "tp_dims", ())}
        grid = modules.process_group_manager.process_group_manager
        tp_size = getattr(grid, "tp_world_size", 1)

        def summand(param: torch.Tensor) -> torch.Tensor:
            return part_of(model, param, "grad") / (1 if param in split else tp_size)

        return same_numbers.Recorder(getattr(model, "module", model), optimizer, self.folder, steps=self.steps,
                                     gradient=summand if hasattr(model, "level") else None,
                                     group=getattr(grid, "grid_group", None))

    def around(self, ranks) -> contextlib.AbstractContextManager:
        return hooked(register_optimizer_step_pre_hook(lambda *_: self._recorders[dist.get_rank()].step(
            norm=variable("grad_norm"), loss=variable("loss"))))
