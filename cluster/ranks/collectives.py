"""What all ranks do together: collect a value of each, have one do something for all, meet before their groups end."""

from collections.abc import Callable

import torch.distributed as dist

import process_group_manager as pgm
from pipeline_template import names_of
from ranks.lost import FOREVER


def gather(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, on every rank, in the default group or another one of all ranks. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value, group)
    return everyone


def once(rank: int, make: Callable):
    """What make() returns on `rank`, on every rank that names this one. A UserError there is raised on all. Collective.

    home_rank() does what is done once for all, and machine_rank() what is done once on each machine, because it is slow
    or because two processes must not do it at once. The others wait over gloo, because NCCL aborts a collective that
    takes minutes. Where a process that works is killed, on any machine, gloo's connections to it end, and so do all who
    wait.
    """
    outcome, waiting = None, dist.new_group(backend="gloo", timeout=FOREVER)
    with pgm.together(waiting):
        if dist.get_rank() == rank:
            outcome = make()
    dist.destroy_process_group(waiting)
    return gather(outcome)[rank]


def say(text: str, rank: int = 0) -> None:
    """This rank prints it: 0 or, where it is about what the run leaves for people, home_rank()."""
    if dist.get_rank() == rank:
        print(text, flush=True)


@names_of("torch")
def default_store() -> dist.Store:
    """That of the process group."""
    return dist.distributed_c10d._get_default_store()


def wait_for_all(what: str) -> None:
    """Until all ranks have come here. Once for each `what` of a generation. Collective.

    It is for those who end their groups next. The ranks meet in the store, since a barrier of gloo's hangs where the
    first to leave it shuts its connections while others are still in it.
    """
    store = default_store()
    store.set(f"{what}/{dist.get_rank()}", "")
    store.wait([f"{what}/{rank}" for rank in range(dist.get_world_size())])
