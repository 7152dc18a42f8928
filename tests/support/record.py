"""Runs a step's train.py, unchanged, and saves what its optimizer sees. `record.py OUT train.py FLAGS...`, as N ranks

Each rank writes OUT/rank<r>.pt: its place in the grid, its parameters before the first and after the last step, the
gradients that the first step uses, and how many micro-batches' activations it held at most (None without a pipeline).
Of a step that divides them over the dp ranks, each rank puts the whole together from all shards, see from_shards().
"""

import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Recording:
    """What one rank's optimizer sees, and how near the choice of experts came to a tie."""

    def __init__(self):
        self.first, self.gaps, self.wrapper = {}, [], None

    def watch(self, module, _args, output) -> None:
        """After each module's forward: finds what wraps the model for data parallelism, and looks at routers.

        A choice jumps where two values are equal. Rounding, which differs between runs, must not decide any: kept is
        the smallest gap between the value of the k-th expert and that of the next one. Without a bias, experts are
        chosen by their logits, of which scores are softmax: logarithms differ as these do.
        """
        if any(each.__name__ == "DataParallelBucket" for each in type(module).__mro__):
            self.wrapper = module
        if type(module).__name__ == "Router" and module.k < output[0].size(-1):
            scores, bias = output[0].detach(), module.bias_of_choice
            values = scores + bias if torch.is_tensor(bias) and bias.any() else scores.log()
            values = values.topk(module.k + 1).values
            self.gaps.append((values[..., -2] - values[..., -1]).min().item())

    def snapshot(self, optimizer, *_) -> None:
        """Before each optimizer step; only the first one counts."""
        if self.first or "param_names" not in optimizer.param_groups[0]:  # it is only timed
            return
        group, buckets = optimizer.param_groups[0], self.wrapper.buckets if self.wrapper else []
        if any(getattr(bucket, "shard", None) is group["params"][0] for bucket in buckets):
            self.read = lambda what: from_shards(self.wrapper, what)
        else:
            module = self.wrapper and getattr(self.wrapper.module, "model", self.wrapper.module)  # of step 9's stage
            params = dict(module.named_parameters() if self.wrapper else zip(
                (name.removeprefix("module.") for name in group["param_names"]), group["params"]))
            self.read = lambda what: {name: read(param, what).clone() for name, param in params.items()}
        self.first = {"initial": self.read("data"), "grads": self.read("grad")}

    def result(self, grid) -> dict:
        """After the last step; `grid` is the rank's process group manager."""
        place = {"dp": grid.dp_rank, "pp": grid.pp_rank, "tp": grid.tp_rank}
        return {**self.first, "final": self.read("data"), "place": place, "gap": min(self.gaps, default=None),
                "peak": getattr(self.wrapper, "peak_live_activations", None)}


def read(param: torch.Tensor, what: str) -> torch.Tensor:
    return getattr(param, what).detach()


def from_shards(wrapper: torch.nn.Module, what: str) -> dict[str, torch.Tensor]:
    """The whole weights ("data") or gradients ("grad"), which all dp ranks put together from all shards.

    A bucket's shards, one after the other in the order of ranks, are its parameters, flat and in their order.
    Where ranks hold whole weights as well, these are read: they have to be equal on all ranks.
    """
    names, whole = {param: name for name, param in wrapper.module.named_parameters()}, {}
    for bucket in wrapper.buckets:
        if what == "data" and all(param.untyped_storage().nbytes() for param in bucket.params):
            whole.update((names[param], param.detach().clone()) for param in bucket.params)
            continue
        dist.all_gather_object(parts := [None] * bucket.group.size(), read(bucket.shard, what), group=bucket.group)
        pieces = torch.cat(parts).split([param.numel() for param in bucket.params])
        whole.update((names[param], piece.view(param.shape)) for param, piece in zip(bucket.params, pieces))
    return whole


def run(out: str, script: str) -> None:
    recording = Recording()
    register_optimizer_step_pre_hook(recording.snapshot)
    torch.nn.modules.module.register_module_forward_hook(recording.watch)
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script)["main"]()
    grid = sys.modules["process_group_manager"].process_group_manager
    if grid is None:  # a script whose ranks train by themselves
        return
    os.makedirs(out, exist_ok=True)
    torch.save(recording.result(grid), os.path.join(out, f"rank{grid.global_rank}.pt"))


if __name__ == "__main__":
    out, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    run(out, script)
