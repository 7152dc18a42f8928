"""A rank's view of its machine, and of the other ranks: launching/host_facts.py has the facts of a host by itself."""

import course  # noqa: F401  before step 9's modules

import contextlib
import ctypes
import datetime
import functools
import os
import socket
import uuid

import torch
import torch.distributed as dist

import process_group_manager as pgm
from launching.host_facts import HOME, available_memory, interface_towards, read_fields

M_MMAP_THRESHOLD = -3  # of mallopt(3)


def network_name() -> str:
    """The interface that reaches rank 0's machine, and this machine's address there."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        name, address = interface_towards(master)
    except OSError as error:
        return f"no way to {master}: {error}"
    chosen = os.environ.get("NCCL_SOCKET_IFNAME" if dist.get_backend() == "nccl" else "GLOO_SOCKET_IFNAME")
    return f"{(chosen or name).removeprefix('=')} {address}"


def gather(value) -> list:
    """Every rank's value, on every rank. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def say(text: str) -> None:
    """Rank 0 prints it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


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


def places_of(hosts: list[str], among: list[str]) -> list[int | None]:
    """For each of the hosts its place `among` others, each place once; None for one that is not there."""
    left, places = list(among), []
    for host in hosts:
        places.append(left.index(host) if host in left else None)
        if host in left:
            left[places[-1]] = None
    return places


@functools.cache
def places() -> list[tuple[tuple[str, str], str | None]]:
    """this_host() of every rank, and its GPU's own number, None on a CPU. Collective at the first call."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid if torch.cuda.is_initialized() else None
    return gather((this_host(), gpu and str(gpu)))


def machines() -> list[tuple[str, str]]:
    """this_host() of every rank. Collective at the first call."""
    return [host for host, _ in places()]


def ranks_of_this_machine() -> int:
    """Not every launcher says how many these are, so the ranks tell each other where they are. As machines()."""
    return machines().count(this_host())


def ranks_sharing(device: torch.device) -> int:
    """How many ranks compute on this GPU, or run on this machine. As machines()."""
    if device.type == "cpu":
        return ranks_of_this_machine()
    gpus = [gpu for _, gpu in places()]
    return gpus.count(gpus[dist.get_rank()])


def free_memory(device: torch.device) -> int:
    """Bytes that this process may take: what is free, shared with the other ranks of this GPU or this machine.

    Collective at the first call.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return free // ranks_sharing(device)


def memory_of_process(field: str = "VmRSS") -> int:
    """Bytes of this process in the machine's memory, libraries included: now, or with VmHWM at most; 0 where no system
    tells."""
    return 1024 * int(read_fields("/proc/self/status").get(field, "0").split()[0])


def memory_below_peak() -> int:
    """Bytes that this process had at its peak and has no more now, as between two steps."""
    return max(0, memory_of_process("VmHWM") - memory_of_process())


def return_freed_memory() -> None:
    """From now on, what this process frees is the machine's again at once, in pieces of 128 KiB or more.

    glibc would raise that size to 32 MB by itself and keep smaller pieces for later, with gaps between them: the peak
    of a training process is then hundreds of MB above what its tensors take, and can't be predicted. Each new tensor
    costs the kernel new pages instead, which takes time: use it where memory is short. Does nothing where the C library
    is another one.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
        ctypes.CDLL(None).malloc_trim(0)


def once_per_machine(make):
    """Calls make() in one process of each machine and returns its result in all of them. All ranks call it together.

    Use it for work that is slow, or that two processes must not do at once. A UserError is raised on every rank.
    The others wait over gloo, because NCCL aborts a collective that takes minutes. Where the process that works is
    killed, on any machine, gloo's connections to it end, and so do all who wait.
    """
    first, outcome = machines().index(this_host()), None
    waiting = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
    with pgm.together(waiting):
        if dist.get_rank() == first:
            outcome = make()
    dist.destroy_process_group(waiting)
    return gather(outcome)[first]


def wait_for_all(what: str) -> None:
    """Until all ranks have come here. Once for each `what` of a generation. Collective.

    It is for those who end their groups next. The ranks meet in the store, since a barrier of gloo's hangs where the
    first to leave it shuts its connections while others are still in it.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what}/{dist.get_rank()}", "")
    store.wait([f"{what}/{rank}" for rank in range(dist.get_world_size())])


@functools.cache
def home_rank() -> int:
    """The first rank of the machine on which the run was started. What is for people is written, read and said there.

    Rank 0 may be anywhere: plans number the ranks, and an elastic torchrun sorts its hosts by address. For
    launch_cluster.sh see hosts.home_of; without it, and where a plan leaves that host idle or an elastic run has lost
    it, the host with the lowest node rank is taken. Collective at the first call.
    """
    distances = gather((HOME not in os.environ, int(os.environ.get("GROUP_RANK", 0))))
    return machines().index(machines()[distances.index(min(distances))])


def is_home() -> bool:
    """Whether this rank is home_rank()."""
    return dist.get_rank() == home_rank()


def from_rank(rank: int, make):
    """What make() returns on this rank, on every rank, or the UserError that it raises there. Collective."""
    outcome = None
    with pgm.together():
        if dist.get_rank() == rank:
            outcome = make()
    return gather(outcome)[rank]


def from_home(make):
    """As from_rank: what make() returns on home_rank()."""
    return from_rank(home_rank(), make)


def forget_ranks() -> None:
    """Call it where the ranks are numbered anew: what is known of their places no longer counts."""
    for known in (places, home_rank):
        known.cache_clear()
