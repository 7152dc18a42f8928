"""Does a training over many processes compute what one process would? Two recordings, and a verdict that names causes.

    recorder = same_numbers.Recorder(model, optimizer, folder)  # before the loop, on each rank
    recorder.step(batch=input_ids, loss=loss, norm=norm)        # after backward and clipping, before optimizer.step()

    python -m same_numbers one_process/ many_processes/

Of each gradient and weight a rank keeps a sketch, not the numbers: for each dimension a vector of at most 256 bins, in
which all other dimensions are summed with pseudo-random signs (Alon, Matias and Szegedy, 1996). A sketch is linear. So
the sketches of parts add up to that of the whole, however it was cut; a factor, a sign or a missing summand of the
gradient is one of its sketch; and the length of a difference of sketches is that of the difference. The module needs
torch alone.
"""

import collections
import functools
import hashlib
import pathlib

import torch
import torch.distributed as dist

BINS = 256
SMALL, MANY = 1 << 14, 64  # numbers in a parameter, and such parameters, whose gradient each micro-batch tells apart
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@functools.lru_cache(maxsize=64)
def signs(size: int) -> torch.Tensor:
    """(size,): a 1 or -1 for each index, the same on each rank and in each version of torch."""
    x = torch.arange(1, size + 1)
    for _ in range(3):
        x = (x ^ (x >> 15)) * 0x2C1B3C6D % (1 << 32)
    return 1.0 - 2.0 * (x >> 16 & 1)


def sketch(tensor: torch.Tensor, index: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """(sum of min(n, BINS),) in float64: of the part `index`, a list a dimension, of a tensor of the global `shape`."""
    tensor, vectors = tensor.detach(), []
    if not tensor.is_floating_point() or tensor.element_size() < 4:
        tensor = tensor.float()
    if not shape:
        return tensor.double().cpu().view(1)
    for dim, size in enumerate(shape):
        rest = tensor
        for other in reversed(range(len(shape))):
            if other != dim:
                sign = signs(shape[other])[index[other]].to(rest)
                rest = torch.tensordot(rest, sign, dims=([other], [0]))
        bins = torch.zeros(min(size, BINS), dtype=torch.float64)
        vectors.append(bins.index_add_(0, index[dim] * len(bins) // size, rest.double().cpu()))
    return torch.cat(vectors)


def section(vector: torch.Tensor, shape: tuple, bounds: tuple) -> torch.Tensor:
    """The bins that only this part of a parameter fills: those of the dimension along which it is cut."""
    cut = [dim for dim, size in enumerate(shape) if bounds[dim] != (0, size)]
    if len(cut) != 1:
        return vector[:0] if cut else vector
    (start, stop), size = bounds[cut[0]], shape[cut[0]]
    bins, offset = min(size, BINS), sum(min(other, BINS) for other in shape[: cut[0]])
    return vector[offset - (-start * bins // size) : offset + stop * bins // size]


def factor(a: torch.Tensor, b: torch.Tensor, noise: float, floor: float = 0.0) -> float | None:
    """c where a is c times b but for noise: 1 where they differ by noise only, None where there is no such c."""
    if (a - b).norm() <= max(noise * b.norm(), floor):
        return 1.0
    c = float(a @ b / (b @ b)) if b.any() else 0.0
    if not c or (a - c * b).norm() > max(noise * a.norm(), floor):
        return None  # else without the digits that are noise. Clipping may add a difference of 1e-6
    return 1.0 if abs(c - 1) < 1e-5 else float(f"{c:.{6 if noise < 1e-5 else 4}g}")


def given(records: list[dict], key: str) -> list[float]:
    """The losses or norms of the ranks that have one."""
    return [each[key] for each in records if each[key] is not None]


def placed(tensor) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Global shape, and the indices that this rank holds along each dimension, of a tensor or DTensor."""
    index = [torch.arange(size) for size in tensor.shape]
    placements = getattr(tensor, "placements", ())
    # Two mesh axes may cut one dimension. FSDP's cut is then the inner one, though its axis is the outer one.
    for strided in (False, True):
        for axis, placement in enumerate(placements):
            if hasattr(placement, "dim") and (type(placement).__name__ == "_StridedShard") == strided:
                mesh, dim = tensor.device_mesh, placement.dim
                parts = index[dim].chunk(mesh.size(axis))
                rank = mesh.get_local_rank(axis)
                index[dim] = parts[rank] if rank < len(parts) else index[dim][:0]
    return tuple(tensor.shape), index


def clean(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and others put into it."""
    return ".".join(word for word in name.removeprefix("module.").split(".") if word not in WRAPPERS)


def tensors(batch):
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for each in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors(each)


def digests(batch) -> list[str]:
    """Of each sample: a row of a tensor."""
    return [f"{row.numel()}:" + hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().tobytes(),
                                                digest_size=8).hexdigest()
            for tensor in tensors(batch) for row in tensor.detach().cpu().flatten(1 if tensor.ndim > 1 else 0)]


def number(value) -> float | None:
    """A loss or a norm as a Python number. A DTensor's summands are added first."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return None if value is None else float(torch.as_tensor(value).detach())


class Recorder:
    """Writes what this rank holds of the first `steps` optimizer steps into `folder`; later steps cost nothing.

    `model` is a module or a list of them, wrapped or not; all ranks make their Recorder together. DTensors (FSDP2,
    tensor parallelism) say what part they are. For parts that are cut by hand, `parts(name)` returns the parameter's
    name in the whole model and, by dimension, (first index, size of the whole): `("layers.3.up.weight", {0: (256,
    1024)})`; None is a whole parameter. Where a sharded optimizer keeps gradients elsewhere than in `param.grad`,
    `gradient(param)` returns this rank's summand, in the parameter's shape. `first_step` numbers a resumed run's.
    `save_gradients` writes this rank's gradients themselves, too, as "whole" in each step's file.
    """

    def __init__(self, model, optimizer, folder, *, steps: int = 3, first_step: int = 1, parts=None, gradient=None,
                 save_gradients: bool = False):
        if steps < 1:
            raise ValueError(f"steps={steps} records nothing: use 1 or more")
        is_many = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if is_many else (0, 1)
        self.optimizer, self.folder = optimizer, pathlib.Path(folder).absolute()
        self.next, self.last = first_step, first_step + steps - 1
        self.gradient, self.save_gradients = gradient or (lambda param: param.grad), save_gradients
        self.modules = list(model) if isinstance(model, (list, tuple)) else [model]
        aliases = self.find_parameters(parts or (lambda name: None))
        self.forwards, self.seen, self.partial = 0, [], {}
        self.hooks = [each.register_forward_pre_hook(self.before_forward, with_kwargs=True) for each in self.modules]
        if self.world == 1:
            small = [name for name, param in self.params.items() if param.requires_grad and param.numel() <= SMALL]
            self.hooks += [self.params[name].register_post_accumulate_grad_hook(functools.partial(self.after, name))
                           for name in small[:MANY]]
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"rank{self.rank}_*.pt"):
            old.unlink()
        held = {id(param) for group in getattr(optimizer, "param_groups", ()) for param in group["params"]}
        self.write("start", {"world": self.world, "aliases": aliases, "summed": gradient is not None, "params": {
            name: {"shape": shape, "bounds": tuple((min(each.tolist(), default=0), max(each.tolist(), default=-1) + 1)
                                                   for each in index), "dtype": str(self.params[name].dtype)[6:],
                   "trained": self.params[name].requires_grad, "held": id(self.params[name]) in held}
            for name, (shape, index) in self.places.items()}})

    def write(self, what: str, found: dict) -> None:
        torch.save(found, self.folder / f"rank{self.rank}_{what}.pt")

    def find_parameters(self, parts) -> dict[str, str]:
        """Sets `params` and `places`, by names in the whole model. Returns further names of tied ones."""
        first, aliases, own, self.params, self.places = {}, {}, {}, {}, {}
        for module in self.modules:
            for name, param in module.named_parameters(remove_duplicate=False):
                if "_flat_param" in name:
                    raise ValueError(f"{name} is of FSDP1, which hides the parameters in it: use fully_shard (FSDP2)")
                name, cuts = parts(clean(name)) or (clean(name), {})
                if (known := first.setdefault(param, name)) != name:
                    aliases[name] = known
                    continue
                shape, index = placed(param)
                for dim, (start, size) in cuts.items():
                    shape, index[dim] = (*shape[:dim], size, *shape[dim + 1 :]), index[dim] + start
                self.params[name], self.places[name] = param, (shape, index)
            known = (getattr(type(each).__init__, "__globals__", {}).get("pgm") for each in module.modules())
            grid = next((each.process_group_manager for each in known if each), None)  # of this repository's steps
            for each in module.modules() if grid else ():
                for key, dim in getattr(each, "tp_dims", {}).items():
                    if (param := getattr(each, key)) is not None:
                        own[first[param]] = dim, grid.tp_rank, param.shape[dim]
        everyone = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, own)
        for name, (dim, rank, _) in own.items():
            sizes = {each[name][1]: each[name][2] for each in everyone if name in each}
            shape, index = self.places[name]
            index[dim] = index[dim] + sum(size for other, size in sizes.items() if other < rank)
            self.places[name] = (*shape[:dim], sum(sizes.values()), *shape[dim + 1 :]), index
        return aliases

    def before_forward(self, module, args, kwargs) -> None:
        """Counts micro-batches, and notes the token ids that the model is given."""
        if torch.is_grad_enabled() and self.next <= self.last:
            self.forwards += 1
            given = kwargs.get("input_ids", args[0] if args else None)
            if isinstance(given, torch.Tensor) and given.ndim > 1 and not given.is_floating_point():
                self.seen += digests(given)

    def after(self, name: str, param) -> None:
        """After the backward of a micro-batch: the sum of the gradients so far."""
        if self.next <= self.last:
            self.partial.setdefault(name, []).append(self.sketch(name, param.grad))

    def local(self, name: str, tensor) -> torch.Tensor | None:
        """This rank's numbers of a parameter or its gradient; None where it has none."""
        if tensor is None or tensor.is_meta or tensor.untyped_storage().nbytes() == 0 < tensor.numel():
            return None
        if hasattr(tensor, "placements") and tensor.placements != self.params[name].placements:
            tensor = tensor.redistribute(placements=self.params[name].placements)  # a sum that is not done yet
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()

    def sketch(self, name: str, tensor) -> torch.Tensor | None:
        local, (shape, index) = self.local(name, tensor), self.places[name]
        return local if local is None else sketch(local, index, shape)

    def squares(self, name: str, tensor) -> float:
        local = self.local(name, tensor)
        return 0.0 if local is None else torch.linalg.vector_norm(local.detach()).item() ** 2

    def step(self, *, batch=None, loss=None, norm=None) -> None:
        """Records a step. `batch`: its samples on this rank, of all micro-batches (token ids that the model is called
        with are found without it); `loss`: their mean; `norm`: of the gradients before clipping."""
        if self.next > self.last:
            return
        gradients = {name: self.gradient(param) for name, param in self.params.items()}
        modules = [each for module in self.modules for each in module.modules()]
        self.write(f"step{self.next}", {
            "gradients": {name: self.sketch(name, gradient) for name, gradient in gradients.items()},
            "squares": {name: self.squares(name, gradient) for name, gradient in gradients.items()},
            "weights": {name: self.sketch(name, param) for name, param in self.params.items()},
            "whole": self.save_gradients and {name: self.local(name, each) for name, each in gradients.items()},
            "partial": self.partial, "samples": self.seen if batch is None else digests(batch),
            "microbatches": self.forwards, "loss": number(loss), "norm": number(norm),
            "rates": [float(group["lr"]) for group in getattr(self.optimizer, "param_groups", ())],
            "dropout": sum("Dropout" in type(each).__name__ and each.training and each.p > 0 for each in modules)})
        self.next, self.forwards, self.seen, self.partial = self.next + 1, 0, [], {}
        if self.next > self.last:
            for hook in self.hooks:
                hook.remove()


class Recording:
    """What the ranks of a run have written into `folder`. Parameters have the names that `aliases` gives them."""

    def __init__(self, folder: pathlib.Path, aliases: dict | None = None):
        self.folder, start = folder, self.read(folder / "rank0_start.pt")
        self.world, self.summed, self.aliases = start["world"], start["summed"], aliases or start["aliases"]
        numbers = [{int(path.stem.rpartition("step")[2]) for path in folder.glob(f"rank{rank}_step*.pt")}
                   for rank in range(self.world)]
        self.steps = sorted(set.intersection(*numbers))
        if not self.steps or {*self.steps} != set.union(*numbers):
            raise ValueError(f"{folder}: by rank, the recorded steps are {[sorted(each) for each in numbers]}: call "
                             "recorder.step() on every rank in every step")
        self.info, self.parts = {}, collections.defaultdict(lambda: collections.defaultdict(list))
        for rank in range(self.world):
            for name, info in self.renamed(self.read(folder / f"rank{rank}_start.pt")["params"]).items():
                self.parts[name][info["bounds"]].append(rank)
                self.info[name] = {**info, "held": info["held"] and self.info.get(name, info)["held"]}

    @staticmethod
    def read(path: pathlib.Path) -> dict:
        try:
            return torch.load(path, weights_only=True)
        except OSError:
            raise ValueError(f"{path.parent} is no whole recording, {path.name} is missing: did every rank make a "
                             "Recorder, and call its step()?") from None

    def check(self, other: "Recording") -> None:
        """Raises ValueError where the recordings are of unlike models, dtypes or steps."""
        wrong = "these recordings do not belong together:"
        if not {*self.steps} & {*other.steps}:
            raise ValueError(f"{wrong} steps {self.steps} and {other.steps}")
        for name in {**self.info, **other.info}:
            for words in ("shape", "dtype", "trained"):
                a, b = (each.info[name][words] if name in each.info else "absent" for each in (self, other))
                if a != b:
                    raise ValueError(f"{wrong} the {words} of {name} is {a} in {self.folder}, and {b} in {other.folder}")

    def renamed(self, found: dict) -> dict:
        return {self.aliases.get(name, name): value for name, value in found.items()}

    def load(self, step: int) -> list[dict]:
        records = [self.read(self.folder / f"rank{rank}_step{step}.pt") for rank in range(self.world)]
        return [{**each, **{kind: self.renamed(each[kind]) for kind in ("gradients", "weights", "squares")}}
                for each in records]

    def held(self, records: list[dict], kind: str) -> dict[str, dict]:
        """name -> part -> rank -> sketch."""
        return {name: {part: {rank: vector for rank in ranks if (vector := records[rank][kind][name]) is not None}
                       for part, ranks in parts.items()} for name, parts in self.parts.items()}

    def norm(self, records: list[dict]) -> float:
        """Of the gradients as they were recorded."""
        return sum(sum(records[rank]["squares"][name] / (1 if self.summed else len(ranks)) for rank in ranks)
                   for name, parts in self.parts.items() for ranks in parts.values()) ** 0.5

    def whole(self, held: dict, summed: bool = False) -> dict:
        """name -> the sketch of all parts, which add up; of replicas the mean counts. Without what no rank has."""
        return {name: sum(sum(ranks.values()) / (1 if summed else len(ranks)) for ranks in parts.values() if ranks)
                for name, parts in held.items() if any(parts.values())}
