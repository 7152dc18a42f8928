"""A connection to a host, and a run as the launcher sees it: what hosts print, when all have to end, why one failed.

The far end of a run is host_run.py. Down ssh's standard input go the job and heartbeats, and what was started there
ends when they do. What it prints comes back as `host | line`.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import exits
from host_facts import ASKS, MARK
from host_run import BEGUN, HAS_USER_ERROR
from inventory import Host

HEARTBEAT = 0.5  # seconds at most between two of them
GRACE = 3  # seconds from the first failure until the others are stopped: whose fault was it?
NEVER = float("inf")
STOP = 20  # seconds without a line from a host that was told to stop, until ssh itself is ended: it is out of reach
PROCESS_ENDED = re.compile(f"torch/distributed/elastic.*exitcode|{HAS_USER_ERROR.pattern}")  # what follows is no use
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|Connection refused")
# Stack traces of torch's stores, with the empty lines in between.
STORE_TRACE = re.compile(r"^frame #\d+: |^<omitting python frames>|^Exception raised from \w+ at /|"
                         r"\[c10d\] (recv|send)\w+ failed|^$")


class Contact:
    """An ssh process. What its words start on the host reads lines from standard input; what that prints, also on
    standard error, comes back. `last`: the last lines of it. `code`: the exit code, when all has come back."""

    def __init__(self, host: Host, *words: str):
        self.host, self.code, self.last = host, None, collections.deque(maxlen=200)
        # In a session of its own ssh has no terminal to ask anything on, and Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(host.ssh(*words), start_new_session=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def send(self, line: str = "", further: bytes = b"") -> None:
        with contextlib.suppress(OSError, ValueError):  # ssh has ended, or its input was closed
            self.process.stdin.write(line.encode() + b"\n" + further)
            self.process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """What comes back, as it comes."""
        for line in self.process.stdout:
            self.last.append(line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])  # as of a progress bar
            yield self.last[-1]
        self.code = self.process.wait()

    def ask(self, seconds: float, question) -> dict | tuple[str, str, str]:
        """The answer; where there is none within `seconds`: (what is wrong, details, cure)."""
        watchdog = threading.Timer(seconds, self.kill)
        watchdog.start()
        self.send(json.dumps(question))
        answer = next((line for line in self.lines() if MARK + "{" in line), None)  # what ssh -v prints has MARK, too
        watchdog.cancel()
        if answer:
            return json.loads(answer.partition(MARK)[2])
        name, cure = self.explain() or (
            "no answer", f"see what it is busy with, and whether {self.host.python} starts there")
        return name, f"exit code {self.code}: {self.last_line()}" if self.code > 0 else f"in {seconds} seconds", cure

    def explain(self) -> tuple[str, str] | None:
        return self.host.explain(self.code, "\n".join(self.last))

    def last_line(self) -> str:
        return next(filter(str.strip, reversed(self.last)), "")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with what ssh has started here, as a ProxyCommand

    def end(self) -> None:
        self.kill()
        self.process.communicate()


@contextlib.contextmanager
def at_once(contacts: list[Contact]) -> Iterator[ThreadPoolExecutor]:
    """A thread for each contact. All contacts are ended behind it, also on Ctrl-C."""
    with ThreadPoolExecutor(len(contacts) or 1) as pool:
        try:
            yield pool
        finally:
            for contact in contacts:
                contact.end()


def far_end(host: Host, program: str) -> list[str]:
    """The words that start a program of this folder on a host."""
    return [host.python, os.path.join(host.dir, "cluster", "hosts", program)]


class Run(Contact):
    """The part of one host: sends the job, prints what comes back, and puts its end among the launch's `events`.

    A line that the launch's `alarm` matches is put there at once. Where there is one, stack traces of torch's stores
    are not printed: a lost host leaves many lines of them on all others. `quiet`: print nothing until it has begun. The
    first line that is sent is the job; empty ones are heartbeats, others what the user types, as JSON.
    """

    def __init__(self, launch: "Launch", host: Host, quiet: bool):
        super().__init__(host, *far_end(host, launch.program))
        self.quiet, self.heard, self.has_begun = quiet, time.monotonic(), False
        self.send(json.dumps(launch.make_job(launch.hosts, host)))
        threading.Thread(target=self.read, args=[launch], daemon=True).start()

    def send_input(self) -> None:
        """Sends what the user types to this host, from when a script there asks for it."""
        with contextlib.suppress(OSError), open(0, errors="surrogateescape", closefd=False) as typed:
            for line in typed:
                self.send(json.dumps(line))
        self.send("null")

    def read(self, launch: "Launch") -> None:
        prefix = f"{self.host.label:<{launch.width}} | "
        for text in self.lines():
            self.heard = time.monotonic()
            if BEGUN.match(text):
                self.has_begun, self.quiet = True, False
            if text == ASKS:
                threading.Thread(target=self.send_input, daemon=True).start()
            if launch.alarm and launch.alarm.search(text):
                launch.events.put((launch.heard, self, text))
            if self.quiet or launch.alarm and STORE_TRACE.search(text):
                continue
            try:
                sys.stdout.write(f"{prefix}{text}\n")
                sys.stdout.flush()
            except OSError:
                launch.events.put((launch.signalled, signal.SIGPIPE))  # nobody reads any more
        launch.events.put((launch.has_ended, self))

    def stop(self, since: float) -> None:
        """Closing its input makes host_run.py end all; where the host is out of reach, ssh itself is ended.

        `since`: when the host was first told. As long as host_run.py waits for a training to save, it says so.
        """
        with contextlib.suppress(OSError):  # ssh has ended meanwhile
            self.process.stdin.close()
        if time.monotonic() > max(since, self.heard) + STOP:
            self.process.kill()


def say(text: str) -> None:
    print(f"launch_cluster: {text}", file=sys.stderr, flush=True)


class Launch:
    """The runs of all hosts: all of them end when one has failed, or on Ctrl-C. make_job(hosts, host): what one does.

    `running`: by the hosts' labels. `failed`: in the order of their ends. From `stop_at` on all are told to end.
    """

    program = "host_run.py"  # the far end
    at_most = NEVER  # hosts that run at once
    alarm: re.Pattern | None = None

    def __init__(self, hosts: list[Host], make_job: Callable[[list[Host], Host], dict]):
        self.hosts, self.make_job, self.width = hosts, make_job, max(len(host.label) for host in hosts)
        self.events, self.running = queue.SimpleQueue(), {}  # an event: a method, and its arguments but the time
        self.try_at: dict[str, float] = {}  # when a host that does not run may be started; without it at any time
        self.tried: set[str] = set()  # were started again, and have not begun yet
        self.failed, self.is_quiet, self.code, self.stop_at = [], False, exits.DONE, NEVER

    def start(self, is_again: bool = True) -> None:
        """Starts hosts that do not run, first those that have waited longest. `is_again`: they print nothing yet."""
        for host in sorted(self.hosts, key=lambda host: self.try_at.get(host.label, 0)):
            is_due = host.label not in self.running and time.monotonic() >= self.try_at.get(host.label, 0)
            if is_due and len(self.running) < self.at_most:
                self.running[host.label] = Run(self, host, is_again)
                self.tried |= {host.label} if is_again else set()

    def run(self) -> int:
        """Starts the hosts, and waits until all have ended. The exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.events.put((self.signalled, number)))
        self.start(is_again=False)
        while self.running or self.goes_on():
            with contextlib.suppress(queue.Empty):
                happened, *what = self.events.get(timeout=HEARTBEAT)
                happened(*what, time.monotonic())
            self.look_around(now := time.monotonic())
            for run in self.running.values():
                if now < self.stop_at:
                    run.send()
                else:
                    run.quiet = self.is_quiet
                    run.stop(self.stop_at)
        return self.report() if self.failed else self.code

    def signalled(self, number: int, now: float) -> None:
        self.stop(now, exits.after(number))

    def stop(self, at: float, code: int, is_quiet: bool = False) -> None:
        """All hosts end what they run. The first reason gives the exit code. `is_quiet`: they print nothing from then
        on, since torchrun's own reports of being stopped would bury the cause."""
        if at < self.stop_at:
            self.stop_at, self.code, self.is_quiet = at, code, is_quiet

    def fail(self, run: Run, now: float) -> None:
        """The others are stopped a little later, since the host that fails first need not be the one that says why."""
        if now < self.stop_at:  # what ends later was told to
            self.failed.append(run)
            self.stop(now + GRACE, exits.FAILED, is_quiet=True)

    def has_ended(self, run: Run, now: float) -> None:
        del self.running[run.host.label]
        self.ended(run, now)

    def ended(self, run: Run, now: float) -> None:
        if run.code:
            self.fail(run, now)

    def heard(self, run: Run, line: str, now: float) -> None:
        """A line that `alarm` matches."""

    def goes_on(self) -> bool:
        """Whether hosts may still be started when none runs."""
        return False

    def look_around(self, now: float) -> None:
        """Called twice a second at least."""

    def cause(self) -> Run:
        """The run that says why: on unlike machines the end of one that lost its peer may be reported earlier."""
        def has_message(run: Run) -> bool:
            return any(line.startswith("error: ") for line in run.last)

        return min(self.failed, key=lambda run: (not has_message(run), any(map(LOST_PEER.search, run.last))))

    def report(self) -> int:
        """Says which host failed first, what the user can do about it, and its last lines; returns its exit code."""
        run = self.cause()
        lines = list(run.last)
        end = next((index for index, line in enumerate(lines, 1) if PROCESS_ENDED.search(line)), None)
        print(f"\nlaunch_cluster: {run.host.label} (node rank {run.host.rank}) failed first, with exit code {run.code}",
              file=sys.stderr)
        if explained := run.explain():
            say(": ".join(explained))
        say("its last lines:" if lines else "it printed nothing")
        print("".join(f"    {line}\n" for line in lines[:end][-12:]), end="", file=sys.stderr)
        return exits.as_shell(run.code)
