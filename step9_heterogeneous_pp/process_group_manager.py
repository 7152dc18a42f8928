"""The ranks as a grid: pipelines with different numbers of stages (DP) x their stages (PP) x tensor parallel (TP).

10 ranks, two pipelines of 3 and 2 stages, tp_size 2. Ranks are counted pipeline after pipeline, and TP varies fastest:

                 tp 0   tp 1                 a tp group is a row            [0, 1] [2, 3] [4, 5] [6, 7] [8, 9]
    dp 0  pp 0      0      1                 a pp group is a column         [0, 2, 4] [1, 3, 5] [6, 8] [7, 9]
          pp 1      2      3                     within one block
          pp 2      4      5
    dp 1  pp 0      6      7
          pp 1      8      9

A group for gradients holds the owners of a module: where the stages hold 3, 3, 2 and 5, 3 layers, layers 3 and 4 are on
[2, 6] and [3, 7], and layer 5 is on [2, 8] and [3, 9]. In step 8, all pipelines have the same number of stages.
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


class Mismatch(UserError, AssertionError):
    """Pipelines that do not fit the processes or the numbers of micro-batches. Other systems assert that they do."""


class ProcessGroupManager:
    """The coordinates of this rank in the grid, and process groups through it.

    For tp and pp: `<axis>_group` to communicate in, `<axis>_world_size`, and `<axis>_rank`, the position
    of this rank in the group. `dp_rank` is the number of this rank's pipeline. All ranks make one together.
    Raises Mismatch where the pipelines need another number of processes.
    """

    def __init__(self, stages_per_pipeline: list[int], tp_size: int):
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if (needed := sum(stages_per_pipeline) * tp_size) != self.world_size:
            raise Mismatch(f"Number of ranks in pipeline templates does not match world size: stages "
                           f"{stages_per_pipeline} x tp_size={tp_size} need {needed} processes, but {self.world_size} "
                           f"run: use torchrun --nproc_per_node {needed}, or change the sizes")
        ranks = torch.arange(self.world_size).split([stages * tp_size for stages in stages_per_pipeline])
        self.ranks = [block.view(-1, tp_size) for block in ranks]  # ranks[dp][pp, tp]: a global rank
        self.dp_rank = next(dp for dp, block in enumerate(self.ranks) if self.global_rank in block)
        block = self.ranks[self.dp_rank]
        self.pp_rank, self.tp_rank = (block == self.global_rank).nonzero().flatten().tolist()
        dp_size, pp_size = len(self.ranks), len(block)
        self.dp_world_size, self.pp_world_size, self.tp_world_size = dp_size, pp_size, tp_size
        self.topology = {"dp_size": dp_size, "stages_per_pipeline": stages_per_pipeline, "tp_size": tp_size,
                         "world_size": self.world_size}

        def make_group(ranks: torch.Tensor) -> dist.ProcessGroup:  # its members make it, and nobody else
            return dist.new_group(ranks.tolist(), timeout, use_local_synchronization=True)

        stages = block[:, self.tp_rank]  # of this rank's pipeline
        self.tp_group = make_group(block[self.pp_rank])
        self.pp_group = make_group(stages)
        self.pp_backward_group = make_group(stages)  # for gradients: they go back
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

        self.pp_is_first_stage = self.pp_rank == 0
        self.pp_is_last_stage = self.pp_rank == pp_size - 1
        self.pp_prev_rank = None if self.pp_is_first_stage else stages[self.pp_rank - 1].item()
        self.pp_next_rank = None if self.pp_is_last_stage else stages[self.pp_rank + 1].item()
        # One rank of all logs. Only the last stage of a pipeline computes the loss, so it is a last stage.
        self.is_logging_rank = self.dp_rank == 0 and self.tp_rank == 0 and self.pp_is_last_stage

    def group_of(self, places: set[tuple[int, int]]) -> dist.ProcessGroup | None:
        """The group of the ranks at some places (pipeline, stage) with this tp rank. All ranks ask in the same order.

        None where this rank is not there, or the place is the only one.
        """
        ranks = tuple(sorted({self.ranks[dp][pp, self.tp_rank].item() for dp, pp in places}))
        if len(ranks) < 2:
            return None
        if ranks not in self.groups:
            members = ranks if self.global_rank in ranks else [self.global_rank]  # so that all make as many
            self.groups[ranks] = dist.new_group(members, timeout, use_local_synchronization=True)
            if self.global_rank in ranks and dist.get_backend() == "nccl":  # connects at its first use, and blocks
                dist.all_reduce(torch.zeros(1, device="cuda"), group=self.groups[ranks])
        return self.groups[ranks] if self.global_rank in ranks else None

    def __str__(self) -> str:
        stages = "+".join(str(len(block)) for block in self.ranks)
        return f"DP({self.dp_world_size})-PP({stages})-TP({self.tp_world_size})-Rank({self.global_rank})"

    def describe(self) -> str:
        """One line per pipeline (of the first 16): the ranks of its stages."""
        lines = [f"pipeline {dp}: " + ", ".join(f"stage {pp} on {ranks.tolist()}" for pp, ranks in enumerate(block))
                 for dp, block in enumerate(self.ranks[:16])]
        return "\n".join([f"{self.world_size} rank{'s' * (self.world_size > 1)}, tp {self.tp_world_size}", *lines])


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


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None = None):
    """Around what a rank does by itself, such as reading files: where it fails on one, all raise the error. Collective.

    UserError and OSError become a UserError, a GPU's lack of memory stays what it is. Any other error is a fault of the
    program, and stays on its rank.
    """
    error = None
    try:
        yield
    except (UserError, OSError) as problem:
        error = str(problem) or repr(problem)
    except torch.OutOfMemoryError as problem:
        error = problem
    dist.all_gather_object(errors := [None] * dist.get_world_size(), error, group)
    for rank, error in enumerate(errors):
        if error is not None:
            kind = UserError if isinstance(error, str) else torch.OutOfMemoryError
            raise kind(f"rank {rank}: {error}" if rank else str(error))


def setup_process_group_manager(stages_per_pipeline: list[int], tp_size: int) -> None:
    global process_group_manager
    require_equal_counts()  # with what this process has made before
    process_group_manager = ProcessGroupManager(stages_per_pipeline, tp_size)
    require_equal_counts()
    if dist.get_rank() == 0:
        print(process_group_manager.describe(), flush=True)
