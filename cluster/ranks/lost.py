"""Whether a run is elastic, and what an error means: another rank is lost, or this machine lacks something."""

import datetime
import os
import re

import torch

VARIABLE = "ELASTIC_RUN"  # of the environment: what host_run.py tells its processes, as JSON
PATIENCE = 6  # seconds without an answer after which a process is lost
FOREVER = datetime.timedelta(days=30)  # time-out of groups whose ranks wait for a slow disk or link, or for a user
NEWCOMER = "another process is taken in"
LACKS = re.compile("out of memory|allocate memory|new thread|temporarily unavailable|CUDA error|cuDNN error|CUBLAS",
                   re.IGNORECASE)
LOST = re.compile("peer|onnection|ocket|imed out|timeout|Broken pipe|NCCL|TCPStore|remote process", re.IGNORECASE)


class MembershipChanged(RuntimeError):
    """The generation has ended: a process of it is gone, or another one is to be taken in."""


def is_elastic() -> bool:
    """Whether processes that are lost are started anew: the agent then says so in the environment, as torchrun does."""
    return VARIABLE in os.environ or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether it came of communicating with a rank that is gone."""
    is_ours = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
    return not is_ours and bool(isinstance(error, MembershipChanged) or LOST.search(str(error)))


def is_of_this_machine(error: BaseException) -> bool:
    """Whether it came of this machine's memory, disks or GPU: other machines would not meet it."""
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)):
        return not isinstance(error, (ConnectionError, TimeoutError))
    return isinstance(error, RuntimeError) and bool(LACKS.search(str(error)))
