"""The ranks as a grid: data parallel (DP) x pipeline parallel (PP) x tensor parallel (TP).

A rank is the number of one process. Along each axis of the grid, the ranks that share the other two coordinates form a
process group: they are the ones that communicate for that kind of parallelism. With 8 ranks and all three sizes 2:

                 tp 0   tp 1                 a tp group is a row            [0, 1] [2, 3] [4, 5] [6, 7]
    dp 0  pp 0      0      1                 a pp group is a column         [0, 2] [1, 3] [4, 6] [5, 7]
          pp 1      2      3                     within one block
    dp 1  pp 0      4      5                 a dp group is the same place   [0, 4] [1, 5] [2, 6] [3, 7]
          pp 1      6      7                     in every block

Generators of rollouts are a grid of their own, with the ranks after those of the trainers. Its replicas along dp
generate different answers, each of them with tp ranks, and it has no stages: 5 ranks are dp 2 x tp 2 for training, and
rank 4 generates.

Consecutive ranks differ in tp first: tensor-parallel ranks communicate most, and consecutive ranks are usually in the
same machine (Narayanan et al. 2021).
"""

import atexit
import contextlib
import datetime
import json
import os
import re

import torch
import torch.distributed as dist

from utils import UserError

process_group_manager = None
timeout = datetime.timedelta(seconds=600)  # how long a rank waits for the others before it ends with an error
MAY_DIFFER = re.compile("_name|_dir|wandb|device|timeout|threads|num_proc|workers|tokenizers")  # what a machine decides


class ProcessGroupManager:
    """The coordinates of this rank in the grid, and a process group along each axis through it.

    For each axis (tp, pp, dp): `<axis>_group` to communicate in, `<axis>_world_size`, and `<axis>_rank`, the position
    of this rank in the group. All ranks make one together. On a generator they are those of the generators' grid.
    Raises UserError where the product of the sizes, plus the generators, is not the number of processes.
    """

    def __init__(self, dp_size: int, pp_size: int, tp_size: int, generators: int = 0, generator_tp_size: int = 1):
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if (needed := dp_size * pp_size * tp_size + generators) != self.world_size:
            plus = f" + generators={generators}" if generators else ""
            raise UserError(f"dp_size={dp_size} x pp_size={pp_size} x tp_size={tp_size}{plus} needs {needed} processes,"
                            f" but {self.world_size} run: use torchrun --nproc_per_node {needed}, or change the sizes")
        num_trainers = self.world_size - generators
        self.trainers = torch.arange(num_trainers).view(dp_size, pp_size, tp_size)
        self.generators = torch.arange(num_trainers, self.world_size).view(-1, 1, generator_tp_size)
        self.is_generator = self.global_rank >= num_trainers
        self.ranks = self.generators if self.is_generator else self.trainers  # ranks[dp, pp, tp]: a global rank
        dp_size, pp_size, tp_size = self.ranks.shape
        self.dp_rank, self.pp_rank, self.tp_rank = (self.ranks == self.global_rank).nonzero().flatten().tolist()
        self.dp_world_size, self.pp_world_size, self.tp_world_size = dp_size, pp_size, tp_size
        self.topology = {"dp_size": dp_size, "pp_size": pp_size, "tp_size": tp_size, "world_size": self.world_size}
        if generators:
            self.topology |= {"generators": generators, "generator_tp_size": generator_tp_size}

        def make_group(ranks: torch.Tensor) -> dist.ProcessGroup:  # its members make it, and nobody else
            return dist.new_group(ranks.tolist(), timeout, use_local_synchronization=True)

        self.tp_group = make_group(self.ranks[self.dp_rank, self.pp_rank])
        self.pp_group = make_group(self.ranks[self.dp_rank, :, self.tp_rank])
        stages = self.ranks[self.dp_rank, :, self.tp_rank]  # of this rank's pipeline
        self.pp_backward_group = make_group(stages)  # for gradients: they go back
        ends = stages[:: max(pp_size - 1, 1)]  # these share a tied embedding. Those between make a group of their own,
        self.pp_ends_group = make_group(ends if self.global_rank in ends else stages[1:-1])  # so all have as many
        self.dp_group = make_group(self.ranks[:, self.pp_rank, self.tp_rank])
        self.grid_group = make_group(self.ranks.flatten()) if generators else None  # None: all ranks

        self.pp_is_first_stage = self.pp_rank == 0
        self.pp_is_last_stage = self.pp_rank == pp_size - 1
        self.pp_prev_rank = None if self.pp_is_first_stage else stages[self.pp_rank - 1].item()
        self.pp_next_rank = None if self.pp_is_last_stage else stages[self.pp_rank + 1].item()
        # One rank of all logs. Only the last stage of a pipeline computes the loss, so it is a last stage.
        self.is_logging_rank = (self.dp_rank == 0 and self.tp_rank == 0 and self.pp_is_last_stage
                                and not self.is_generator)

    def __str__(self) -> str:
        return f"DP({self.dp_world_size})-PP({self.pp_world_size})-TP({self.tp_world_size})-Rank({self.global_rank})"

    def describe(self) -> str:
        """One line per rank (of the first 16): its coordinates and the groups that it belongs to."""
        sizes = f"dp {self.dp_world_size} x pp {self.pp_world_size} x tp {self.tp_world_size}"
        plus = f" + {self.generators.numel()} generators" if self.generators.numel() else ""
        lines = [f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'} = {sizes}{plus}"]
        for rank in range(min(self.world_size, 16)):
            if rank in self.generators:
                replica, _, tp = (self.generators == rank).nonzero().flatten().tolist()
                lines.append(f"rank {rank}: generator {replica} tp {tp}")
                continue
            dp, pp, tp = (self.ranks == rank).nonzero().flatten().tolist()
            groups = [self.ranks[:, pp, tp].tolist(), self.ranks[dp, :, tp].tolist(), self.ranks[dp, pp, :].tolist()]
            lines.append(f"rank {rank}: dp {dp} pp {pp} tp {tp} | "
                         "dp group {} pp group {} tp group {}".format(*groups))
        return "\n".join(lines)


def init_process_group(backend: str, timeout_seconds: float = 600, flags: dict | None = None) -> None:
    """Joins the processes that torchrun describes in the environment. Without torchrun, this process is the only one.

    Raises UserError where ranks choose different backends, as machines with and without a GPU do, or were given
    different `flags`, other than paths, names and what else a machine decides for itself.
    """
    global timeout
    timeout = datetime.timedelta(seconds=min(timeout_seconds, 1e9))  # a timedelta has a limit
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    flags = {f"--{name}": str(value) for name, value in (flags or {}).items() if not MAY_DIFFER.search(name)}
    flags = {"the backend of --device": backend, **flags}
    if rank == 0:
        store.set("flags", json.dumps(flags))
    unlike = [f"{name} is {value} on rank 0, but {flags.get(name)} on rank {rank}"  # to compare all with all takes long
              for name, value in json.loads(store.get("flags")).items() if flags.get(name) != value]
    if unlike or store.add("alike", 1) == world_size:  # a rank that differs, or the last of all: the others wait for it
        store.set("difference", "".join(unlike[:1]))
    if difference := store.get("difference").decode():
        def wait_for_readers() -> None:  # the store may end with rank 0, and a rank that comes late would wait for it
            with contextlib.suppress(RuntimeError):  # it has ended
                if store.add("have read it", 1) == world_size:
                    store.set("all have read it", "")
                store.wait(["all have read it"], timeout)

        is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of its machine: it says what differs before it waits
        atexit.register(wait_for_readers) if is_first else wait_for_readers()
        raise UserError(f"ranks were started with different flags: {difference}: give all ranks the same")
    dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size,
                            timeout=timeout)


def require_equal_counts() -> None:
    """Raises UserError, on all ranks, where they are in unlike numbers of process groups. Collective.

    torch names a group after its ranks and after the number of groups that the rank is in. Where these numbers differ,
    the members of the next group wait for each other under different names. So whenever some ranks make a group, each
    of the others makes one, too, if only of itself.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    own = torch.tensor([count, -count], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(extremes := own.clone(), dist.ReduceOp.MAX)
    if not (extremes == own).all():
        raise UserError(f"some ranks are in {-extremes[1]} process groups, others in {extremes[0]}: all have to make "
                        "equally many, so let each rank that a group leaves out make a group of its own")


def setup_process_group_manager(dp_size: int, pp_size: int, tp_size: int, generators: int | None = None,
                                generator_tp_size: int | None = None) -> None:
    global process_group_manager
    require_equal_counts()  # with what this process has made before
    process_group_manager = ProcessGroupManager(dp_size, pp_size, tp_size, generators or 0, generator_tp_size or 1)
    require_equal_counts()
    if dist.get_rank() == 0:
        print(process_group_manager.describe(), flush=True)
