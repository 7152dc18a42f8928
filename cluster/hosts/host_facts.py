"""Facts about the machine that this runs on: network, memory, processor, packages, disk and the project's files.

Only Python's standard library is needed, because `launch_cluster.sh --check` sends this very text to each host
(`python -c`): it answers even where the tutorial is missing or altered. Run like that, it reads two lines of JSON from
standard input and answers each by one: what to report on, then which addresses to connect to. Units: seconds, bytes.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import time

OWN_GROUPS, CGROUPS = "/proc/self/cgroup", "/sys/fs/cgroup"
SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface
PROJECT = ("step9_heterogeneous_pp", "cluster")  # what has to be the same on all hosts
MARK = "host_facts:"  # precedes an answer, because a login shell may print lines of its own
MIN_DISK, MIN_MEMORY = 1e9, 0.5e9  # bytes
LOOK_UPS, PORT_PATIENCE = 20, 15.0  # until a name is unknown; seconds until a port is taken
HOME = "LAUNCH_CLUSTER_HOME"  # the variable that the host has on which the run was started: files for people go there
ASKS = "write a line, or end with Ctrl-D"  # what a script prints that reads its input: launch_cluster.sh then sends it
STOPS_WITHIN = "LAUNCH_CLUSTER_STOPS_WITHIN"  # the variable with a file's path, into which a training writes seconds


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

    A name that is not found is looked up again. Raises OSError where `peer` is not known, where no
    way leads to it, or where the interface has another address.
    """
    for left in range(LOOK_UPS, -1, -1):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                address = probe.getsockname()[0]
            break
        except socket.gaierror:
            if not left:
                raise
        time.sleep(0.2)
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


def control_groups(controller: str) -> list[str]:
    """The directories of the control groups that limit this process, of cgroup 1 or 2: its own and those above it.

    In a container the topmost one is the container's, and the path of its own may not be there.
    """
    found = []
    with contextlib.suppress(OSError):  # as on systems other than Linux
        with open(OWN_GROUPS) as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if controllers in ("", controller) or controller in controllers.split(","):
                    top = os.path.join(CGROUPS, controller if controllers else "")
                    parts = path.strip("/").split("/")
                    found += [os.path.join(top, *parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def read_numbers(group: str, *names: str) -> list[int]:
    """The numbers in files of a control group; none where one is missing, or says that there is no limit."""
    words = []
    try:
        for name in names:
            with open(os.path.join(group, name)) as file:
                words += file.read().split()
        return list(map(int, words))
    except (OSError, ValueError):
        return []


def usable_cores() -> float:
    """Processor cores that this process may use: by its affinity, and by the CPU quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            if (numbers := read_numbers(group, *names)) and numbers[0] > 0:  # -1: no limit
                cores = min(cores, numbers[0] / numbers[1])
    return cores


def page_cache(group: str) -> int:
    """Bytes of files that the kernel keeps in memory for a control group, and gives up where memory is needed: those
    that no process has mapped."""
    fields = {}
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(group, "memory.stat")) as file:
            fields = {name: int(number) for name, number in map(str.split, file)}
    total = "total_" * ("total_active_file" in fields)  # in version 1, with the groups inside of this one
    files, inactive, mapped, mapped_in_1 = (fields.get(f"{total}{name}", 0) for name in (
        "active_file", "inactive_file", "file_mapped", "mapped_file"))
    return max(0, files + inactive - mapped - mapped_in_1)


def available_memory() -> int:
    """Bytes that new processes can have without swapping, within the limits of a container."""
    if field := read_fields("/proc/meminfo").get("MemAvailable"):
        available = int(field.split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in control_groups("memory"):
        for names in ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"):
            if numbers := read_numbers(group, *names):
                available = min(available, numbers[0] - numbers[1] + page_cache(group))
    return max(available, 0)


class Report:
    """What this host can see by itself. It listens on `port` (0: any that is free) as long as this process lives.

    `cells`: of its row in the table of --check. `problems`: [column, what is wrong, details, cure] each.
    """

    def __init__(self, root: str, interface: str | None, peer: str | None, port: int):
        self.cells, self.problems = {"torch": "none", "CUDA": "none", "project": "none"}, []
        self.root = os.path.abspath(os.path.expanduser(root))
        self.check_packages()
        self.check_project()
        self.check_space()
        self.check_network(interface, peer)
        self.check_port(port)

    def fail(self, column: str, name: str, details: str, cure: str) -> None:
        self.problems.append([column, name, details, cure])

    def check_packages(self) -> None:
        """Versions, and the GPUs that torch sees."""
        self.cells["Python"] = "{}.{}".format(*sys.version_info)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            self.cells["transformers"] = importlib.metadata.version("transformers")
        try:
            import torch  # imported here: it takes seconds
        except (ImportError, OSError) as error:
            return self.fail("torch", "no torch", str(error), "pip install torch there, or give this host a python=")
        self.cells |= {"torch": torch.__version__, "CUDA": torch.version.cuda or "none"}
        if torch.cuda.is_available():
            gpus = range(torch.cuda.device_count())
            self.cells["GPU"] = ", ".join(torch.cuda.get_device_name(index) for index in gpus)

    def check_project(self) -> None:
        """A hash of the names and contents of the Python files."""
        digest, names = hashlib.sha256(), []
        for folder in PROJECT:
            names += sorted(glob.glob(f"{folder}/**/*.py", root_dir=self.root, recursive=True))
        for name in names:
            with open(os.path.join(self.root, name), "rb") as file:
                digest.update(f"{name} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
        if names:
            self.cells["project"] = digest.hexdigest()[:8]
        else:
            self.fail("project", "no project", f"nothing of it is in {self.root}",
                      "--install copies it there; or give this host a dir=")

    def check_space(self) -> None:
        """Memory, and the disk where runs/ is or will be."""
        runs = os.path.join(self.root, "runs")
        while not os.path.isdir(runs):
            runs = os.path.dirname(runs)
        disk, memory = shutil.disk_usage(runs).free, available_memory()
        self.cells |= {"disk": f"{disk / 1e9:.1f} GB", "memory": f"{memory / 1e9:.1f} GB"}
        if disk < MIN_DISK:
            self.fail("disk", "full disk", f"{runs}: {self.cells['disk']} free, {MIN_DISK / 1e9:.0f} GB wanted",
                      "make room there: du -sh runs/* shows what old runs take")
        elif not os.access(runs, os.W_OK):
            self.fail("disk", "no writing", runs, "make it writable for this user")
        if memory < MIN_MEMORY:
            self.fail("memory", "little memory", f"{self.cells['memory']} free", "end other programs there")

    def check_network(self, chosen: str | None, peer: str | None) -> None:
        """The interface of the run. What the host's own name resolves to does not matter: Debian writes 127.0.1.1."""
        interface, self.address = None, None
        try:
            interface, self.address = run_interface(chosen, peer)
        except OSError as error:
            self.fail("interface", "no interface", str(error), "give this host an iface=: ip -brief address lists them")
        self.cells["interface"] = f"{interface or ''} {self.address or ''}".strip()
        ways = {self.address or "127.0.0.1"}
        with contextlib.suppress(OSError):
            ways.add(socket.gethostbyname(peer or "127.0.0.1"))
        self.public = sorted(way for way in ways if ipaddress.ip_address(way).is_global)

    def check_port(self, port: int) -> None:
        """Other hosts can connect from now on; nobody needs to accept."""
        self.port = None
        try:
            Report.listener = listen(port)  # of the class: what the report itself has is sent
            self.port = port = Report.listener.getsockname()[1]
        except OSError as error:
            self.fail("port", "blocked port", str(error), f"--port {port + 1}, or end that")
        self.cells["port"] = str(port)


def listen(port: int, patience: float = 0.0) -> socket.socket:
    """A socket that listens at a port of this host. Raises OSError where another one has it after `patience` seconds,
    as the process of a run that is just ending does."""
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_server(("", port))
        except OSError as error:
            if time.monotonic() > until:
                raise OSError(f"{port}: {os.strerror(error.errno)}, by {holder(port)}") from None
        time.sleep(0.2)


def holder(port: int) -> str:
    """The process that listens at a port of this host, as far as this user may see it."""
    with contextlib.suppress(OSError):
        rows = subprocess.run(["ss", "-Hltnp", f"sport = :{port}"], capture_output=True, text=True).stdout
        if found := re.search(r'"(.*?)",pid=(\d+)', rows):
            return f"process {found[2]} ({found[1]})"
    return "another program or an earlier run"


def print_rows(table: list[list]) -> None:
    """Columns as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip(), flush=True)


def connect(address: str, port: int) -> str | None:
    """What hinders a connection within three seconds; None: nothing."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


if __name__ == "__main__":
    print(MARK + json.dumps(vars(Report(**json.loads(sys.stdin.readline())))), flush=True)
    for line in sys.stdin:
        answer = {"clock": time.time(), "errors": [connect(*address) for address in json.loads(line)]}
        print(MARK + json.dumps(answer), flush=True)
