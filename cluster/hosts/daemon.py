"""A host's part of a run that outlives its launcher, at the far end: started as a daemon, looked at, followed, stopped.

    logs/launches/RUN/HOST/    job.json, with the token of the run: nobody else may read it
                               output, pid, and at the end the exit code, in `code`

The daemon is host_run.py with job.json as its standard input. That file stays open and locked for as long as it runs:
the number in `pid` could be another program's after the machine was switched off.
"""

import contextlib
import fcntl
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import BinaryIO

from host_facts import MARK

BEGUN = re.compile(r"^[0-9]+ process(es)? with OMP_NUM_THREADS=|^the last lines of this part:")  # precede the script's
NO_PART, KILLED = 76, 137  # exit codes
LAST = 20  # lines that a follower begins with


def read(folder: str, name: str) -> str:
    """The text of a file; nothing if it is not there."""
    with contextlib.suppress(OSError), open(os.path.join(folder, name), errors="replace") as file:
        return file.read()
    return ""


def find_part(label: str, run: str) -> str | None:
    """The folder of this host's newest part; `run`: "*" for any run."""
    found = glob.glob(os.path.join("logs", "launches", run, glob.escape(label)))
    started = {folder: json.loads(text)["started"] for folder in found if (text := read(folder, "job.json"))}
    return max(started, key=started.get, default=None)


def is_alive(folder: str) -> bool:
    with open(os.path.join(folder, "job.json")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def last_lines(file: BinaryIO) -> list[bytes]:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * LAST))
    return file.readlines()[-LAST:]


def start(job: dict) -> None:
    """Starts the daemon, unless it runs, and waits until it has started the script. Raises OSError."""
    folder = job["folder"]
    os.makedirs(folder, exist_ok=True)
    private, before = os.open(os.path.join(folder, "job.json"), os.O_RDWR | os.O_CREAT, 0o600), read(folder, "output")
    with open(private, "r+") as file, open(os.path.join(folder, "output"), "ab") as output:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "code"))
            file.truncate()
            file.write(json.dumps(job) + "\n")
            file.flush()
            file.seek(0)
            daemon = subprocess.Popen([sys.executable, os.path.join("cluster", "hosts", "host_run.py")], stdin=file,
                                      stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            with open(os.path.join(folder, "pid"), "w") as pid:
                pid.write(str(daemon.pid))
    while is_alive(folder) and not any(map(BEGUN.match, read(folder, "output")[len(before):].splitlines())):
        time.sleep(0.05)


class Follower:
    """Prints the output of a part. As in a Popen, `returncode` is None until poll() finds that the part has ended."""

    def __init__(self, folder: str):
        self.folder, self.returncode = folder, None
        self.output = open(os.path.join(folder, "output"), "rb")
        sys.stdout.buffer.writelines([b"the last lines of this part:\n", *last_lines(self.output)])

    def poll(self) -> int | None:
        has_ended = not is_alive(self.folder)
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()
        if has_ended:
            self.returncode = int(read(self.folder, "code") or KILLED)
        return self.returncode


def answer(question: dict) -> Follower | int:
    """What the launcher asks about this host's part. To "look", "start" and "stop" the answer is a line of JSON, {}
    where there is no part. It has the job with its token, for a launcher that starts the part of another host."""
    if job := question.get("job"):
        start(job)
    folder, state = job["folder"] if job else find_part(question["label"], question["run"]), {}
    if question["ask"] == "follow":
        return Follower(folder) if folder and (is_alive(folder) or not question["again"]) else NO_PART
    if folder:
        with open(os.path.join(folder, "output"), "rb") as file:
            state = {"job": json.loads(read(folder, "job.json")), "is_alive": is_alive(folder),
                     "code": int(read(folder, "code") or KILLED),
                     "last": [line.decode(errors="replace").rstrip() for line in last_lines(file)]}
        if question["ask"] == "stop" and state["is_alive"]:
            os.kill(int(read(folder, "pid")), signal.SIGTERM)
    print(MARK + json.dumps(state), flush=True)
    return 0
