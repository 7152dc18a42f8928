"""The test bed: three hosts with throttled cables, and nothing left of them. Other tests on hosts use the rest."""

import pathlib
import subprocess
import time

import pytest
from maintain.bed import NAME, bed, start, testbed
from maintain.launcher import eventually

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures(bed.__name__)]
MARKER = f"98765.{int(NAME[-6:], 16)}"  # seconds that nobody else sleeps, not the tests of another copy either


def traces() -> dict:
    """What a bed could leave on this machine."""
    patterns = ("/sys/fs/cgroup/NAME", "/sys/fs/cgroup/*/NAME", "/run/netns/NAME*", "/run/NAME", "/etc/netns/NAME*",
                "/sys/class/net/NAME", "/var/tmp/NAME")
    return {pattern: sorted(path.name for path in pathlib.Path("/").glob(pattern[1:].replace("NAME", NAME)))
            for pattern in patterns}


def sleepers() -> str:
    return subprocess.run(["pgrep", "-cfx", f"sleep {MARKER}"], capture_output=True, text=True).stdout.strip()


def transfer(sender: str, receiver: str) -> list[float]:
    """Seconds of 2 Mbit from sender to receiver and back, with those that ssh takes to start."""
    seconds = []
    for command in ("head -c 250000 /dev/zero | ssh {} 'cat >/dev/null'",
                    "ssh {} 'head -c 250000 /dev/zero' >/dev/null"):
        began = time.monotonic()
        testbed("exec", sender, "bash", "-c", command.format(receiver))
        seconds.append(time.monotonic() - began)
    return seconds


def reaches(sender: str, receiver: str) -> bool:
    command = f"exec 3<>/dev/tcp/{receiver}/22"
    return testbed("exec", sender, "timeout", "3", "bash", "-c", command, check=False).returncode == 0


def test_nothing_is_left():
    testbed("down")
    assert not any(traces().values()), traces()
    testbed("up")
    process = start("node1", "sleep", MARKER)
    testbed("exec", "node0", "ssh", "node2", f"setsid sleep {MARKER} >/dev/null 2>&1 </dev/null &")
    assert eventually(lambda: sleepers() == "2")
    full = traces()
    testbed("up")  # changes nothing, ends nothing
    assert traces() == full and sleepers() == "2" and len(full["/run/netns/NAME*"]) == 4
    testbed("down")
    assert process.wait(timeout=60) != 0 and sleepers() == "0"
    assert not any(traces().values()), traces()
    testbed("down")
    testbed("up")
    subprocess.run(["ip", "netns", "del", f"{NAME}-node1"], check=True)  # a bed of which a part is gone
    testbed("up")
    assert traces() == full and reaches("node0", "node1")


def test_rate():
    """2 Mbit at 1 Mbit/s take two seconds in each direction. The others' cables are free."""
    testbed("rate", "node1", "1mbit")
    limited, free = transfer("node0", "node1"), transfer("node0", "node2")
    assert 1.9 < min(limited) and min(free) < min(limited) - 1
    testbed("rate", "all", "1mbit")
    assert 1.9 < min(transfer("node2", "node0"))
    testbed("rate", "all", "off")
    assert min(transfer("node0", "node1")) < min(limited) - 1


@pytest.mark.parametrize("args, message", [
    ((), "three hosts on a switch"),
    (("rate", "node3", "10mbit"), "no host 'node3': the hosts are node0 node1 node2"),
    (("rate", "node1", "10"), "rate node1 10: give a rate as 10mbit"),
    (("slow", "node1", "0"), "slow node1 0: give a whole number of percent"),
    (("cut", "node1; true"), "no host 'node1; true'"),
    (("own", "/nowhere"), "own /nowhere: no such directory"),
])
def test_usage(args, message):
    done = testbed(*args, check=False)
    assert done.returncode == 2 and message in done.stderr
