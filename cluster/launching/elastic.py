"""`launch_cluster.sh --elastic MIN:MAX`: a run that goes on when a host is lost, and takes hosts in while it runs.

On each host torchrun's elastic agent starts the script. The agents find each other through a store that the first
host's agent keeps, the rendezvous. When one is gone or a new one waits, all of them stop their processes and start
them anew with the hosts that are there. Which ones are there is decided here:

    running --- ssh ends with an error, torchrun is killed ---> lost --- it answers `ssh host true` again ---> running
       |
       +--- the script ends with an error of the user's ---> the run ends, with the report of the cause
       +--- it is the first host ---> the run ends: the rendezvous is gone

hosts.txt is read again when it changes. At most MAX hosts run at once; those beyond stand by, and replace a lost one.
"""

import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable

from host_run import UNHEARD
from hosts import Host, UserError, read_hosts
from remote_run import GRACE, Run, catch_signals, describe, next_event, say

RETRY = 2.0  # seconds between two attempts to reach a host, and between two looks at hosts.txt
WAIT = 600.0  # seconds that a run waits with fewer than MIN hosts
SETTLED = 60.0  # seconds: a torchrun that fails earlier could not even start
BEGUN = re.compile(r"^[0-9]+ process(es)? with OMP_NUM_THREADS=")  # what host_run.py prints first
AGAIN = "the same command goes on from the last checkpoint (--resume auto)"
USER_ERROR = re.compile(r"torch/distributed/elastic.*failed \(exitcode: 2\)")  # what the agent says of a process
AGENT_ENDED = re.compile("death signal, shutting down workers|ChildFailedError")  # by its process, or out of restarts
NO_RENDEZVOUS = re.compile(r"Rendezvous\w*Error|DistNetworkError|DistStoreError")
SSH_SAYS = re.compile(r"ssh: |Connection |Timeout, |client_loop|Read from remote|kex_exchange")


class Probe:
    """Asks a host over ssh whether it answers, and puts itself in `events` when it knows."""

    def __init__(self, host: Host, events: queue.SimpleQueue):
        self.host, self.code, self.said = host, None, ""
        words = host.ssh("true")
        words[1:1] = ["-o", "ConnectTimeout=5"]
        self.process = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL, text=True,
                                        errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self.wait, args=[events], daemon=True).start()

    def wait(self, events: queue.SimpleQueue) -> None:
        self.said, _ = self.process.communicate()
        self.code = self.process.returncode
        events.put(self)


def count(number: int) -> str:
    return f"{number} host{'s' * (number != 1)}"


def ended_because(run: Run) -> tuple[str, str]:
    """(what it means, why) for a host whose part has ended with an error.

    "lost": the host is gone, or only its connection or its torchrun. "script": its processes ended torchrun, or did not
    stop failing. "setup": torchrun does not start there.
    """
    text = "\n".join(run.last)
    if run.code == 255:
        name, cure = run.host.explain(run.code, text)
        said = next((line for line in reversed(run.last) if SSH_SAYS.match(line)), "its ssh has ended")
        return "lost", said if name == "unreachable host" else f"{name}: {cure}"
    if run.code > 128 or run.code < 0:
        return "lost", f"{'its torchrun' if run.code > 0 else 'ssh'} was ended by signal {abs(run.code) % 128}"
    if run.code == UNHEARD:
        return "lost", "it did not hear this machine any more"
    if AGENT_ENDED.search(text):
        return "script", ""
    if NO_RENDEZVOUS.search(text):
        return "lost", "its torchrun has no connection to the rendezvous any more"
    if time.monotonic() - run.started > SETTLED:
        return "lost", f"its torchrun ended with exit code {run.code}"
    return "setup", ""


class Elastic:
    """The hosts of an elastic run and their states. make_job(hosts, host): what the host is told to do."""

    def __init__(self, path: str, hosts: list[Host], at_least: int, at_most: int, make_job: Callable):
        self.path, self.hosts, self.first, self.make_job = path, hosts, hosts[0], make_job
        self.at_least, self.at_most = at_least, at_most
        self.events, self.width = queue.SimpleQueue(), max(len(host.label) for host in hosts)
        self.running: dict[str, Run] = {}
        self.probes: dict[str, Probe] = {}
        self.try_at: dict[str, float] = {}  # when a host that does not run is tried next
        self.left_out: dict[str, Host] = {}  # torchrun does not start there: tried again when their lines change
        self.said: set[str] = set()
        self.modified, self.read_at, self.few_since = os.stat(path).st_mtime_ns, 0.0, None
        self.failed, self.fail_at = None, float("inf")  # the run of a script that ended with an error; stops all then
        self.is_done, self.is_quiet, self.code, self.stop_at = False, False, 0, float("inf")

    def launch(self) -> int:
        """Runs until all have ended, the script has failed, the rendezvous is lost or a signal comes; the exit code."""
        catch_signals(self.events)
        for host in self.hosts[:self.at_most]:
            self.start(host)
        while self.running:
            event, now = next_event(self.events), time.monotonic()
            if isinstance(event, Run):
                self.ended(event, now)
            elif isinstance(event, Probe):
                self.answered(event, now)
            elif isinstance(event, tuple):
                self.script_failed(event[0], now)
            elif event:
                self.stop(now, 128 + event)
            if now >= self.fail_at:
                self.stop(now, 1, is_quiet=True)
            if now < self.stop_at and not self.is_done and not self.failed:
                self.look_around(now)
            for run in self.running.values():
                if now < self.stop_at:
                    run.send()
                else:
                    run.quiet = self.is_quiet  # torchrun's own reports of being stopped would bury the cause
                    run.stop(self.stop_at)
        for probe in self.probes.values():
            probe.process.kill()
        return self.report() if self.failed else self.code

    def start(self, host: Host) -> None:
        self.running[host.label] = Run(host, self.make_job(self.hosts, host), self.width, self.events, USER_ERROR)

    def stop(self, now: float, code: int, is_quiet: bool = False) -> None:
        """From now on all hosts end what they run. The first reason gives the exit code."""
        if now < self.stop_at:
            self.stop_at, self.code, self.is_quiet = now, code, is_quiet

    def script_failed(self, run: Run, now: float) -> None:
        """The others are stopped a little later, since the host that fails first need not be the one that says why."""
        def has_message(run: Run) -> bool:
            return any("error: " in line for line in run.last)

        if now < self.stop_at and (self.failed is None or has_message(run) > has_message(self.failed)):
            self.failed = run
            self.fail_at = min(self.fail_at, now + GRACE)

    def ended(self, run: Run, now: float) -> None:
        self.running.pop(run.host.label, None)
        if run.code == 0:
            self.is_done = True  # an agent ends well when the processes of all have
        elif now < self.stop_at:
            meaning, why = ended_because(run)
            if meaning == "script":
                self.script_failed(run, now)
            elif meaning == "lost" and not self.is_done and not self.failed:
                self.lose(run, why, now)
            elif meaning == "setup" and not self.is_done and (run.host is self.first or not self.leave_out(run)):
                self.failed = self.failed or run
                self.stop(now, run.code, is_quiet=True)

    def lose(self, run: Run, why: str, now: float) -> None:
        label, left = run.host.label, len(self.running)
        if run.host is self.first and not any(map(BEGUN.match, run.last)) and now < run.started + SETTLED:
            self.failed = run
            return self.stop(now, 1, is_quiet=True)
        if run.host is self.first:
            say(f"{label} is lost ({why}). It held the rendezvous, so the run ends: {AGAIN}")
            return self.stop(now, max(run.code, 1), is_quiet=True)
        self.try_at[label] = now + RETRY
        self.said.add(f"{label}: {why}")
        if left >= self.at_least:
            say(f"{label} is lost ({why}): the run goes on with {count(left)}, and takes it in when it answers again")
        else:
            say(f"{label} is lost ({why}): {count(left)} left, but the run needs {self.at_least}, so it waits")

    def leave_out(self, run: Run) -> bool:
        """Goes on without a host on which torchrun does not start; False if there are then too few."""
        label = run.host.label
        explained = run.host.explain(run.code, "\n".join(run.last))
        why = ": ".join(explained) if explained else next(reversed(run.last), "it printed nothing")
        self.left_out[label] = run.host
        if sum(host.label not in self.left_out for host in self.hosts) < self.at_least:
            return False
        say(f"{label} can't take part, exit code {run.code}: {why} (it is tried again when its line in {self.path} "
            "changes)")
        return True

    def answered(self, probe: Probe, now: float) -> None:
        label = probe.host.label
        self.probes.pop(label, None)
        self.try_at[label] = now + RETRY
        if probe.code == 0:
            if now >= self.stop_at or self.is_done or self.failed:
                return
            if len(self.running) < self.at_most and label not in self.running:
                say(f"{label} answers: torchrun starts there")
                self.start(probe.host)
        elif explained := probe.host.explain(probe.code, probe.said):
            why = ": ".join(explained)
            if explained[0] != "unreachable host" and f"{label}: {why}" not in self.said:  # else it is tried quietly
                self.said.add(f"{label}: {why}")
                say(f"{label} does not let this machine in: {why}")

    def look_around(self, now: float) -> None:
        """Reads hosts.txt if it has changed, tries the hosts that could take part, and waits no longer than WAIT."""
        if now > self.read_at + RETRY:
            self.read_at = now
            self.read_again()
        for host in self.hosts:
            idle = not any(host.label in group for group in (self.running, self.probes, self.left_out))
            if idle and len(self.running) < self.at_most and now >= self.try_at.get(host.label, 0):
                self.probes[host.label] = Probe(host, self.events)
        if len(self.running) >= self.at_least:
            self.few_since = None
        elif self.few_since is None:
            self.few_since = now
        elif now > self.few_since + WAIT:
            say(f"fewer than {count(self.at_least)} for {WAIT:g} seconds, so the run ends: {AGAIN}")
            self.stop(now, 1, is_quiet=True)

    def read_again(self) -> None:
        """Takes over what has changed in hosts.txt, but for the first host. A file that makes no sense changes nothing.
        """
        try:
            if (modified := os.stat(self.path).st_mtime_ns) == self.modified:
                return
            self.modified = modified
            hosts = read_hosts(self.path)
        except (OSError, UserError) as error:
            if str(error) not in self.said:
                self.said.add(str(error))
                say(f"{error}: the run goes on with the hosts that it knows")
            return
        known = {host.label for host in self.hosts}
        self.hosts = [self.first, *(host for host in hosts if host.label != self.first.label)]
        self.left_out = {host.label: self.left_out[host.label] for host in self.hosts
                         if self.left_out.get(host.label) == host}
        for rank, host in enumerate(self.hosts):
            host.rank = rank
            if host.label not in known:
                say(f"{host.label} is new in {self.path}")

    def report(self) -> int:
        """The last lines of the host whose script has failed, up to where torchrun speaks of its own end."""
        lines = list(self.failed.last)
        ends = [index for index, line in enumerate(lines) if USER_ERROR.search(line) or AGENT_ENDED.search(line)]
        return describe(self.failed, f"{self.failed.host.label} failed", lines[:ends[0] if ends else None])
