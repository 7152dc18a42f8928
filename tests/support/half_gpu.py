"""train_distributed.py on ranks of which some have a GPU that is not there: `half_gpu.py 0,2 FLAGS`.

On these ranks torch.cuda says that there is a GPU, and the program takes the ways that it takes there: NCCL unless it
is told otherwise, bfloat16, events, fewer measured steps, the GPU's own number. All tensors are in host memory.
"""

import contextlib
import os
import pathlib
import sys
import time
from unittest import mock

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

import utils  # noqa: E402

has_gpu = os.environ["RANK"] in sys.argv.pop(1).split(",")
choose_device = utils.choose_device


class Event:
    def __init__(self, enable_timing: bool):
        self.at = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


def choose_host_memory(device: str, dtype: str):
    device, dtype, backend = choose_device(device, dtype)
    return torch.device("cpu"), dtype, backend


if has_gpu:
    facts = mock.Mock(uuid="GPU-0")  # also of a stream
    facts.name = "no GPU"
    mock.patch.multiple(
        torch.cuda, is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 8,
        set_device=lambda device: None, current_device=lambda: 0, get_device_properties=lambda device: facts,
        is_bf16_supported=lambda including_emulation: True,
        Event=Event, synchronize=lambda device=None: None, max_memory_allocated=lambda device=None: 10**9,
        empty_cache=lambda: None, mem_get_info=lambda device: (10**10, 10**10), current_stream=lambda: facts).start()
    torch.accelerator.current_accelerator = lambda check_available=False: None  # which a build for CUDA would ask
    utils.choose_device = choose_host_memory

from ranks import memory, placement  # noqa: E402
import train_distributed  # noqa: E402
from run.generation import end_of_elastic_run  # noqa: E402
from run import times  # noqa: E402

if has_gpu:
    ranks_sharing = placement.ranks_sharing
    memory.ranks_sharing = lambda device: ranks_sharing(torch.device("cuda", 0))
    times.MEASURE_EVERY["cpu"] = times.MEASURE_EVERY["cuda"]
with utils.one_clear_error(), end_of_elastic_run() if len(sys.argv) > 1 else contextlib.nullcontext():
    train_distributed.main()
