"""One host's part of a run as the launcher sees it: an ssh process, what it prints, and why it failed.

The far end is host_run.py. Down ssh's standard input go the job and heartbeats, and what was started there ends when
they do. What it prints comes back as `host | line`.
"""

import collections
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

from hosts import Host

HEARTBEAT = 0.5  # seconds at most between two of them
GRACE = 3  # seconds from the first failure until the others are stopped: whose fault was it?
STOP = 20  # seconds without a line from a host that was told to stop, until ssh itself is ended: it is out of reach
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|Connection refused")
# Stack traces of torchrun itself and of its stores, whole ones and single lines, with the empty lines in between.
TORCHRUN_TRACE = re.compile(r"Traceback.*(torch/distributed/run\.py|c10d_rendezvous_backend\.py)|^frame #\d+: |"
                            r"^<omitting python frames>|^Exception raised from \w+ at /|\[c10d\] (recv|send)\w+ failed|"
                            "^The above exception was the direct cause|^$", re.DOTALL)


class Run:
    """The ssh process of one host: sends the job, prints what comes back, and puts itself in `events` at its end.

    A line that `alarm` matches is put there at once, as (run, line). Where there is one, stack traces of torchrun are
    not printed: on each host a lost one leaves a hundred lines of them.
    """

    def __init__(self, host: Host, job: dict, width: int, events: queue.SimpleQueue, alarm: re.Pattern | None = None):
        self.host, self.code, self.started = host, None, time.monotonic()
        self.alarm, self.quiet, self.heard = alarm, False, self.started
        self.prefix, self.last = f"{host.label:<{width}} | ", collections.deque(maxlen=200)
        words = host.ssh(host.python, os.path.join(host.dir, "cluster", "launching", "host_run.py"))
        # In a session of its own ssh has no terminal to ask anything on, and Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(words, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        self.send(json.dumps(job))
        threading.Thread(target=self.read, args=[events], daemon=True).start()

    def send(self, line: str = "") -> None:
        """The first line is the job, the others are heartbeats."""
        with contextlib.suppress(OSError, ValueError):  # ssh has ended, or its input was closed
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def read(self, events: queue.SimpleQueue) -> None:
        traceback = []
        for line in self.process.stdout:
            self.heard = time.monotonic()
            text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # what a progress bar shows last
            self.last.append(text)
            if self.alarm and self.alarm.search(text):
                events.put((self, text))
            if self.alarm and (traceback or text.startswith("Traceback")):
                traceback.append(text)
                if text.startswith((" ", "Traceback")):
                    continue
                text, traceback = "\n".join(traceback), []  # complete
            if self.quiet or self.alarm and TORCHRUN_TRACE.search(text):
                continue
            try:
                sys.stdout.write("".join(f"{self.prefix}{part}\n" for part in text.split("\n")))
                sys.stdout.flush()
            except OSError:
                events.put(signal.SIGPIPE)  # nobody reads any more
        self.code = self.process.wait()
        events.put(self)

    def stop(self, since: float) -> None:
        """Closing its input makes host_run.py end all; where the host is out of reach, ssh itself is ended.

        `since`: when the host was first told. As long as host_run.py waits for a training to save, it says so.
        """
        with contextlib.suppress(OSError):  # ssh has ended meanwhile
            self.process.stdin.close()
        if time.monotonic() > max(since, self.heard) + STOP:
            self.process.kill()


def catch_signals(events: queue.SimpleQueue) -> None:
    """From now on Ctrl-C and other requests to end are put in `events`, as numbers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: events.put(number))


def next_event(events: queue.SimpleQueue):
    """None if there is nothing until the next heartbeat is due."""
    with contextlib.suppress(queue.Empty):
        return events.get(timeout=HEARTBEAT)


def say(text: str) -> None:
    print(f"launch_cluster: {text}", file=sys.stderr, flush=True)


def report(failed: list[Run]) -> int:
    """Says which host failed first, and why; returns its exit code.

    When one host fails, the others soon fail too, in the middle of a collective. On unlike machines their end may be
    reported before its own, so the first one that does not complain about a lost peer counts.
    """
    run = next((run for run in failed if not any(map(LOST_PEER.search, run.last))), failed[0])
    lines = list(run.last)
    ends = [index for index, line in enumerate(lines) if "torch/distributed/elastic" in line and "exitcode" in line]
    shown = lines[:ends[0] + 1 if ends else None]  # after that torchrun speaks of itself
    return describe(run, f"{run.host.label} (node rank {run.host.rank}) failed first", shown)


def describe(run: Run, what: str, shown: list[str]) -> int:
    """Says what has happened, what the user can do about it, and the last lines; returns the exit code."""
    print(f"\nlaunch_cluster: {what}, with exit code {run.code}", file=sys.stderr)
    if explained := run.host.explain(run.code, "\n".join(run.last)):
        say(f"{explained[0]}: {explained[1]}")
    say("its last lines:" if shown else "it printed nothing")
    print("".join(f"    {line}\n" for line in shown[-12:]), end="", file=sys.stderr)
    return run.code if run.code > 0 else 128 - run.code
