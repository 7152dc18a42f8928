"""One clear error of a program on several ranks, whoever has started them."""

import contextlib
import datetime
import os
import sys

import torch.distributed as dist

from hosts import exits
from utils import UserError, one_clear_error

PATIENCE = datetime.timedelta(seconds=8)  # for rank 0, which may be slower to fail
HEARD = datetime.timedelta(seconds=3)  # for the others to hear of its error: its process may hold their store


@contextlib.contextmanager
def one_error_of_all(out_of_memory: str):
    """Wraps main(), as one_clear_error does. An error that rank 0 has as well is said by rank 0 alone.

    one_clear_error has the others wait for torchrun, which ends them. Slurm, MPI and an agent of ours do not. All leave
    in the same way, which waits for no thread and no other rank.
    """
    try:
        with one_clear_error(out_of_memory):
            try:
                yield
            except UserError as error:
                if dist.is_initialized() and dist.get_world_size() > 1:
                    if rank_0_says(str(error)):
                        sys.stderr = open(os.devnull, "w")
                    elif dist.get_rank():
                        os.environ["RANK"] = "0"  # it has waited, and speaks for itself
                raise
    except SystemExit as end:
        exits.leave(end.code or exits.DONE)


def rank_0_says(error: str) -> bool:
    """Whether this is another rank than 0, and rank 0 has the same error. All that fail at about the same time ask."""
    store, rank, same = dist.distributed_c10d._get_default_store(), dist.get_rank(), False
    with contextlib.suppress(RuntimeError):  # it has none, or is gone
        if rank == 0:
            store.set("error", error)
            store.wait([f"error/heard/{other}" for other in range(1, dist.get_world_size())], HEARD)
        else:
            store.wait(["error"], PATIENCE)
            same = store.get("error").decode() == error
            store.set(f"error/heard/{rank}", "")
    return same
