"""The test bed: three hosts that have names, sshd, throttled cables and unlike speeds, and nothing left of them."""

import pathlib
import subprocess
import time

import pytest
from bed import NAME, NETWORK, NODES, SSH_CONFIG, bed, on_disk, start, testbed
from launch import ROOT
from launcher import eventually

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


def ssh(node: str, *words: str) -> subprocess.CompletedProcess:
    """From this machine."""
    return subprocess.run(["ssh", "-F", SSH_CONFIG, "-o", "BatchMode=yes", *words[:-1], node, words[-1]], check=False,
                          capture_output=True, text=True, timeout=60)


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


def test_each_host_has_its_name_and_sshd(tmp_path):
    script = 'hostname; getent hosts "$(hostname)"; pwd; printf "%s|" "$@"; ssh -p 2222 root@node0 hostname; exit 7'
    for number, node in enumerate(NODES):
        done = testbed("exec", node, "bash", "-c", script, "_", "a b", "$(x)", check=False, cwd=tmp_path)
        name, address, directory, text = done.stdout.splitlines()
        assert (name, address.split(), directory) == (node, [f"{NETWORK}.{10 + number}", node], str(tmp_path))
        assert text == "a b|$(x)|node0" and done.returncode == 7 and ssh(node, "hostname").stdout == f"{node}\n"
    refused = ssh("node2", "-o", "IdentityFile=none", "-o", "PubkeyAuthentication=no", "hostname")
    assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr


def test_each_host_has_its_disk(tmp_path):
    """What a host writes on its disk is there for `exec` and over ssh; of the others only this machine sees it."""
    (tmp_path / "a").write_text("1")
    testbed("own", tmp_path)
    places = [ROOT / "runs", ROOT / "checkpoints", ROOT / "logs", pathlib.Path.home() / ".cache", tmp_path]
    for place in places:
        testbed("exec", "node1", "touch", place / NAME)
        assert ssh("node1", f"ls {place / NAME}").returncode == 0, place
        assert ssh("node2", f"ls {place / NAME}").returncode and not (place / NAME).exists(), place
        assert on_disk("node1", place / NAME).exists(), place
    ssh("node1", f"rm {tmp_path}/a")
    assert (tmp_path / "a").exists() and ssh("node0", f"cat {tmp_path}/a").stdout == "1"
    testbed("exec", "node1", "mount", "-t", "tmpfs", "-o", "size=64k", "none", places[0])
    full = ssh("node1", f"head -c 100k /dev/zero >{places[0]}/x")
    assert "No space left" in full.stderr and testbed("exec", "node2", "bash", "-c", "head -c 100k /dev/zero >runs/x")
    testbed("wipe", "node1")
    assert ssh("node1", f"cd {ROOT} && ls -A runs checkpoints logs ~/.cache | grep -c {NAME}").stdout == "0\n"
    assert ssh("node1", f"ls {tmp_path}").stdout == "a\n" and on_disk("node2", ROOT / "runs" / "x").exists()
    assert ssh("node1", f"head -c 100k /dev/zero >{places[0]}/x").returncode == 0


def test_rate():
    """2 Mbit at 1 Mbit/s take two seconds in each direction. The others' cables are free."""
    testbed("rate", "node1", "1mbit")
    limited, free = transfer("node0", "node1"), transfer("node0", "node2")
    assert 1.9 < min(limited) and min(free) < min(limited) - 1
    testbed("rate", "all", "1mbit")
    assert 1.9 < min(transfer("node2", "node0"))
    testbed("rate", "all", "off")
    assert min(transfer("node0", "node1")) < min(limited) - 1


def test_cut_and_join():
    for command, is_reached in (("cut", False), ("cut", False), ("join", True), ("join", True)):
        testbed(command, "node1")
        assert reaches("node0", "node1") == reaches("node1", "node2") == is_reached and reaches("node0", "node2")


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
