"""One host's part of a run, at the far end of launch_cluster.sh's ssh: starts it here, and ends it for certain.

The job comes as one line of JSON on standard input, so that none of its words passes a shell or shows in a list of
processes. After it come heartbeats. When they stop for SILENCE seconds (the cable is cut, the launcher's machine is
dead) or the input ends (the launcher or ssh is gone), every process that came from this one is ended: it gets SIGTERM,
and then time in which a training can finish its step and save a checkpoint. That is PATIENCE seconds and, besides, as
many as the training itself says that it needs, in a file whose path is in its environment.
A worker whose torchrun is killed would train on alone: it is known by a variable in its environment.

An agent starts what is to run: torchrun, and ends as that does. In an elastic run it starts the processes themselves,
and has no contact with other hosts. They find each other by what ELASTIC_RUN tells them, and decide among themselves
who takes part, so that those that are left go on in place when one is lost (see exits.py):

    a process ends with DONE -------> the agent ends with it, too, when all of them are
    with USER_ERROR ----------------> the agent ends with it, and with it the run
    otherwise, also by a signal ----> this process alone is started anew; if that never helps, the agent ends: FAILED

What the user types for a chat comes between heartbeats, which are empty lines, each line as JSON; null is its end.

As a daemon (detached.py) it hears of no launcher, and ends when it gets a signal.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

import exits
from host_facts import HOME, PORT_PATIENCE, STOPS_WITHIN, listen, run_interface, usable_cores
from inventory import ROOT

SILENCE = 15  # seconds, where the launcher sends two heartbeats a second
PATIENCE = 12  # seconds between asking a process to end and ending it, besides those that a training needs
SAYS = 5  # seconds between two lines about what is waited for: the launcher takes a silent host as out of reach
TORCHRUN_PATIENCE = "900"  # seconds that torchrun itself waits, longer than this module
BEGUN = re.compile(r"^[0-9]+ process(es)? with OMP_NUM_THREADS=|^the last lines of this part:")  # precede the script's
BLANK = 12 * " "  # longer than the numbers of processes, and their exit codes
MARK = "LAUNCH_CLUSTER_PART"  # the variable that tells which host's part of which run a process belongs to
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
            env={**self.variables, "LOCAL_RANK": str(rank)},
            preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number))
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


def environment(job: dict) -> dict[str, str]:
    """This host's variables, and over them: the interface that reaches the others, threads, the launcher's --env."""
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_PATIENCE)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, int(usable_cores() / job["nproc"]))))
    if interface := job["interface"]:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL: else a prefix
    if job["is_home"]:
        variables[HOME] = "1"
    return {**variables, **job["environment"]}


def find_interface(job: dict) -> None:
    """The interface of this host that reaches the others. Raises OSError."""
    job["interface"], _ = run_interface(job["interface"], job["peer"])
    if job["interface"] is None and (elastic := job.get("elastic")):  # the only host so far
        with contextlib.suppress(OSError):  # it's known as localhost, and the run stays on it
            job["interface"], _ = run_interface(None, elastic["hosts"][elastic["host"]])


def started_for(mark: str) -> list[int]:
    """The processes whose value of MARK begins with these words, whoever is their parent now: what this part of a run
    has started, and in an elastic run what an earlier connection had started before it was cut."""
    found, wanted = [], f"{MARK}={mark} ".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            with open(f"/proc/{pid}/environ", "rb") as file:
                if any((each + b" ").startswith(wanted) for each in file.read().split(b"\0")):
                    found.append(int(pid))
    return found


def seconds_in(path: str | None) -> float:
    """What the training has written into the file STOPS_WITHIN; 0 where there is none, and for other scripts."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(path) as file:
        return float(file.read())
    return 0.0


def end_all(mark: str, patience: float = PATIENCE, file: str | None = None) -> None:
    """Asks all processes with this mark to end, and ends those that are left after `patience` seconds and those that
    are in the `file`."""
    start, number, said = time.monotonic(), signal.SIGTERM, 0
    while left := started_for(mark):
        for pid in left if number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        waited, limit = time.monotonic() - start, patience + seconds_in(file)
        number = signal.SIGKILL if waited > limit else None
        if number is None and waited // SAYS > said:
            said = waited // SAYS
            with contextlib.suppress(OSError):  # nobody reads any more
                print(f"stopping: a training may finish its step and save for {limit - waited:.0f} s", flush=True)
        time.sleep(0.05)


def watch(child, has_launcher: bool = True) -> int:
    """The exit code of the child, or that of a signal that came, as a shell gives it; FAILED where the launcher is
    gone, UNHEARD where the way to it is. The child has poll() and returncode, as a Popen, and `typed`, as an Agent."""
    stopped = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    heard, unread = time.monotonic(), b""
    while child.poll() is None and not stopped:
        if not has_launcher:
            time.sleep(0.1)
        elif select.select([0], [], [], 0.1)[0]:
            if not (data := os.read(0, 1 << 16)):
                return exits.FAILED  # the launcher has closed the input, or has ended itself
            *lines, unread = (unread + data).split(b"\n")
            for text in map(json.loads, filter(None, lines)):
                child.typed.put(text)
            heard = time.monotonic()
        elif time.monotonic() > heard + SILENCE:
            return exits.UNHEARD
    if stopped:  # this machine is shut down, say
        return exits.after(stopped[0])
    return exits.as_shell(child.returncode)


def run(job: dict) -> int:
    """Runs the processes of this host until they have ended, or have to. The exit code."""
    try:
        find_interface(job)
    except OSError as error:
        print(f"error: the interface towards {job['peer']} can't be found ({error}): give this host an iface= in the "
              "hosts file", file=sys.stderr)
        return exits.USER_ERROR
    end_all(job["mark"], PATIENCE / 4)  # what an earlier connection of this run has left
    if job["node_rank"] == 0 and "elastic" not in job:
        try:
            listen(job["master_port"], PORT_PATIENCE).close()
        except OSError as error:
            print(f"error: port {error}: end that, or give launch_cluster.sh another --port", file=sys.stderr)
            return exits.USER_ERROR
    variables = environment(job)
    processes = f"{job['nproc']} process{'es' * (job['nproc'] > 1)}"
    print(f"{processes} with OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} each, {usable_cores():g} usable cores",
          flush=True)
    with tempfile.NamedTemporaryFile() as file:
        own = f"{job['mark']} {os.getpid()}"  # this connection ends its own processes, not those of the next one
        variables |= {STOPS_WITHIN: file.name, MARK: own}
        try:
            return watch(Agent(job, variables), not job["is_detached"])
        finally:
            end_all(own, PATIENCE, file.name)


def without_secrets(line: str) -> bytes:
    """A job, as a line of JSON as long as before, without the variables of --env."""
    return json.dumps({**json.loads(line), "environment": {}}).ljust(len(line) - 1).encode()


def fill_in(path, number: int) -> None:
    """Over the BLANK in that file, so that a disk that has become full takes it."""
    with open(path, "r+") as file:
        file.write(str(number))


def exit_code(folder: pathlib.Path) -> int:
    """Of a daemon that has ended. One that was killed, or whose machine was switched off, has left none."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "code").read_text())
    return exits.KILLED


def main() -> int:
    exits.outlive_a_full_disk(sys.stdout, sys.stderr)
    if sys.platform != "linux":
        print(f"error: this host runs {sys.platform}, but only on Linux can all processes be ended with the run: type "
              "its torchrun line by hand (Windows: use WSL)", file=sys.stderr)
        return exits.USER_ERROR
    os.chdir(ROOT)
    line = sys.stdin.readline()
    job = json.loads(line)
    code = run(job)
    if job["is_detached"]:
        fill_in(os.path.join(job["folder"], "code"), code)
        os.pwrite(0, without_secrets(line), 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
