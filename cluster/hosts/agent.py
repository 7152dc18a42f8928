"""The processes of one host in an elastic run: this host's agent starts them, and starts each one anew that fails.

The agent has no contact with other hosts. The processes find each other by what ELASTIC_RUN tells them, and decide
among themselves who takes part, so that those that are left go on in place when one is lost:

    a process ends with DONE -------> the agent ends with it, too, when all of them are
    with USER_ERROR ----------------> the agent ends with it, and with it the run
    otherwise, also by a signal ----> this process alone is started anew; if that never helps, the agent ends: FAILED

See exits.py.
"""

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import exits

PAUSE = 1.0  # seconds between the end of a process and its next start
SETTLED, FAILURES = 20.0, 5  # a process that ends sooner, in seconds, more often than this in a row is given up
SETTLED_ALONE = 3600.0  # instead of SETTLED where it ends by what its machine lacks, or is killed, as for memory
HAS_USER_ERROR = re.compile(rf"^process \d+ of this host has ended with exit code {exits.USER_ERROR}$")
NO_RANK = "--elastic needs cluster/train_distributed.py, which meets the other hosts by itself"
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def ends_with_parent(number: int) -> Callable[[], object]:
    """What Popen calls in a new process, so that it gets this signal when the thread that started it ends."""
    return lambda: ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number)


class Agent:
    """As in a Popen, `returncode` is None until poll() finds that all has ended. It is poll() that starts processes:
    call it from the main thread only, since they are killed when the thread that started them ends."""

    def __init__(self, job: dict, variables: dict[str, str]):
        self.words, self.returncode = [sys.executable, *job["command"]], None
        # A script that reads torchrun's number of the rank fails with what it finds in RANK.
        self.variables = {**variables, "ELASTIC_RUN": json.dumps(job["elastic"]), "RANK": NO_RANK,
                          "LOCAL_WORLD_SIZE": str(job["nproc"])}
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            self.variables.pop(name, None)
        self.processes = [None] * job["nproc"]  # None: it is to be started, at the time in `started`
        self.started, self.failures = [0.0] * job["nproc"], [0] * job["nproc"]  # failures in a row

    def poll(self) -> int | None:
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            if process and process.poll():
                self.has_failed(rank, process.returncode, now)
            elif not process and now > self.started[rank]:
                self.started[rank] = now
                self.processes[rank] = subprocess.Popen(
                    self.words, stdin=subprocess.DEVNULL, env={**self.variables, "LOCAL_RANK": str(rank)},
                    preexec_fn=ends_with_parent(signal.SIGKILL))
        if all(process and process.returncode == exits.DONE for process in self.processes):
            self.returncode = exits.DONE
        return self.returncode

    def has_failed(self, rank: int, code: int, now: float) -> None:
        settled = SETTLED_ALONE if exits.as_shell(code) in (exits.OF_THIS_MACHINE, exits.KILLED) else SETTLED
        self.failures[rank] = self.failures[rank] + 1 if now - self.started[rank] < settled else 0
        self.processes[rank], self.started[rank], then = None, now + PAUSE, ": it is started anew"
        if code == exits.USER_ERROR:
            self.returncode, then = code, ""
        elif self.failures[rank] > FAILURES:
            self.returncode = exits.FAILED
            then = f", {self.failures[rank]} times in a row within {settled:g} s: it is not started again"
        how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
        print(f"process {rank} of this host has ended {how}{then}", flush=True)
