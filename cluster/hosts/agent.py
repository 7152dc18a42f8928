"""The processes of one host: this host's agent starts them. In a plain run it is one, torchrun, and ends both.

In an elastic run the agent starts each process anew that fails, and has no contact with other hosts. The processes find
each other by what ELASTIC_RUN tells them, and decide among themselves who takes part, so that those that are left go on
in place when one is lost:

    a process ends with DONE -------> the agent ends with it, too, when all of them are
    with USER_ERROR ----------------> the agent ends with it, and with it the run
    otherwise, also by a signal ----> this process alone is started anew; if that never helps, the agent ends: FAILED

See exits.py.
"""

import contextlib
import ctypes
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import exits

PAUSE = 1.0  # seconds between the end of a process and its next start
SETTLED, FAILURES = 20.0, 5  # a process that ends sooner, in seconds, more often than this in a row is given up
SETTLED_ALONE = 3600.0  # instead of SETTLED where it ends by what its machine lacks, or is killed, as for memory
HAS_USER_ERROR = re.compile(rf"^process \d+ of this host has ended with exit code {exits.USER_ERROR}$")
NO_RANK = "--elastic needs cluster/train_distributed.py, which meets the other hosts by itself"
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def torchrun(job: dict) -> list[str]:
    """Its command line for this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(job["nnodes"]),
            "--node-rank", str(job["node_rank"]), "--nproc-per-node", str(job["nproc"]),
            "--master-addr", job["master_address"], "--master-port", str(job["master_port"]), *job["command"]]


class Agent:
    """As in a Popen, `returncode` is None until poll() finds that all has ended. It is poll() that starts processes:
    call it from the main thread only, since they get a signal when the thread that started them ends.

    With --chat, torchrun has an input: what is put into `typed`, until None is.
    """

    def __init__(self, job: dict, variables: dict[str, str]):
        self.is_elastic, self.returncode, self.typed = "elastic" in job, None, queue.SimpleQueue()
        self.words = [sys.executable, *job["command"]] if self.is_elastic else torchrun(job)
        self.has_input = "--chat" in job["command"] and not self.is_elastic and not job["is_detached"]
        self.variables, count = variables, job["nproc"] if self.is_elastic else 1
        if self.is_elastic:
            # A script that reads torchrun's number of the rank fails with what it finds in RANK.
            self.variables = {**variables, "ELASTIC_RUN": json.dumps(job["elastic"]), "RANK": NO_RANK,
                              "LOCAL_WORLD_SIZE": str(count)}
            for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                self.variables.pop(name, None)
        self.processes = [None] * count  # None: it is to be started, at the time in `started`
        self.started, self.failures = [0.0] * count, [0] * count  # failures in a row

    def poll(self) -> int | None:
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            if process and process.poll():
                self.has_failed(rank, process.returncode, now)
            elif not process and now > self.started[rank]:
                self.started[rank], self.processes[rank] = now, self.start(rank)
        if all(process and process.returncode == exits.DONE for process in self.processes):
            self.returncode = exits.DONE
        return self.returncode

    def start(self, rank: int) -> subprocess.Popen:
        """It gets a signal when the agent ends: torchrun one by which it ends its own processes."""
        number = signal.SIGKILL if self.is_elastic else signal.SIGTERM
        process = subprocess.Popen(
            self.words, stdin=subprocess.PIPE if self.has_input else subprocess.DEVNULL,
            env={**self.variables, "LOCAL_RANK": str(rank)}, preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number))
        if self.has_input:  # written by a thread, because it waits where the process does not read
            threading.Thread(target=self.write_on, args=[process.stdin], daemon=True).start()
        return process

    def write_on(self, to) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            for text in iter(self.typed.get, None):
                to.write(text.encode(errors="surrogateescape"))
                to.flush()
            to.close()

    def has_failed(self, rank: int, code: int, now: float) -> None:
        if not self.is_elastic:
            self.returncode = code
            return
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
