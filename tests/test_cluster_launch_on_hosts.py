"""launch_cluster.sh on three hosts over ssh: what --check says of them."""

import os
import pathlib
import re
import subprocess

import pytest
from lab.launch import ROOT
from maintain.bed import NAME, NETWORK, NODES, SSH_CONFIG, bed, testbed
from maintain.launcher import Launch, write_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures(bed.__name__)]


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
