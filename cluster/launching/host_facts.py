"""Facts about the machine that this runs on: network, memory, processor, packages, disk and the project's files.

Only Python's standard library is needed, because `launch_cluster.sh --check` sends this very text to each host
(`python -c`): it answers even where the tutorial is missing or altered. Run like that, it reads requests, a line of
JSON each, from standard input and answers each by a line of JSON, until the input ends. Units are seconds and bytes.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
import time

SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface
PROJECT = ("step9_heterogeneous_pp", "cluster")  # what has to be the same on all hosts
MARK = "host_facts:"  # precedes an answer, because a login shell may print lines of its own
LISTENERS = []  # keeps the listening sockets open


def interfaces() -> dict[str, str]:
    """{name: IPv4 address} of the network interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(peer: str) -> tuple[str, str]:
    """(name, address) of the interface by which packets leave for the host `peer`; no packet is sent.

    Raises OSError where `peer` is not known, where no way leads to it, or where the interface has another address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address = probe.getsockname()[0]
    for name, its_address in interfaces().items():
        if its_address == address:
            return name, address
    raise OSError(f"packets for {peer} leave from {address}, which is the first address of no interface")


def run_interface(chosen: str | None, peer: str | None) -> tuple[str | None, str | None]:
    """(name, address) of the interface of a run: the `chosen` one, else the one towards the host `peer`.

    (None, None) where neither is given, as for a run on a single host. Raises OSError where there is no such
    interface, and where `peer` is this machine itself by a wrong line of its /etc/hosts.
    """
    if chosen:
        if chosen not in (here := interfaces()):
            others = ", ".join(name for name in here if name != "lo")
            raise OSError(f"there is no interface {chosen} with an IPv4 address here, but there is: {others}")
        return chosen, here[chosen]
    if not peer:
        return None, None
    name, address = interface_towards(peer)
    if address.startswith("127."):
        raise OSError(f"{peer} is 127.0.0.1, this machine itself, by its hosts file")
    return name, address


def read_fields(path: str) -> dict[str, str]:
    """Lines like `name : value`; none where there is no such file, as on systems other than Linux."""
    try:
        with open(path) as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in lines}


def processor() -> str:
    """The name of the CPU (of a Raspberry Pi, that of the board) with the number of its cores."""
    fields = read_fields("/proc/cpuinfo")
    name = fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def available_memory() -> int:
    """Bytes that new processes can have without swapping, within the limit of a container (cgroup 2 or 1)."""
    if field := read_fields("/proc/meminfo").get("MemAvailable"):
        available = int(field.split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # there is no such controller, or no limit
            with open(f"/sys/fs/cgroup/{limit}") as most, open(f"/sys/fs/cgroup/{used}") as now:
                available = min(available, int(most.read()) - int(now.read()))
    return max(available, 0)


def network(chosen: str | None, peer: str | None) -> dict:
    """The interface of a run and its address, or `interface_error`, and what this host's own name resolves to."""
    answer = {"host_name": socket.gethostname(), "own_address": None, "interface": None, "address": None}
    with contextlib.suppress(OSError):
        answer["own_address"] = socket.gethostbyname(answer["host_name"])
    try:
        answer["interface"], answer["address"] = run_interface(chosen, peer)
    except OSError as error:
        answer["interface_error"] = str(error)
    return answer


def packages() -> dict:
    """Versions, and the GPUs that torch sees."""
    answer = {"Python": "{}.{}".format(*sys.version_info), "torch": None, "CUDA": None, "transformers": None, "GPU": []}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        answer["transformers"] = importlib.metadata.version("transformers")
    try:
        import torch  # imported here: it takes seconds
    except (ImportError, OSError) as error:
        return {**answer, "torch_error": str(error)}
    answer["torch"], answer["CUDA"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        answer["GPU"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return answer


def project(root: str) -> str | None:
    """A hash over the names and contents of the Python files in PROJECT's folders; None where there are none."""
    digest = hashlib.sha256()
    names = [name for folder in PROJECT for name in glob.glob(f"{folder}/**/*.py", root_dir=root, recursive=True)]
    for name in sorted(names):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(f"{name} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return digest.hexdigest()[:8] if names else None


def disk(root: str) -> dict:
    """Free bytes where runs/ is or will be, and what hinders writing there."""
    runs = os.path.join(root, "runs")
    while not os.path.isdir(runs):
        runs = os.path.dirname(runs)
    answer = {"runs": runs, "free_disk": shutil.disk_usage(runs).free}
    try:
        with tempfile.TemporaryFile(dir=runs) as file:
            file.write(bytes(4096))
    except OSError as error:
        answer["disk_error"] = str(error)
    return answer


def listen(port: int) -> dict:
    """Listens on `port` (0: any that is free) until this process ends. A connection succeeds without being accepted."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen()
    except OSError as error:
        return {"port": port, "listen_error": error.strerror}
    LISTENERS.append(listener)
    return {"port": listener.getsockname()[1]}


def connect(target: list) -> str | None:
    """What hinders a connection to target = [address, port] within three seconds; None: nothing."""
    try:
        socket.create_connection(target, timeout=3).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def answer(request: dict):
    """The time, the outcome of connections, or all facts, as request["ask"] says."""
    if request["ask"] == "clock":
        return time.time()
    if request["ask"] == "connect":
        return [connect(target) for target in request["targets"]]
    root = os.path.abspath(os.path.expanduser(request["root"]))
    return {**network(request["interface"], request["peer"]), **listen(request["port"]), **packages(), **disk(root),
            "root": root, "project": project(root), "free_memory": available_memory()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)
