"""launch_cluster.sh on three hosts over ssh: what --check says of them, and that a run ends everywhere."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from bed import NAME, NETWORK, NODES, SSH_CONFIG, bed, processes, testbed
from launch import ROOT
from launcher import Launch, all_gone, eventually, make_tools, write_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures(bed.__name__)]
OPTIONS = f"-F {SSH_CONFIG}"
GLOO = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
print("pids", os.getpid(), os.getppid(), "interface", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
while True:
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return make_tools(tmp_path_factory.mktemp("tools"))


def hosts(folder, python) -> pathlib.Path:
    return write_hosts(folder, *(f"{node} python={python}" for node in NODES))


def test_check_names_what_is_wrong(tools, tmp_path):
    """A full disk and a blocked port, a wrong key, nobody there; and not that Debian's node1 is 127.0.1.1 by its own."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "config").write_text(f"Host node2\n  IdentityFile {tmp_path}/key\n  IdentitiesOnly yes\n"
                                     f"  UserKnownHostsFile {os.path.dirname(SSH_CONFIG)}/known_hosts\n"
                                     f"  HostKeyAlias {NAME}\n  HostName {NETWORK}.12\n"
                                     f"Host node0 node1\n  Include {SSH_CONFIG}\n")
    python = f"python={tools}/python"
    listed = write_hosts(tmp_path, *(f"{host} {python}" for host in (*NODES, f"{NETWORK}.99")))
    names = pathlib.Path(f"/etc/netns/{NAME}-node1/hosts")
    before = names.read_text()
    block = ["to", f"{NETWORK}.10", "ipproto", "tcp", "dport", "29500", "prohibit"]
    testbed("exec", "node0", "mount", "-t", "tmpfs", "-o", "size=64k", "none", ROOT / "runs")
    subprocess.run(["ip", "-n", f"{NAME}-node1", "rule", "add", *block], check=True)
    names.write_text(re.sub(r"\S+ node1", "127.0.1.1 node1", before))
    try:
        run = Launch(listed, "--check", "--", "train.py", options=f"-F {tmp_path}/config -o ConnectTimeout=2")
        code, text = run.end()
    finally:
        names.write_text(before)
        subprocess.run(["ip", "-n", f"{NAME}-node1", "rule", "del", *block], check=True)
        testbed("wipe", "node0")
    assert code == 1, text
    for problem in ("node0: full disk: ", f"node0: blocked port: {NETWORK}.10:29500 can't be reached from node1",
                    "node2: wrong key: ", f"{NETWORK}.99: unreachable host: "):
        assert re.search(rf"^{re.escape(problem)}.*\n    cure: .", text, re.M), f"{problem!r} is not in\n{text}"
    assert text.count("cure: ") == 4 and " | " not in text, text  # nothing else, and nothing was started


def test_a_cut_cable_ends_both_sides(tools, tmp_path):
    before = processes()
    run = Launch(hosts(tmp_path, tools / "python"), "--", tools / "sleep.py", options=OPTIONS)
    pids = run.pids()
    testbed("cut", "node2")
    try:
        code, text = run.end()
        assert code == 255 and "node2 (node rank 2) failed first, with exit code 255" in text, text
        assert "unreachable host" in text, text
        assert all_gone(pids)  # node2 has heard of nothing, it only misses the heartbeats
    finally:
        testbed("join", "node2")
    assert eventually(lambda: processes() <= before, 120)  # its sshd learns of it when packets pass again


def test_a_killed_worker_of_a_true_run_ends_the_others(tools, tmp_path):
    before = processes()
    (tmp_path / "gloo.py").write_text(GLOO)
    run = Launch(hosts(tmp_path, sys.executable), "--env", "OMP_NUM_THREADS=1", "--", tmp_path / "gloo.py",
                 options=OPTIONS)
    os.kill(run.pids()["node1"][0], signal.SIGKILL)
    code, text = run.end()
    assert len(re.findall(r"^node\d \| pids .* interface eth0$", text, re.M)) == 3, text
    assert code == 1 and "node1 (node rank 1) failed first, with exit code 1" in text, text
    assert "exitcode: -9" in text.rpartition("failed first")[2], text
    assert eventually(lambda: processes() <= before)
