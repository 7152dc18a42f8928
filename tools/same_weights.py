"""Do all replicas hold the same weights? To be called on all ranks of a dp group, after optimizer.step().

DEBUGGING.md explains it, and `break_it.py NAME --checksums` puts it into a step's train.py.
"""

import torch
import torch.distributed as dist
import torch.nn as nn


def report(step: int, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares the sum of each parameter over the ranks of `group`, and prints the first one that differs."""
    names, params = zip(*model.named_parameters())
    mine = torch.stack([param.detach().double().sum() for param in params])  # one number per parameter
    sums = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(sums, mine, group=group)
    sums = torch.stack(sums)  # (ranks, parameters)
    differ = (sums != sums[0]).any(dim=0).nonzero().flatten().tolist()
    if dist.get_rank() == 0:
        first = f", first {names[differ[0]]}: {sums[:, differ[0]].tolist()}" if differ else ""
        print(f"after step {step}: {len(differ)} of {len(names)} parameters differ{first}", flush=True)
