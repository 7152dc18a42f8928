"""What `launch_cluster.sh --check` asks a host about itself: packages, network, clock, disk and memory.

It needs Python and nothing beside it: the launcher sends this very text to each host (`python -c`), so that it also
answers where the tutorial is missing, old or altered. Requests come as lines of JSON on standard input, each is
answered by one line of JSON, and when the input ends so does this. Seconds and bytes.
"""

import fcntl
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
MARK = "host_facts:"  # begins an answer, as a login shell may print lines of its own
LISTENERS = []  # a listener that nobody holds would be closed


def interfaces() -> dict[str, str]:
    """{name: IPv4 address} of the network interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(peer: str) -> tuple[str, str]:
    """(name, address) of the interface by which packets leave for the host `peer`; no packet is sent.

    Raises OSError where `peer` is not known, or there is no way to it, or it is this very machine's loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address = probe.getsockname()[0]
    if address.startswith("127."):
        raise OSError(f"{peer} is 127.0.0.1, this machine itself, by its hosts file")
    for name, its_address in interfaces().items():
        if its_address == address:
            return name, address
    raise OSError(f"packets for {peer} leave from {address}, which is the first address of no interface")


def network(interface: str | None, peer: str | None) -> dict:
    """The interface of a run and its address, or `interface_error`; what this host's own name resolves to.

    With one host there is no peer, and nothing to find.
    """
    answer = {"host_name": socket.gethostname(), "interface": None, "address": None}
    try:
        answer["own_address"] = socket.gethostbyname(answer["host_name"])
    except OSError:
        answer["own_address"] = None
    try:
        if interface and interface not in interfaces():
            here = ", ".join(name for name in interfaces() if name != "lo")
            raise OSError(f"there is no interface {interface} with an IPv4 address here, but there is: {here}")
        if interface:
            answer["interface"], answer["address"] = interface, interfaces()[interface]
        elif peer:
            answer["interface"], answer["address"] = interface_towards(peer)
    except OSError as error:
        answer["interface_error"] = str(error)
    return answer


def packages() -> dict:
    """Versions, and the GPUs that torch sees."""
    answer = {"python": "{}.{}".format(*sys.version_info), "torch": None, "cuda": None, "gpus": []}
    try:
        answer["transformers"] = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        answer["transformers"] = None
    try:
        import torch  # imported here: it takes seconds
    except (ImportError, OSError) as error:
        return {**answer, "torch_error": str(error)}
    answer["torch"], answer["cuda"] = torch.__version__, torch.version.cuda
    if torch.cuda.is_available():
        answer["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return answer


def project(folder: str) -> str | None:
    """A hash over the names and the contents of the step's Python files; None where there are none."""
    digest = hashlib.sha256()
    names = sorted(name for name in os.listdir(folder) if name.endswith(".py")) if os.path.isdir(folder) else []
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            digest.update(f"{name} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return digest.hexdigest()[:8] if names else None


def disk(folder: str) -> dict:
    """Free bytes where runs/ is or will be, beside the step directories, and what hinders writing there."""
    runs = os.path.join(os.path.dirname(os.path.abspath(folder)), "runs")
    while not os.path.isdir(runs):
        runs = os.path.dirname(runs)
    answer = {"runs": runs, "free_disk": shutil.disk_usage(runs).free}
    try:
        with tempfile.TemporaryFile(dir=runs) as file:
            file.write(bytes(4096))
    except OSError as error:
        answer["disk_error"] = str(error)
    return answer


def memory() -> int | None:
    """Bytes that a new process can have without pushing out others."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def listen(port: int) -> dict:
    """Listens on `port` (0: any that is free) until this process ends; nobody needs to accept for others to connect."""
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
    if request["ask"] == "clock":
        return time.time()
    if request["ask"] == "connect":
        return [connect(target) for target in request["targets"]]
    folder = os.path.expanduser(request["folder"])
    return {**network(request["interface"], request["peer"]), **listen(request["port"]), **packages(), **disk(folder),
            "project": project(folder), "free_memory": memory(), "machine": platform.machine()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)
