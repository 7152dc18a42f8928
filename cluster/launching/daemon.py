"""A host's part of a run that outlives its launcher, at the far end: started as a daemon, followed, stopped.

    logs/launches/RUN/HOST/    job.json, with the token of the run: nobody else may read it
                               output, pid, and at the end the exit code, in `code`

The daemon is host_run.py with job.json as its standard input. That file stays open and locked for as long as it runs:
the number in `pid` could be another program's after the machine was switched off. Who follows reads `output`.
"""

import contextlib
import fcntl
import glob
import json
import os
import signal
import subprocess
import sys

ANSWER = "detached part: "  # precedes what a host says about its part, because a login shell may print lines of its own
FOLLOWED = "the last lines of the run "  # what a follower prints first
NO_PART, KILLED = 76, 137  # exit codes
LAST = 20  # lines


def folder_of(job: dict) -> str:
    return os.path.join("logs", "launches", *job["mark"].split(" ", 1))


def read(folder: str, name: str) -> str:
    """The text of a file; nothing if it is not there."""
    with contextlib.suppress(OSError), open(os.path.join(folder, name), errors="replace") as file:
        return file.read()
    return ""


def find_part(label: str, run: str | None) -> str | None:
    """The folder of this host's part of a run, without `run` of the newest one."""
    found = glob.glob(os.path.join("logs", "launches", run or "*", glob.escape(label)))
    return max((folder for folder in found if read(folder, "job.json")), default=None,
               key=lambda folder: json.loads(read(folder, "job.json"))["started"])


def is_alive(folder: str) -> bool:
    with open(os.path.join(folder, "job.json")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def start(job: dict) -> "Follower":
    """Starts the daemon, unless it runs. Raises OSError."""
    folder = folder_of(job)
    os.makedirs(folder, exist_ok=True)
    open_private = os.open(os.path.join(folder, "job.json"), os.O_RDWR | os.O_CREAT, 0o600)
    with open(open_private, "r+") as file, open(os.path.join(folder, "output"), "ab") as output:
        at = output.tell()
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "code"))
            file.truncate()
            file.write(json.dumps(job) + "\n")
            file.flush()
            file.seek(0)
            daemon = subprocess.Popen([sys.executable, os.path.join("cluster", "launching", "host_run.py")], stdin=file,
                                      stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            with open(os.path.join(folder, "pid"), "w") as pid:
                pid.write(str(daemon.pid))
    return Follower(folder, at)


class Follower:
    """Prints the output of a part. As in a Popen, `returncode` is None until poll() finds that the part has ended.

    at: the byte to begin with; without it, the last lines come first.
    """

    def __init__(self, folder: str, at: int | None = None):
        self.folder, self.returncode = folder, None
        self.output = open(os.path.join(folder, "output"), "rb")
        if at is None:
            print(f"{FOLLOWED}{folder.split(os.sep)[-2][:8]}:", flush=True)
            at = max(0, self.output.seek(0, os.SEEK_END) - 200 * LAST)
            self.output.seek(at)
            lines = self.output.readlines()
            at += sum(map(len, lines[:-LAST]))
        self.output.seek(at)

    def poll(self) -> int | None:
        has_ended = not is_alive(self.folder)
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()
        if has_ended:
            self.returncode = int(read(self.folder, "code") or KILLED)
        return self.returncode


def answer(question: dict) -> Follower | int:
    """What the launcher asks about this host's part of a run: a follower of it, or an exit code.

    The reply to `look` has the whole job, with its token, for a launcher that starts the part of another host.
    """
    if question["ask"] == "start":
        return start(question["job"])
    folder = find_part(question["label"], question.get("run"))
    if question["ask"] == "look":
        lines = read(folder, "output").splitlines() if folder else []
        print(ANSWER + json.dumps(folder and {
            "job": json.loads(read(folder, "job.json")), "is_alive": is_alive(folder),
            "code": int(read(folder, "code") or KILLED), "last": lines[-1] if lines else ""}), flush=True)
        return 0
    if not folder or question["ask"] == "stop" and not is_alive(folder):
        return NO_PART
    if question["ask"] == "stop":
        os.kill(int(read(folder, "pid")), signal.SIGTERM)
    return Follower(folder)
