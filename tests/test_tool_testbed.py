"""The test bed: three hosts that have names, sshd, throttled cables and unlike speeds, and nothing left of them."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
from bed import NODES, SCRIPT, STATE, bed, cluster, start
from launch import environment

pytestmark = pytest.mark.usefixtures(bed.__name__)
MARKER = "98765.4321"  # seconds that nobody else sleeps
# A server takes N bytes and answers with N; a client prints the seconds of each direction. Start-up is not in them.
TRANSFER = """
import socket, sys, time
host, number = sys.argv[1], int(sys.argv[2])
if host == "serve":
    connection, _ = socket.create_server(("", 7000)).accept()
    print("up", flush=True)
else:
    for attempt in range(100):
        try:
            connection = socket.create_connection((host, 7000), timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
def take():
    left = number
    while left:
        left -= len(connection.recv(min(left, 65536)))
if host == "serve":
    take(), connection.sendall(b"k"), connection.recv(1), connection.sendall(bytes(number)), connection.recv(1)
else:
    began = time.perf_counter()
    connection.sendall(bytes(number)), connection.recv(1)
    sent = time.perf_counter()
    connection.sendall(b"k"), take()
    print(sent - began, time.perf_counter() - sent)
"""
# Computes for 0.15 s; prints the seconds that passed per second of it, and what part of them were pauses over 50 ms.
COMPUTE = """
import time
start, computed, pauses = time.perf_counter(), time.process_time(), 0.0
before = start
while time.process_time() < computed + 0.15:
    now = time.perf_counter()
    if now - before > 0.05:
        pauses += now - before
    before = now
print((now - start) / 0.15, pauses / (now - start))
"""
ALL_REDUCE = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.tensor([float(socket.gethostname().removeprefix("node")) + 1])
dist.all_reduce(number)
print(socket.gethostname(), dist.get_rank(), number.item(), flush=True)
dist.destroy_process_group()  # else gloo's threads may be ended by an abort
"""


def traces() -> dict:
    """What a bed could leave on this machine."""
    cgroups = [path for pattern in ("testbed", "*/testbed") for path in pathlib.Path("/sys/fs/cgroup").glob(pattern)]
    namespaces = sorted(path.name for path in pathlib.Path("/run/netns").glob("*"))
    folders = [path for path in (STATE, pathlib.Path("/etc/netns"), pathlib.Path("/run/sshd")) if path.exists()]
    links = sorted(os.listdir("/sys/class/net"))
    return {"cgroups": cgroups, "namespaces": namespaces, "folders": folders, "links": links}


def sleepers() -> int:
    found = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == f"sleep\0{MARKER}\0".encode()
        except OSError:  # it has ended meanwhile
            pass
    return found


def eventually(condition) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def python(node: str, code: str, *args) -> list[float]:
    """The numbers that `code` prints on `node`."""
    return [float(word) for word in cluster("exec", node, sys.executable, "-c", code, *args).stdout.split()]


def transfer(sender: str, receiver: str, number: int = 250_000) -> list[float]:
    """Seconds of `number` bytes from sender to receiver and back."""
    server = start(receiver, sys.executable, "-c", TRANSFER, "serve", number)
    seconds = python(sender, TRANSFER, receiver, number)
    server.communicate(timeout=10)
    return seconds


def reaches(sender: str, receiver: str) -> bool:
    command = f"exec 3<>/dev/tcp/{receiver}/22"
    return cluster("exec", sender, "timeout", "1.5", "bash", "-c", command, check=False).returncode == 0


def test_nothing_is_left():
    cluster("down")
    clean = traces()
    assert not any("testbed" in str(value) for value in clean.values()), clean
    netns = pathlib.Path("/etc/netns")
    assert not netns.exists() or any(netns.iterdir())
    cluster("up")
    process = start("node1", "sleep", MARKER)
    cluster("exec", "node0", "ssh", "node2", f"setsid sleep {MARKER} >/dev/null 2>&1 </dev/null &")
    assert eventually(lambda: sleepers() == 2)
    full = traces()
    cluster("up")  # changes nothing, ends nothing
    assert traces() == full and sleepers() == 2 and len(full["namespaces"]) - len(clean["namespaces"]) == 4
    cluster("down")
    assert process.wait(timeout=10) != 0 and sleepers() == 0
    assert traces() == clean
    cluster("down")
    cluster("up")
    subprocess.run(["ip", "netns", "del", "testbed-node1"], check=True)  # a bed of which a part is gone
    cluster("up")
    assert traces() == full and reaches("node0", "node1")


def test_each_host_has_its_name_and_sshd(tmp_path):
    for number, node in enumerate(NODES):
        script = 'hostname; getent hosts "$(hostname)"; pwd; cat /proc/self/cgroup; printf "%s|" "$@"; exit 7'
        done = cluster("exec", node, "bash", "-c", script, "_", "a b", "$(x)", check=False, cwd=tmp_path)
        name, address, directory, *groups, arguments = done.stdout.splitlines()
        assert (name, address.split(), directory) == (node, [f"198.18.0.{10 + number}", node], str(tmp_path))
        assert any(f"/testbed/{node}" in line for line in groups) and arguments == "a b|$(x)|" and done.returncode == 7
    script = "hostname; ssh node2 'hostname; cat /proc/self/cgroup'; ssh -p 2222 root@node0 hostname"
    first, second, *groups, third = cluster("exec", "node1", "bash", "-c", script).stdout.splitlines()
    assert (first, second, third) == ("node1", "node2", "node0") and any("/testbed/node2" in line for line in groups)
    ssh = ["ssh", "-F", STATE / "ssh_config", "-o", "BatchMode=yes"]
    assert subprocess.check_output([*ssh, "node2", "hostname"], text=True, timeout=20) == "node2\n"
    keyless = [*ssh, "-o", "IdentityFile=none", "-o", "PubkeyAuthentication=no", "node2", "hostname"]
    refused = subprocess.run(keyless, check=False, capture_output=True, text=True, timeout=20)
    assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr


def test_rate():
    cluster("rate", "node1", "2mbit")
    there, back = transfer("node0", "node1")  # 2 Mbit each way
    assert 0.95 < there < 5 and 0.95 < back < 5
    assert max(transfer("node0", "node2")) < 0.8  # the others' cables are free
    cluster("rate", "all", "2mbit")
    assert 0.95 < min(transfer("node2", "node0"))
    cluster("rate", "all", "off")
    assert max(transfer("node0", "node1")) < 0.8


def test_slow():
    cluster("slow", "node1", 20)
    slowdown, long_pauses = python("node1", COMPUTE)
    assert 4 < slowdown < 20 and long_pauses < 0.4  # it waits 8 ms in every 10, and not 80 in every 100
    assert python("node2", COMPUTE)[0] < 4
    cluster("slow", "all", 20)
    assert 4 < python("node2", COMPUTE)[0]
    cluster("slow", "all", "off")
    assert python("node1", COMPUTE)[0] < 4


def test_cut_and_join():
    assert reaches("node0", "node1")
    for _ in range(2):
        cluster("cut", "node1")
    assert not reaches("node0", "node1") and not reaches("node1", "node2") and reaches("node0", "node2")
    for _ in range(2):
        cluster("join", "node1")
    assert reaches("node0", "node1")


def test_all_reduce_over_two_hosts():
    variables = environment(MASTER_ADDR="node1", MASTER_PORT="29500", WORLD_SIZE="2")  # no interface: the names do it
    runs = [start(node, sys.executable, "-c", ALL_REDUCE, env={**variables, "RANK": str(rank)})
            for rank, node in enumerate(["node1", "node2"])]
    outputs = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    assert "node1 0 5.0" in outputs[0] and "node2 1 5.0" in outputs[1]


@pytest.mark.parametrize("args, message", [
    ((), "three hosts on a switch"),
    (("exec", "node1"), "three hosts on a switch"),
    (("rate", "node3", "10mbit"), "no host 'node3': the hosts are node0 node1 node2"),
    (("rate", "node1", "10"), "rate node1 10: give a rate as 10mbit"),
    (("slow", "node1", "0"), "slow node1 0: give a whole number of percent"),
    (("cut", "node1; true"), "no host 'node1; true'"),
])
def test_usage(args, message):
    done = cluster(*args, check=False)
    assert done.returncode == 2 and message in done.stderr


def test_what_this_machine_lacks(tmp_path):
    with open(SCRIPT) as script:  # as standard input: nobody may not read a file of root's
        done = subprocess.run(["bash", "-s", "up"], check=False, stdin=script, capture_output=True,
                              text=True, user=65534)
    assert done.returncode == 2 and "network namespaces need root" in done.stderr and done.stderr.count("\n") == 1
    os.symlink("/bin/bash", tmp_path / "bash")
    done = cluster("up", check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 2 and "no unshare flock hostname ssh ssh-keygen here: apt-get install -y" in done.stderr
