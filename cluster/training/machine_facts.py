"""What a script tells about the machine it runs on: its processor, its network, its memory, how busy it is.

Linux keeps these in /proc; where there is none (macOS), the answer is coarser. Nothing depends on the processor's kind.
"""

import os
import platform
import socket
import struct
import time

import torch
import torch.distributed as dist

from metrics import peak_memory_gb


def processor_name(device: torch.device) -> str:
    """The GPU's name, or that of the CPU (of a Raspberry Pi, that of the board) with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    fields = dict(read_fields("/proc/cpuinfo"))
    name = fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def read_fields(path: str) -> list[tuple[str, str]]:
    """Lines like `name : value`; none where there is no such file."""
    try:
        with open(path) as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in lines]


def network() -> str:
    """The interface that reaches rank 0's machine, and this machine's address there."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: it asks which way packets would go
            address = probe.getsockname()[0]
    except OSError:
        return f"no way to {master}"
    chosen = os.environ.get("NCCL_SOCKET_IFNAME" if dist.get_backend() == "nccl" else "GLOO_SOCKET_IFNAME")
    return f"{chosen or interface_of(address)} {address}"


def interface_of(address: str) -> str:
    """The interface with this IPv4 address; "?" where the system doesn't say."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(query.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                except OSError:
                    continue  # an interface without an address
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except (ImportError, OSError):
        pass
    return "?"


def free_memory(device: torch.device) -> int:
    """Bytes that this process may take: what is free, shared with the other ranks of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, value in read_fields("/proc/meminfo"):
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # of a container: v2, v1
        try:
            with open(f"/sys/fs/cgroup/{limit}") as most, open(f"/sys/fs/cgroup/{used}") as now:
                available = min(available, int(most.read()) - int(now.read()))
        except (OSError, ValueError):
            pass  # no such controller, or "max"
    return max(available, 0) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def resident_gb() -> float:
    """Memory of this process that is in RAM now; its peak where the system doesn't say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:
        return peak_memory_gb()


class Utilisation:
    """How busy this process kept its cores, and the GPU was, since the last call, in percent; NaN where unknown.

    100 percent of the CPU is one core.
    """

    def __init__(self, device: torch.device):
        self.device, self.last = device, (time.perf_counter(), time.process_time())

    def percent(self) -> tuple[float, float]:
        (then, busy_then), self.last = self.last, (time.perf_counter(), time.process_time())
        gpu = float("nan")
        if self.device.type == "cuda":
            try:
                gpu = float(torch.cuda.utilization(self.device))
            except (ImportError, RuntimeError):
                pass  # it needs the package nvidia-ml-py
        return 100 * (self.last[1] - busy_then) / max(self.last[0] - then, 1e-9), gpu
