"""The Recorder: what a rank holds of the first optimizer steps, as sketches in files, one a rank and step."""

import collections
import contextlib
import functools
import itertools
import multiprocessing.util
import pathlib
import uuid
import warnings
import weakref

import torch
import torch.distributed as dist

from . import frameworks
from .optimizers import groups, optimizers, settings, state_dtypes
from .outputs import Outputs
from .samples import digest, digests, number, token_ids
from .sketches import bounds_of, sketch_all

SMALL, MANY = 1 << 14, 64  # numbers in a parameter, and such parameters, whose gradient each micro-batch tells apart
LEAVES = 32  # modules whose outputs say in which dtype the model computes


def harmless(method):
    """No error of the recorder's ends a training: it is written down for the verdict, and nothing more is recorded."""
    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # whatever a library's tensors raise
            self.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return guarded


class Recorder:
    """Writes what this rank holds of the first `steps` optimizer steps into `folder`; later steps cost nothing.

    `model` is a module or a list of them, wrapped or not; all ranks make their Recorder together. DTensors, Megatron's
    attributes and DeepSpeed's say what part of a parameter this is. For parts that are cut by hand, `parts(name)`
    returns the parameter's name in the whole model and, by dimension, (first index, size of the whole):
    `("layers.3.up.weight", {0: (256, 1024)})`; None is a whole parameter. Where a sharded optimizer keeps gradients
    elsewhere than in `param.grad`, `gradient(param)` returns this rank's summand, in the parameter's shape.
    `first_step` numbers a resumed run's. `save_gradients` writes this rank's gradients themselves, too, as "whole".
    `modules`, names with * or "blocks", are those whose outputs, and gradients at them, say where a fault is; `tokens`
    are the indices and the number of tokens, `([0, 1, 6, 7], 8)`, where this rank has a part of each sample. `group`: of
    the ranks that train, where others do something else, such as to generate.
    Raises ValueError where nothing could be recorded by these arguments.
    """

    def __init__(self, model, optimizer, folder, *, steps: int = 3, first_step: int = 1, parts=None, gradient=None,
                 save_gradients: bool = False, modules=(), tokens=None, group=None):
        if steps < 1:
            raise ValueError(f"steps={steps} records nothing: use 1 or more")
        is_many = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(group), dist.get_world_size(group)) if is_many else (0, 1)
        self.optimizers, self.folder = optimizers(optimizer), pathlib.Path(folder).absolute()
        self.first, self.next, self.last, self.is_over = first_step, first_step, first_step + steps - 1, False
        self.gradient, self.save_gradients, self.group = gradient or frameworks.gradient_of, save_gradients, group
        self.modules = list(model) if isinstance(model, (list, tuple)) else [model]
        aliases = self.find_parameters(parts or (lambda name: None))
        self.keys = {name: bounds_of(place) for name, place in self.places.items()}
        held = groups(self.optimizers)[1]
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"rank{self.rank}_*.pt"):
            old.unlink()
        self.write("start", {
            "world": self.world, "aliases": aliases, "summed": gradient is not None, "id": uuid.uuid4().hex,
            "sizes": frameworks.group_sizes(self.params.values()),
            "params": {name: {"shape": shape, "bounds": self.keys[name], "dtype": str(self.params[name].dtype)[6:],
                              "trained": self.params[name].requires_grad, "held": id(self.params[name]) in held}
                       for name, (shape, index) in self.places.items()}})
        self.outputs = Outputs(self.modules, modules, tokens)
        self.forget()
        self.hooks = self.add_hooks()

    def add_hooks(self) -> list:
        """Of each model and of some of its layers. A compiled graph is left as it is."""
        everything, hooks = [each for model in self.modules for each in model.modules()], []
        is_compiled = any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", 0) for each in everything)
        for each in [each for each in self.modules if not getattr(each, "_compiled_call_impl", 0)]:
            hooks += [each.register_forward_pre_hook(self.before_forward, with_kwargs=True),
                      each.register_forward_hook(self.after_forward, always_call=True)]
        leaves = [each for each in everything if getattr(each, "weight", None) is not None]
        for each in leaves[:: 1 + len(leaves) // LEAVES] if not is_compiled else ():
            hooks.append(each.register_forward_hook(self.after_leaf))
        if self.world == 1:
            kinds = collections.defaultdict(list)  # of each kind the first ones, so that all are there
            for name, param in self.params.items():
                if param.requires_grad and param.numel() <= SMALL:
                    kinds[frameworks.ordinary(name)].append(name)
            small = [name for some in itertools.zip_longest(*kinds.values()) for name in some if name][:MANY]
            hooks += [self.params[name].register_post_accumulate_grad_hook(functools.partial(self.after, name))
                      for name in small]
        for name, each in self.outputs.modules.items() if not is_compiled else ():
            hooks.append(each.register_forward_hook(functools.partial(self.after_module, name)))
        if not any(hasattr(param, "ds_id") for param in self.params.values()):
            close = weakref.WeakMethod(self.at_end)  # at the end of the process, also of a forked one
            multiprocessing.util.Finalize(None, lambda: (found := close()) and found(), exitpriority=1)
        return hooks

    def write(self, what: str, found: dict) -> None:
        torch.save(found, self.folder / f"rank{self.rank}_{what}.pt")

    def fail(self, why: str) -> None:
        warnings.warn(f"same_numbers stops recording, the training goes on: {why}", stacklevel=3)
        with contextlib.suppress(RuntimeError, OSError):  # a folder that is gone, a disk that is full
            self.write(f"step{self.next}", {"error": why})
        self.next, self.is_over = self.last + 1, True

    def forget(self) -> None:
        """What is counted anew in each step. Of each model: how deep in its forward, and how many micro-batches."""
        self.depth, self.forwards = dict.fromkeys(map(id, self.modules), 0), dict.fromkeys(map(id, self.modules), 0)
        self.seen, self.partial, self.computed, self.random = [], {}, set(), set()
        self.outputs.forget()

    def find_parameters(self, parts) -> dict[str, str]:
        """Sets `params` and `places`, by names in the whole model. Returns further names of tied ones."""
        first, aliases, own, self.params, self.places = {}, {}, {}, {}, {}
        for module in self.modules:
            renamed = frameworks.renamer(module)
            for name, param in module.named_parameters(remove_duplicate=False):  # tied ones under all of their names
                name = renamed(name)
                if "_flat_param" in name:
                    raise ValueError(f"{name} is of FSDP1, which hides the parameters in it: use fully_shard (FSDP2)")
                name, cuts = parts(name) or (name, {})
                if (known := first.setdefault(param, name)) != name:
                    aliases[name] = known
                    continue
                shape, index = frameworks.placed(param)
                for dim, (start, size) in cuts.items():
                    shape, index[dim] = (*shape[:dim], size, *shape[dim + 1 :]), index[dim] + start
                self.params[name], self.places[name] = param, (shape, index)
            here = {name: param for name, param in self.params.items() if not (parts(name) or ("", ()))[1]}
            own |= frameworks.own_cuts(module, here, self.rank)
        frameworks.place_cuts(self.places, frameworks.gather(own, self.world, self.group), self.rank)
        return aliases

    @harmless
    def before_forward(self, module, args, kwargs) -> None:
        """Counts micro-batches, and notes the token ids that the model is given, also in a list or a dict."""
        if self.next > self.last:
            self.finish()
        elif torch.is_grad_enabled() and not self.is_over:
            self.depth[id(module)] += 1
            if self.depth[id(module)] > 1:  # a model that calls itself, as a LightningModule does
                return
            self.forwards[id(module)] += 1
            self.random_state = random_state()
            ids = token_ids(module, args, kwargs)
            self.seen += digests(ids) if ids is not None and module is self.modules[0] else []
            self.outputs.begin(ids)

    @harmless
    def after_forward(self, module, args, output) -> None:
        if self.depth.get(id(module)):
            self.depth[id(module)] -= 1
            if not self.depth[id(module)] and self.random_state != random_state():
                self.random.add(self.random_state)

    @harmless
    def after_leaf(self, module, args, output) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and torch.is_grad_enabled():
            self.computed.add(str(output.dtype)[6:])

    @harmless
    def after_module(self, name: str, module, args, output) -> None:
        if self.next <= self.last and not self.is_over:
            self.outputs.add(name, output, self.at_output)

    at_output = harmless(lambda self, *args: self.outputs.add_gradient(*args))

    @harmless
    def after(self, name: str, param) -> None:
        """After the backward of a micro-batch: the sum of the gradients so far."""
        if self.next <= self.last and not self.is_over:
            self.partial.setdefault(name, []).append(self.sketches({name: param.grad})[0][name])

    def weights(self) -> dict:
        return {name: frameworks.weight_of(param) for name, param in self.params.items()}

    def sketches(self, found: dict) -> tuple[dict, dict]:
        numbers = {name: frameworks.local(each, self.params[name]) for name, each in found.items()}
        return sketch_all(numbers, self.places, self.keys)

    @harmless
    def step(self, *, batch=None, loss=None, norm=None) -> None:
        """Records a step. `batch`: its samples on this rank, of all micro-batches (token ids that the model is called
        with are found without it); `loss`: their mean; `norm`: of the gradients before clipping."""
        if self.next > self.last:
            return self.finish()
        gradients = {name: self.gradient(param) for name, param in self.params.items()}
        modules = [each for module in self.modules for each in module.modules()]
        used, of = groups(self.optimizers)
        vectors, squares = self.sketches(gradients)
        self.write(f"step{self.next}", {
            "gradients": pack(vectors), "squares": squares, "weights": pack(self.sketches(self.weights())[0]),
            "whole": self.save_gradients and {name: frameworks.local(each, self.params[name])
                                              for name, each in gradients.items()},
            "partial": self.partial, "samples": self.seen if batch is None else digests(batch),
            "inputs": self.seen,
            "microbatches": max(self.forwards.values(), default=0), "loss": number(loss), "norm": number(norm),
            "settings": [settings(group) for group in used],
            "groups": {name: of[id(param)] for name, param in self.params.items() if id(param) in of},
            "computed": self.computed, "states": state_dtypes(self.optimizers),
            "batchnorm": sum("BatchNorm" in (kind := type(each).__name__) and "Sync" not in kind and each.training
                             for each in modules),
            "random": self.random, "outputs": self.outputs.packed(),
            "dropout": any("Dropout" in type(each).__name__ and each.training and each.p > 0 for each in modules)})
        self.next += 1
        self.forget()

    @harmless
    def finish(self) -> None:
        """Before the next forward: the weights, so that what the last step has changed is judged, too."""
        if not self.is_over:
            self.is_over = True
            self.write("end", {"weights": pack(self.sketches(self.weights())[0])})
            for hook in self.hooks:
                hook.remove()

    def close(self) -> None:
        """Records what the last step has changed, where the training ends with it."""
        if self.next > self.first and self.folder.is_dir():
            self.finish()

    def at_end(self) -> None:
        """Of the process: a step that was not the last may have been left before the optimizer's."""
        if self.next > self.last:
            self.close()


def random_state() -> str:
    """Of the generators that layers draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return " ".join(map(digest, states))


def pack(vectors: dict) -> dict:
    """One tensor instead of thousands: a file is written and read in no time."""
    found = [vector for vector in vectors.values() if vector is not None]
    return {"sizes": {name: None if vector is None else len(vector) for name, vector in vectors.items()},
            "numbers": torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)}
