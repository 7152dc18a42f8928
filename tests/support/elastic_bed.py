"""Hosts of the test bed that are lost and come back."""

import os
import subprocess

from bed import NAME, SSH_CONFIG, processes, testbed
from launcher import eventually


def pids_of(node: str) -> set[str]:
    return set(subprocess.check_output(["ip", "netns", "pids", f"{NAME}-{node}"], text=True).split())


def kill_all(node: str) -> None:
    """As a power failure does, but for the connections, which the system still closes."""
    subprocess.run(["kill", "-KILL", *pids_of(node)], stderr=subprocess.DEVNULL)  # some end meanwhile


def switch_on(node: str) -> None:
    testbed("join", node)
    if not pids_of(node):
        testbed("exec", node, "/usr/sbin/sshd", "-f", f"{os.path.dirname(SSH_CONFIG)}/sshd_config")


def nothing_runs() -> bool:
    """Whether no process of a run is left on any host, soon."""
    def python(pid: str) -> bool:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return b"python" in file.read()
        except OSError:
            return False

    return eventually(lambda: not any(map(python, processes())), 5)
