"""Hosts of the test bed that are lost and come back, and trainings that go on without them."""

import os
import pathlib
import re
import signal
import subprocess
import sys

from maintain.bed import NAME, NODES, SSH_CONFIG, processes, testbed
from maintain.launcher import Launch, eventually, write_hosts


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


class Training:
    """A training on hosts of the test bed, an elastic run unless `launcher` has other flags, by what it prints.

    `words`: the script and its flags. `started_on`: the host on which the launcher is typed; None for this machine.
    """

    def __init__(self, folder: pathlib.Path, *words, nodes=NODES, launcher=("--elastic", "2:3"), started_on=None):
        self.folder = folder
        self.run = Launch(self.list_hosts(nodes), *launcher, "--env", "OMP_NUM_THREADS=1", "--", *map(str, words),
                          node=started_on, options="" if started_on else f"-F {SSH_CONFIG}")

    def list_hosts(self, nodes) -> pathlib.Path:
        """Writes hosts.txt, which an elastic run reads again and again."""
        return write_hosts(self.folder, *(f"{node} python={sys.executable}" for node in nodes))

    def mark(self) -> int:
        """The number of lines up to now."""
        return len(self.run.lines)

    def steps(self, since: int = 0) -> list[int]:
        found = (re.search(r"\| step (\d+)/", line) for line in self.run.lines[since:])
        return [int(match[1]) for match in found if match]

    def wait(self, condition, seconds: float = 120) -> None:
        assert eventually(lambda: condition() or self.run.process.poll() is not None, seconds), self.run.output()
        assert condition(), self.run.output()

    def reaches(self, step: int, seconds: float = 120) -> None:
        self.wait(lambda: self.steps() and self.steps()[-1] >= step, seconds)

    def went_on(self, ranks: int, since: int = 0, seconds: float = 120) -> int | None:
        """Waits until so many ranks have made a step. The step after which they went on, None where they began anew."""
        def text() -> str:
            _, found, text = "".join(self.run.lines[since:]).rpartition(f"{ranks} ranks over")
            return text if found else ""

        self.wait(lambda: re.search(r"\| step \d+/", text()), seconds)
        found = re.search(r"going on after step (\d+)", text())
        return found and int(found[1])

    def stop(self, seconds: float = 150) -> str:
        """Ctrl-C, which leaves nothing running. What it printed."""
        os.killpg(self.run.process.pid, signal.SIGINT)
        code, text = self.run.end(seconds)
        assert code == 130 and nothing_runs(), text
        return text
