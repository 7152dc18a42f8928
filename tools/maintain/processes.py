"""Commands as one types them at a terminal, and the processes of a run, wherever torchrun has put them."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time
import uuid

from lab.launch import ROOT, environment


def processes(marker: str) -> dict[int, int | None]:
    """pid -> rank (None for torchrun itself) of all that run with MARKER=marker in their environment."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"MARKER={marker}" in variables:
            ranks = [int(text.removeprefix("RANK=")) for text in variables if text.startswith("RANK=")]
            found[int(path.parent.name)] = ranks[0] if ranks else None
    return found


def left_behind(group: int) -> list[int]:
    """Processes of a process group, but for its leader, of which whoever started them has ended."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, parent, its_group, *_ = path.read_text().rpartition(")")[2].split()
            parents.update({int(path.parent.name): int(parent)} if int(its_group) == group else {})
    return [pid for pid, parent in parents.items() if pid != group and parent not in parents]


def eventually(condition, seconds: float = 60) -> bool:
    """Whether the condition becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Command:
    """A command that runs in a process group of its own, which Ctrl-C would reach as a whole."""

    def __init__(self, words: list, folder: pathlib.Path, **env: str):
        self.marker = uuid.uuid4().hex
        self.printed = folder / f"{self.marker}.txt"
        with open(self.printed, "w") as output:
            self.process = subprocess.Popen(list(map(str, words)), env=environment(MARKER=self.marker, **env),
                                            start_new_session=True, stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=subprocess.STDOUT, cwd=ROOT)

    def output(self) -> str:
        return self.printed.read_text()

    def ranks(self) -> dict[int, int]:
        """rank -> pid, of those that have started. What a rank has started itself has its RANK, too, and a later
        pid."""
        found = sorted(processes(self.marker).items(), reverse=True)
        return {rank: pid for pid, rank in found if rank is not None}

    def wait_for_step(self, metrics: pathlib.Path, step: int) -> None:
        """Until metrics.jsonl has so many rows."""
        def is_there() -> bool:
            return metrics.exists() and metrics.read_text().count("\n") >= step

        eventually(lambda: is_there() or self.process.poll() is not None, 180)
        assert is_there(), f"no step {step} within minutes\n{self.output()}"

    def end(self, seconds: float) -> str:
        """Waits for its end, which has to leave nothing running. What it printed."""
        assert eventually(lambda: self.process.poll() is not None and not processes(self.marker), seconds), (
            f"still running after {seconds} s (pid: rank): {processes(self.marker)}\n{self.output()[-3000:]}")
        return self.output()

    def kill(self) -> None:
        for pid in processes(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)
