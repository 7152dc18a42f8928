"""What all ranks do together: collect a value of each, hear the value of one, meet before their groups end."""

import torch.distributed as dist

import process_group_manager as pgm
from pipeline_template import names_of


def gather(value) -> list:
    """Every rank's value, on every rank. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def say(text: str) -> None:
    """Rank 0 prints it."""
    if dist.get_rank() == 0:
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


def from_rank(rank: int, make):
    """What make() returns on this rank, on every rank, or the UserError that it raises there. Collective."""
    outcome = None
    with pgm.together():
        if dist.get_rank() == rank:
            outcome = make()
    return gather(outcome)[rank]
