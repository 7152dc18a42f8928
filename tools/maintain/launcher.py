"""Starts launch_cluster.sh, with or without true hosts, and watches what it prints.

A stand-in for torch and torchrun, which starts in no time, takes the place of the true ones: a Python whose `torch` is
a few lines. STAND_IN_SSH hands the command to a shell of this machine, as the true ssh hands it to one of the host,
in the folder in which it stands itself, which takes the place of the home on the host.
"""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

from lab.launch import ROOT
from maintain.processes import Command, eventually

TORCH = """
import os, types
__version__ = os.environ.get("TORCH", "2.13.0")
version, cuda = types.SimpleNamespace(cuda=None), types.SimpleNamespace(is_available=lambda: False)
"""
TORCHRUN = """
import os, subprocess, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
rank, script = option("--node-rank"), sys.argv[sys.argv.index("--master-port") + 2:]
worker = subprocess.Popen([sys.executable, *script], start_new_session=True, env={**os.environ, "RANK": rank})
sys.exit(1 if worker.wait() else 0)
"""
CLOCK = "import os, time; now = time.time; time.time = lambda: now() + float(os.environ.get('AHEAD', 0))"
SLEEP = "import os, time; print('pids', os.getpid(), os.getppid(), flush=True); time.sleep(1000)"
STAND_IN_SSH = """#!/bin/sh
for word; do last=$word; done
case " $* " in *" -G "*) echo "hostname $last"; exit;; esac
cd "$(dirname "$0")"
exec sh -c "$last"
"""


def make_tools(folder: pathlib.Path) -> pathlib.Path:
    """Fills a folder with `python`, of the fast torch, `python_old`, of an old torch and a clock ahead, and `ssh`."""
    start = f'PYTHONPATH={shlex.quote(str(folder))} exec {shlex.quote(sys.executable)} "$@"\n'
    files = {"torch/__init__.py": TORCH, "torch/distributed/__init__.py": "", "torch/distributed/run.py": TORCHRUN,
             "sitecustomize.py": CLOCK, "sleep.py": SLEEP, "ssh": STAND_IN_SSH, "python": f"#!/bin/sh\n{start}",
             "python_old": f"#!/bin/sh\nTORCH=2.9.1 AHEAD=40 {start}"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_program(folder / name, text)
    return folder


def write_program(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_ssh(folder: pathlib.Path, *first: str) -> pathlib.Path:
    """A stand-in for ssh that runs these lines of a shell before the command, with all words of ssh as its own."""
    return write_program(folder / "ssh", STAND_IN_SSH.replace("exec", "\n".join([*first, "exec"])))


def write_whole(path: pathlib.Path, text: str) -> pathlib.Path:
    """Another process that reads the file meanwhile, or waits for it, sees none of the text or all of it."""
    path.with_suffix(".new").write_text(text)
    return path.with_suffix(".new").replace(path)


def lines_of(tools: pathlib.Path, labels: str, options: str = "") -> list[str]:
    """Of a hosts.txt, for hosts of one letter that all are this machine."""
    return [f"{label} iface=lo python={tools / 'python'} {options}" for label in labels]


def write_hosts(folder: pathlib.Path, *lines: str) -> pathlib.Path:
    return write_whole(folder / "hosts.txt", "\n".join(lines) + "\n")


class Launch(Command):
    """A launcher that runs.

    `tools`: the folder of the stand-in for ssh; None for the true one, with `options`. `threads`: OMP_NUM_THREADS.
    """

    def __init__(self, hosts: pathlib.Path, *words, tools: pathlib.Path | None = None, options: str = "",
                 threads: str = "1", **variables):
        if tools:
            variables["PATH"] = f"{tools}:{os.environ['PATH']}"
        variables = {"PYTHON": sys.executable, **variables, "SSH_OPTIONS": options, "OMP_NUM_THREADS": threads}
        super().__init__([ROOT / "cluster" / "launch_cluster.sh", hosts, *words], hosts.parent, **variables)

    @property
    def lines(self) -> list[str]:
        """What it has printed, without a line that has no end yet."""
        return [line for line in self.output().splitlines(keepends=True) if line.endswith("\n")]

    def pids(self, count: int = 3) -> dict[str, list[int]]:
        """{host: [worker, its torchrun]} as soon as `count` hosts have said so."""
        def found() -> dict[str, list[int]]:
            matches = (re.match(r"(\w+) +\| pids (\d+) (\d+)", line) for line in self.lines)
            return {match[1]: [int(match[2]), int(match[3])] for match in matches if match}

        eventually(lambda: len(found()) == count or self.process.poll() is not None)
        assert len(found()) == count, self.output()
        return found()

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """(exit code, all that it printed), at the latest after `seconds`."""
        try:
            return self.process.wait(seconds), self.output()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


    def expect(self, code: int, *patterns: str, seconds: float = 60) -> str:
        """All that it printed, once it has ended with this exit code, and has printed what matches the patterns."""
        found, text = self.end(seconds)
        assert found == code, f"exit code {found}:\n{text}"
        for pattern in patterns:
            assert re.search(pattern, text, re.M), f"no {pattern!r} in:\n{text}"
        return text


def runs(pid: int) -> bool:
    """Whether a process runs. Of one that has ended, and that nobody has waited for yet, the command line is empty."""
    with contextlib.suppress(OSError):
        return bool(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def all_gone(pids: dict[str, list[int]], seconds: float = 60) -> bool:
    """Whether the processes end within `seconds`."""
    return eventually(lambda: not any(runs(pid) for pair in pids.values() for pid in pair), seconds)
