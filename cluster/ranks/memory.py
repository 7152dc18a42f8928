"""The memory that a process may still take, and what it has taken."""

import contextlib
import ctypes

import torch

from hosts.host_facts import available_memory, read_fields
from ranks.placement import ranks_sharing

# The share of the free memory that what is planned may take. The rest is for what no plan counts: gaps between pieces
# of memory, buffers of libraries, and what other programs of the machine begin to take.
USABLE_MEMORY = 0.9
M_MMAP_THRESHOLD = -3  # of mallopt(3)


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
