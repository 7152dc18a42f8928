"""One clear error of a program on several ranks, whoever has started them."""

import contextlib
import datetime
import os
import sys

import torch.distributed as dist

from hosts import exits
from ranks.collectives import default_store
from utils import UserError, one_clear_error

PATIENCE = datetime.timedelta(seconds=8)  # for rank 0, which may be slower to fail
HEARD = datetime.timedelta(seconds=3)  # for the others to hear of its error: its process may hold their store


@contextlib.contextmanager
def one_error_of_all(out_of_memory: str):
    """Wraps main(), as one_clear_error does. An error that rank 0 has as well is said by rank 0 alone.

    one_clear_error has the others wait for torchrun, which ends them. Slurm, MPI and an agent of ours do not. With any
    error all leave in the same way, which waits for no thread.
    """
    store = None
    try:
        with one_clear_error(out_of_memory):
            try:
                with full_disks_as_user_errors():
                    yield
            except UserError as error:
                try:
                    store = store_of_all()
                    if store and hear(store, str(error)):
                        sys.stderr = open(os.devnull, "w")
                except RuntimeError:  # rank 0 has said nothing: whoever has waited for that need not wait again
                    store, os.environ["RANK"] = None, "0"
                raise
    except SystemExit as end:
        with contextlib.suppress(RuntimeError):  # the others have not failed
            if store and os.environ.get("RANK") == "0":
                store.wait([f"heard/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))], HEARD)
        exits.leave(end.code or exits.DONE)
    except Exception:
        sys.excepthook(*sys.exc_info())
        exits.leave(exits.FAILED)


@contextlib.contextmanager
def full_disks_as_user_errors():
    """Of what is printed, too. Whoever writes a file may have said more."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in exits.OF_A_FULL_DISK:
            raise
        place = error.filename or "a file, or what is printed"
        raise UserError(f"can't write {place} ({error.strerror}): make room, or write elsewhere") from None


def store_of_all() -> dist.Store | None:
    """That of the process group or, before the ranks have met, what torchrun's variables name. None for one process."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    is_master = os.environ["RANK"] == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    if dist.is_initialized():
        is_master = False  # the store is there already
        with contextlib.suppress(UserError):
            return dist.PrefixStore("errors", default_store())
    return dist.PrefixStore("errors", dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None,
                                                    is_master, PATIENCE, wait_for_workers=False))


def hear(store: dist.Store, error: str) -> bool:
    """Tells the others what rank 0 says; on them, whether it says the same. Raises RuntimeError where it says nothing.
    """
    if os.environ["RANK"] == "0":
        store.set("0", error)
        return False
    store.wait(["0"], PATIENCE)
    says = store.get("0").decode()
    store.set(f"heard/{os.environ['RANK']}", "")
    return says == error
