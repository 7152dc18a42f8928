"""What a rank holds of a model and its optimizer, by the names that Hugging Face's files have."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from models.names import name_function, trained_alone


class Shard(NamedTuple):
    """A tensor that this rank holds, or its part of one: along `dim`, in each of `fused` matrices side by side.

    `kind`: of the file that it is for, one of KINDS.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    dim: int | None = None
    fused: int = 1


def shards_of(stage, optimizer: torch.optim.Optimizer) -> list[Shard]:
    """What this rank holds. A tied head is left out where the embedding stands for it."""
    found, tied, name_of, trained = [], stage.tied, name_function(stage), trained_alone(stage)
    for name, param in stage.model.named_parameters():
        if trained and name not in trained or tied and name == tied[1] and not stage.is_first:
            continue
        module, _, key = name.rpartition(".")
        module, name = stage.model.get_submodule(module), name_of(tied[0] if tied and name in tied else name)
        split = getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", {}).get(key, 1)
        found.append(Shard("model", name, param.detach(), *split))
        for entry, value in optimizer.state.get(param, {}).items():
            found.append(Shard("optimizer", f"{name}.{entry}", value, *(split if value.shape == param.shape else ())))
    own = tuple(f"{name}." for name in stage.template.modules_per_stage[stage.stage_index])
    params = dict(stage.model.named_parameters(remove_duplicate=False))
    found += [Shard("model", name_of(name), buffer) for name, buffer in stage.model.state_dict().items()
              if name not in params and name.startswith(own) and not trained]
    return sorted(found, key=lambda shard: (-shard.tensor.dtype.itemsize, shard.name))


def parts_over(group: dist.ProcessGroup | None, shards: list[Shard]) -> list[list[torch.Tensor]]:
    """For each shard, the parts that the ranks of the tensor-parallel `group` hold, on the meta device; one part where
    each rank holds all. Collective in the group."""
    everyone = [[shard.tensor.to("meta") for shard in shards]]
    if group:
        everyone *= group.size()
        dist.all_gather_object(everyone, everyone[0], group=group)
    return [parts[:1] if shard.dim is None else parts for shard, *parts in zip(shards, *everyone)]


def collect(shard: Shard, parts: list[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor] | None:
    """`parts` with their numbers, on the first rank of `group`, to which the others send theirs."""
    own = shard.tensor.cpu().contiguous()
    if len(parts) > 1 and group.rank() > 0:
        dist.send(own.flatten().view(torch.uint8), group=group, group_dst=0)
        return None
    parts = [own, *(torch.empty_like(part, device="cpu") for part in parts[1:])]
    for source, part in enumerate(parts[1:], 1):
        dist.recv(part.flatten().view(torch.uint8), group=group, group_src=source)
    return parts


def join(shard: Shard, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor."""
    if len(parts) == 1:
        return parts[0]
    chunks = [part.chunk(shard.fused, shard.dim) for part in parts]  # of each rank, one of each fused matrix
    return torch.cat([chunk[k] for k in range(shard.fused) for chunk in chunks], shard.dim)
