"""Step 13: weights that exist for as long as a layer computes (FSDP)."""

import contextlib
import math

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attempt import Wrong
from catalogue import exercise

LAYERS = 4


class Watch:
    """Looks at the units of one rank: the peak of what is gathered, and how many gathers nothing hides."""

    def __init__(self, unit_class: type):
        self.units, self.peak, self.late = [], 0, 0
        init, start, gather = unit_class.__init__, unit_class.start_gather, unit_class.gather

        def noted_init(unit, *args):
            init(unit, *args)
            self.units.append(unit)

        def noted_start(unit):
            start(unit)
            self.peak = max(self.peak, sum(each.weights.untyped_storage().nbytes() for each in self.units))

        def noted_gather(unit):
            self.late += unit.weights.untyped_storage().nbytes() == 0
            gather(unit)

        unit_class.__init__, unit_class.start_gather, unit_class.gather = noted_init, noted_start, noted_gather


@contextlib.contextmanager
def no_freed_weights():
    """Raises Wrong before a module computes with weights that are freed, which would end the whole process."""
    names = {}

    def check(module, what: str) -> None:
        for param in module.parameters(recurse=False):
            if param.numel() and param.untyped_storage().nbytes() == 0:
                raise Wrong(f"{what} reaches {names.get(module, 'a module')}, whose weights are freed or were never "
                            "gathered")

    def before(module, args):
        names.update({each: name.removeprefix("module.") for name, each in module.named_modules()} if not names else {})
        check(module, "forward")

    def after(module, args, output):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: check(module, "backward"))

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@exercise("13", "fsdp.FullyShardedDataParallel", hints=(
    "Each hook that comes before a computation does two things: unit.gather() for what computes now, and "
    "unit.start_gather() for what computes next.",
    "In forward the next layer is self.following[layer], in backward self.previous[layer], where there is one. The "
    "last layer's weights stay, because backward begins with it.",
    "after_layer frees the layer's unit if a layer follows, and registers a hook on `output` that calls "
    "before_backward(layer). before_forward starts the rest's units and the first layer, and waits for the rest."),
    blank=("def before_forward", "def before_layer", "def after_layer", "def before_backward"), wrong=[
    ("backward does not gather", "output.register_hook(lambda gradient: self.before_backward(layer))", "pass",
     "backward reaches decoder_layers.2"),
    ("forward does not wait", "        self.gather(layer)\n        if layer in self.following:",
     "        self.start_gather(layer)\n        if layer in self.following:", "weights are still arriving"),
    ("the rest is not gathered", "            unit.start_gather()\n        self.start_gather(self.first",
     "            return\n        self.start_gather(self.first", "forward reaches embedding, whose weights are freed")])
def just_in_time(attempt):
    """Gather the weights of a layer just before it computes, and free them afterwards.

    Write the four hooks. Of N ranks each holds an N-th of every unit, and no weights: all of them are freed when a
    step begins. When a layer computes, its unit must have been gathered, and so must those of `self.rest`, a list,
    during the whole step. While a layer computes, the weights of the next one shall arrive, and no others be there:

        forward     gather rest, 0 | compute 0 | compute 1 | compute 2 | ...    each is freed when it has computed
                                     gather 1    gather 2    gather 3
        backward    ... | compute 2 | compute 1 | compute 0                     frees the weights of a layer by itself,
                          gather 1    gather 0                                  as soon as all its gradients are there

    self.units[layer] is the unit of a layer, self.following[layer] the next layer, and self.previous[layer] the one
    before; the last and the first layer, respectively, have no entry. self.start_gather(layer), self.gather(layer) and
    self.free(layer) do what the unit does; self.first[args[1]] is the layer that comes first in a forward. A unit has
    start_gather(), which returns at once and does nothing where the weights are there or under way; gather(), which
    returns when they are there; and free().
    In after_layer, `output` is the layer's result. output.register_hook(f) lets backward call f(gradient of output)
    before it computes the layer. `output.requires_grad` is false where no backward will come.
    """
    common = f" --num_hidden_layers {LAYERS} --gradient_accumulation_steps "
    for dp in (2, 3):
        watches = []
        one = attempt.train(1, f"--max_tokens {64 * dp}{common}{2 * dp}", ours=True)
        with no_freed_weights():
            got = attempt.train(dp, f"--dp_size {dp} --zero 3 --max_tokens {64 * dp}{common}2",
                                prepare=lambda modules, rank: watches.append(Watch(modules.fsdp.Unit)))
        for key in ("loss", "grad_norm"):
            for step in range(2):
                attempt.same(got.rows[step][key], one.rows[step][key], f"{key} of step {step + 1} on {dp} ranks, "
                             "compared with one process", None)
    rest, *layers = (unit.num_bytes for unit in watches[0].units)
    best = rest + 2 * layers[0]  # of those that gather a layer while another one computes; less is slower, see below
    attempt.score("MB of weights that are there at the same time", max(best, *(watch.peak for watch in watches)) / 1e6,
                  best / 1e6)
    late = math.ceil(max(watch.late for watch in watches) / 4)  # 2 steps of 2 micro-batches
    attempt.score("passes through layers, and gathers beside which nothing computes, in a micro-batch",
                  2 * LAYERS + late, 2 * LAYERS)
