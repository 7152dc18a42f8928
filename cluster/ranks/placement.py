"""A rank's view of its machine, and of the other ranks: hosts/host_facts.py has the facts of a host by itself."""

import atexit
import contextlib
import functools
import os
import socket
import sys
import uuid

import torch
import torch.distributed as dist

import process_group_manager as pgm
from hosts.host_facts import HOME, interface_towards
from ranks.collectives import default_store, gather, wait_for_all
from ranks.lost import FOREVER, is_elastic


def this_host() -> tuple[str, str]:
    """The name of this machine, and its address in the network of the run or, where it has none, that of its card."""
    address = f"{uuid.getnode():012x}"
    with contextlib.suppress(OSError):
        _, address = interface_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return socket.gethostname(), address


def host_names(hosts: list[tuple[str, str]], known: list[str] = ()) -> list[str]:
    """What each this_host() is called: by its name or, where several machines have the same one, by its address.

    `known`: what hosts are called in a file, of which some may be gone.
    """
    names = [name for name, _ in set(hosts)]
    return [address if names.count(name) > 1 or address in known else name for name, address in hosts]


def positions_of(hosts: list[str], among: list[str]) -> list[int | None]:
    """For each of the hosts its position `among` others, each position once; None for one that is not there."""
    left = {}
    for position, host in enumerate(among):
        left.setdefault(host, []).append(position)
    return [left[host].pop(0) if left.get(host) else None for host in hosts]


@functools.cache
def hardware_of_ranks() -> list[tuple[tuple[str, str], str | None]]:
    """this_host() of every rank, and its GPU's own number, None on a CPU. Collective at the first call."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid if torch.cuda.is_initialized() else None
    return gather((this_host(), gpu and str(gpu)))


def machines() -> list[tuple[str, str]]:
    """this_host() of every rank. Collective at the first call."""
    return [host for host, _ in hardware_of_ranks()]


def machine_rank() -> int:
    """The first rank of this machine. As machines()."""
    return machines().index(this_host())


def ranks_sharing(device: torch.device) -> int:
    """How many ranks compute on this GPU, or run on this machine: not every launcher says so. As machines()."""
    if device.type == "cpu":
        return machines().count(this_host())
    gpus = [gpu for _, gpu in hardware_of_ranks()]
    return gpus.count(gpus[dist.get_rank()])


@functools.cache
def home_rank() -> int:
    """The first rank of the machine on which the run was started. What is for people is written, read and said there.

    Rank 0 may be anywhere: plans number the ranks, and an elastic torchrun sorts its hosts by address. For
    launch_cluster.sh see inventory.home_of. Without it, where a plan leaves that host idle, and where an elastic run
    has lost it, the host with the lowest node rank is taken. Collective at the first call.
    """
    distances = gather((HOME not in os.environ, int(os.environ.get("GROUP_RANK", 0))))
    return machines().index(machines()[distances.index(min(distances))])


def is_home() -> bool:
    """Whether this rank is home_rank()."""
    return dist.get_rank() == home_rank()


def forget_ranks() -> None:
    """Call it where the ranks are numbered anew: what is known of their machines no longer counts."""
    for known in (hardware_of_ranks, home_rank):
        known.cache_clear()


def renumber_ranks(order: list[int]) -> None:
    """Makes the process group anew with the ranks in this `order`. Idle processes wait for the end, and exit.

    Call it before any process group is made besides the default one. Collective.
    """
    rank, backend, store = dist.get_rank(), dist.get_backend(), default_store()
    if order == list(range(dist.get_world_size())):
        return
    wait_for_all("renumbered")
    dist.destroy_process_group()
    forget_ranks()
    if rank not in order:
        try:
            store.wait(["ended"], FOREVER)
        except RuntimeError:  # the store may end with rank 0's process
            if is_elastic():
                raise
        sys.exit(0)

    def tell_idle() -> None:
        with contextlib.suppress(RuntimeError):  # of a generation that has ended
            store.set("ended", "")

    atexit.register(tell_idle)
    dist.init_process_group(backend, store=dist.PrefixStore("planned", store), rank=order.index(rank),
                            world_size=len(order), timeout=pgm.timeout)
