"""One host's part of a run, at the far end of launch_cluster.sh's ssh: starts torchrun here, and ends it for certain.

The job comes as one line of JSON on standard input, so that none of its words passes a shell or shows in a list of
processes. After it come heartbeats. When they stop for SILENCE seconds (the cable is cut, the launcher's machine is
dead) or the input ends (the launcher or ssh is gone), every process that came from this one is ended.
A worker whose torchrun is killed would train on alone: Linux is asked to make such orphans children of this process.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

from host_facts import run_interface, usable_cores

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # this host's copy of the project
SILENCE = 15  # seconds; the launcher sends two heartbeats a second
PATIENCE = 5  # seconds between asking a process to end and ending it
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def command(job: dict) -> list[str]:
    """torchrun's command line for this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(job["nnodes"]),
            "--node-rank", str(job["node_rank"]), "--nproc-per-node", str(job["nproc"]),
            "--master-addr", job["master_address"], "--master-port", str(job["master_port"]), *job["command"]]


def environment(job: dict) -> dict[str, str]:
    """This host's variables, and over them: the interface that reaches the others, threads, the launcher's --env.

    Raises OSError where no interface is given and the one towards the peer can't be found.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, int(usable_cores() / job["nproc"]))))
    if interface := job["interface"] or run_interface(None, job["peer"])[0]:
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = interface
    return {**variables, **job["environment"]}


def descendants() -> list[int]:
    """The processes that came from this one, whatever session they are in; dead ones are reaped first."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])  # the name, in brackets, may hold spaces
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(pid))
    found = children.get(os.getpid(), [])
    for pid in found:  # the list grows while it is read
        found += children.get(pid, [])
    return found


def end_all() -> None:
    """Asks all descendants to end, and ends those that are left after PATIENCE seconds."""
    start, number = time.monotonic(), signal.SIGTERM
    while left := descendants():
        for pid in left if number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        number = signal.SIGKILL if time.monotonic() > start + PATIENCE else None
        time.sleep(0.05)


def watch(child: subprocess.Popen) -> int:
    """torchrun's exit code, as a shell gives it; 1 where the launcher is gone or a signal says to stop."""
    stopped = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    heard = time.monotonic()
    while child.poll() is None:
        if select.select([0], [], [], 0.1)[0]:
            if not os.read(0, 4096):
                return 1  # the launcher has closed the input, or has ended itself
            heard = time.monotonic()
        if stopped or time.monotonic() > heard + SILENCE:
            return 1
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main() -> int:
    if sys.platform != "linux":
        print(f"error: this host runs {sys.platform}, but only on Linux can all processes be ended with the run: type "
              "its torchrun line by hand (Windows: use WSL)", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    job = json.loads(sys.stdin.readline())
    try:
        variables = environment(job)
    except OSError as error:
        print(f"error: the interface towards {job['peer']} can't be found ({error}): give this host an iface= in the "
              "hosts file", file=sys.stderr)
        return 2
    processes = f"{job['nproc']} process{'es' * (job['nproc'] > 1)}"
    print(f"{processes} with OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} each, {usable_cores():g} usable cores",
          flush=True)
    prctl(SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command(job), stdin=subprocess.DEVNULL, env=variables,
                             preexec_fn=lambda: prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM))
    try:
        return watch(child)
    finally:
        end_all()


if __name__ == "__main__":
    sys.exit(main())
