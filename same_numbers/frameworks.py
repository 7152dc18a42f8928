"""What part of which parameter a rank holds, as the framework says it: DTensors (FSDP2, HSDP, transformers' tp_plan),
attributes of parameters (Megatron, DeepSpeed) or modules (this repository's steps). None is imported: what isn't loaded
isn't in use. Names in the whole model are without torch's wrappers; others' words go when recordings are compared."""

import pickle
import re
import sys

import torch
import torch.distributed as dist

from .samples import digest
from .sketches import Place

WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
DDP = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel) if dist.is_available() else ()


def gather(own: dict, world: int, group=None) -> list[dict]:
    """`own` of all ranks of the group, by the same collectives on each. torch's own function needs numpy, which one may lack."""
    if world == 1 or not dist.is_initialized():
        return [own] * world
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    text = torch.tensor(list(pickle.dumps(own)), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group)
    texts = [torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, len(texts[0]) - len(text))), group)
    return [pickle.loads(bytes(each.tolist())) for each in texts]  # which stops where it ends


def renamer(model: torch.nn.Module):
    """A function: name of a parameter or module here -> its name in the whole model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    stages = {name: each.layer_number - 1 for name, each in modules.items()  # Megatron's stages count from 0 again
              if type(getattr(each, "layer_number", None)) is int and name.rpartition(".")[2].isdigit()}
    experts = getattr(parallel_state(), "get_expert_model_parallel_rank", int)()

    def renamed(name: str) -> str:
        words, kept = name.split("."), []
        for i, word in enumerate(words):
            before = ".".join(words[:i])
            if (path := ".".join(words[: i + 1])) in stages:
                kept.append(str(stages[path]))
            elif i and words[i - 1] == "local_experts" and experts:
                kept.append(str(int(word) + experts * len(modules[before])))
            elif word not in WRAPPERS and not (word == "module" and isinstance(modules.get(before), DDP)):
                kept.append(word)
        return ".".join(kept)
    return renamed


def parallel_state():
    """Megatron's, where it is loaded and its groups are made."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state and state.model_parallel_is_initialized() else None


def placed(tensor: torch.Tensor) -> Place:
    """Of a tensor or DTensor. DeepSpeed's ZeRO 3 has empty ones that know their shape."""
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    index, placements = [torch.arange(size) for size in shape], getattr(tensor, "placements", ())
    # Two mesh axes may cut one dimension. FSDP's cut is then the inner one, though its axis is the outer one.
    cuts = [(axis, each) for axis, each in enumerate(placements) if hasattr(each, "dim")]
    inner = [each for each in cuts if type(each[1]).__name__ == "_StridedShard" and any(
        other.dim == each[1].dim for axis, other in cuts if axis > each[0])]
    for axis, placement in [each for each in cuts if each not in inner] + inner:
        mesh, dim = tensor.device_mesh, placement.dim % len(shape)
        rank, strided = mesh.get_local_rank(axis), type(placement).__name__ == "_StridedShard"
        packed = placement.split_factor if strided and (axis, placement) not in inner else 1  # such as gate and up
        pieces = [group.chunk(mesh.size(axis)) for group in index[dim].chunk(packed)]
        index[dim] = torch.cat([parts[rank] if rank < len(parts) else parts[0][:0] for parts in pieces])
    return shape, index


def own_cuts(model: torch.nn.Module, params: dict, rank: int) -> dict[str, tuple]:
    """name -> (dim, order among the ranks that share it, length here, interleaved parts) of what is cut by hand."""
    cuts, state = {}, parallel_state()
    names = {param: name for name, param in params.items()}
    marked = [name for name, param in params.items() if getattr(param, "tensor_model_parallel", False)
              and not hasattr(param, "placements")]
    order = fingerprint([params[name] for name in marked]) if marked and not state else rank
    for name in marked:
        param = params[name]
        if state:
            of_experts = not getattr(param, "allreduce", True)
            order = (state.get_expert_tensor_parallel_rank() if of_experts else state.get_tensor_model_parallel_rank())
        dim = getattr(param, "partition_dim", 0)
        cuts[name] = dim, order, param.shape[dim], getattr(param, "partition_stride", 1)
    known = (getattr(type(each).__init__, "__globals__", {}).get("pgm") for each in model.modules())
    grid = next((each.process_group_manager for each in known if each), None)  # of this repository's steps
    for each in model.modules() if grid else ():
        for key, dim in getattr(each, "tp_dims", {}).items():
            if (param := getattr(each, key)) is not None:
                cuts[names[param]] = dim, grid.tp_rank, param.shape[dim], 1
    return cuts


def fingerprint(params: list) -> str:
    """The same on replicas, for where nobody knows the groups: of the marked weights as they are at the start."""
    return " ".join(digest(param.detach().flatten()[:4096].cpu()) for param in params)


def place_cuts(places: dict[str, Place], everyone: list[dict], rank: int) -> None:
    """Moves indices to where this rank's parts begin. `everyone` has own_cuts() by rank."""
    for name, (dim, own, length, stride) in everyone[rank].items():
        sizes = {}
        for each in everyone:
            if name in each:
                sizes.setdefault(each[name][1], each[name][2])
        keys = list(sizes) if isinstance(own, str) else sorted(sizes)  # fingerprints are in the order of ranks
        before, total = sum(sizes[key] for key in keys[: keys.index(own)]), sum(sizes.values())
        shape, index = places[name]
        steps = torch.arange(length // stride) + before // stride
        index[dim] = (steps + torch.arange(stride)[:, None] * (total // stride)).flatten()
        places[name] = (*shape[:dim], total, *shape[dim + 1 :]), index


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient, where the framework in use keeps it."""
    if hasattr(param, "_hp_mapping") or hasattr(param, "ds_id"):
        return sys.modules["deepspeed"].utils.safe_get_full_grad(param)
    if param.grad is None:
        return getattr(param, "main_grad", None)
    return param.grad


def weight_of(param: torch.Tensor) -> torch.Tensor:
    if not hasattr(param, "ds_id"):
        return param
    with sys.modules["deepspeed"].zero.GatheredParameters([param]):
        return param.detach().clone()


def local(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """This rank's numbers of a parameter `like`, or of its gradient; None where it has none."""
    if tensor is None or tensor.is_meta:
        return None
    if hasattr(tensor, "placements") and tensor.placements != getattr(like, "placements", tensor.placements):
        tensor = tensor.redistribute(placements=like.placements)  # a sum that is not done yet
    tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return None if tensor.untyped_storage().nbytes() == 0 < tensor.numel() else tensor


def group_sizes(params) -> dict[str, int]:
    """Of the axes of meshes and of Megatron's groups: how many ranks."""
    sizes, state = {}, parallel_state()
    for mesh in {id(mesh): mesh for each in params if (mesh := getattr(each, "device_mesh", None))}.values():
        names = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
        sizes |= {f"ranks along {name}": mesh.size(i) for i, name in enumerate(names)}
    for name in ("data", "tensor_model", "context", "expert_model") if state else ():
        sizes[f"ranks along {name.removesuffix('_model')}"] = getattr(state, f"get_{name}_parallel_world_size")()
    return sizes


def ordinary(name: str) -> str:
    """A parameter's kind: its name with a * for each number."""
    return re.sub(r"\d+", "*", name)
