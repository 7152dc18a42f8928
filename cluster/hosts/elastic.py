"""`launch_cluster.sh --elastic MIN:MAX`: a run that goes on when a host is lost, and takes hosts in while it runs.

On each host an agent starts the script (host_run.py). The processes meet by themselves, go on without those that are
lost, and take new ones in. The launcher decides which hosts are there to be met:

    running --- ssh ends with an error, the agent is killed ---> lost --- ssh starts its part again ---> running
       |
       +--- the script ends with an error of the user's ---> the run ends, with the report of the cause
       +--- its processes fail again and again ---> left out, until its line in hosts.txt changes

hosts.txt is read again when it changes. At most MAX hosts run at once; those beyond stand by, and replace a lost one.
"""

import os
import re
import time
from collections.abc import Callable

import exits
from host_run import BEGUN, HAS_USER_ERROR
from inventory import OF_SSH, Host, UserError, read_hosts, require_elastic
from remote_run import NEVER, Launch, Run, say

RETRY = 2.0  # seconds between two attempts to reach a host
WAIT = 600.0  # seconds that a run waits with fewer than MIN hosts
AGAIN = "the same command goes on from the last checkpoint (--resume auto)"
SSH_SAYS = re.compile(r"ssh: |Connection |Timeout, |client_loop|Read from remote|kex_exchange")


def count(number: int) -> str:
    return f"{number} host{'s' * (number != 1)}"


def ended_because(run: Run) -> tuple[str, str]:
    """(what it means, why) for a host whose part has ended with an error.

    "lost": the host is gone, or only its connection or its agent. "script": an error of the user's. "setup": the script
    can't be started there, or does not stop failing.
    """
    if run.code == OF_SSH:
        name, cure = run.host.explain(run.code, "\n".join(run.last))
        said = next((line for line in reversed(run.last) if SSH_SAYS.match(line)), "its ssh has ended")
        return "lost", said if name == "unreachable host" else f"{name}: {cure}"
    if (number := exits.as_shell(run.code) - exits.after(0)) > 0:
        return "lost", f"{'its part' if run.code > 0 else 'ssh'} was ended by signal {number}"
    if run.code == exits.UNHEARD:
        return "lost", "it did not hear this machine any more"
    return "script" if run.has_begun and run.code == exits.USER_ERROR else "setup", ""


class Elastic(Launch):
    """The hosts of an elastic run and their states. A host that was lost is `tried` until its part begins again. One
    whose part can't be started is tried at NEVER, until its line in hosts.txt changes."""

    alarm = re.compile(f"{BEGUN.pattern}|{HAS_USER_ERROR.pattern}")

    def __init__(self, path: str, hosts: list[Host], at_least: int, at_most: int, make_job: Callable):
        super().__init__(hosts, make_job)
        self.path, self.at_least, self.at_most = path, at_least, at_most
        self.said: set[str] = set()
        self.modified, self.enough_at = os.stat(path).st_mtime_ns, time.monotonic()
        self.is_done = False

    def heard(self, run: Run, line: str, now: float) -> None:
        if not BEGUN.match(line):
            self.fail(run, now)
        elif run.host.label in self.tried:
            self.tried.remove(run.host.label)
            say(f"{run.host.label} answers: its part of the run starts")

    def ended(self, run: Run, now: float) -> None:
        if run.code == exits.DONE:
            self.is_done = True  # an agent ends well when the processes of all have
            for label in self.tried & self.running.keys():
                self.running[label].process.kill()
        elif now < self.stop_at:
            meaning, why = ended_because(run)
            if meaning == "script":
                self.fail(run, now)
            elif self.is_done or self.failed:
                return
            elif meaning == "lost":
                self.lose(run, why, now)
            elif not self.leave_out(run):
                self.failed = [run]
                self.stop(now, run.code, is_quiet=True)

    def lose(self, run: Run, why: str, now: float) -> None:
        label, left = run.host.label, len(self.running.keys() - self.tried)
        self.try_at[label] = now + RETRY
        if label in self.tried:
            self.say_once(f"{label} is not back yet: {why}")
        elif left >= self.at_least:
            say(f"{label} is lost ({why}): the run goes on with {count(left)}, and takes it in when it answers again")
        else:
            say(f"{label} is lost ({why}): {count(left)} left, but the run needs {self.at_least}, so it waits")

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            say(text)

    def leave_out(self, run: Run) -> bool:
        """Goes on without a host whose part can't be started; False if there are then too few."""
        label = run.host.label
        explained = run.host.explain(run.code, "\n".join(run.last))
        lines = [line for line in run.last if not line.startswith("stopping: ")] or ["it printed nothing"]
        why = ": ".join(explained) if explained else lines[-1]
        self.try_at[label] = NEVER
        if sum(self.try_at.get(host.label, 0) < NEVER for host in self.hosts) < self.at_least:
            return False
        say(f"{label} can't take part, exit code {run.code}: {why} (it is tried again when its line in {self.path} "
            "changes)")
        return True

    def goes_on(self) -> bool:
        return time.monotonic() < self.stop_at and not self.is_done and not self.failed

    def look_around(self, now: float) -> None:
        """Reads hosts.txt if it has changed, tries the hosts that could take part, and waits no longer than WAIT."""
        if not self.goes_on():
            return
        self.read_again()
        self.start()
        if len(self.running.keys() - self.tried) >= self.at_least:
            self.enough_at = now
        elif now > self.enough_at + WAIT:
            say(f"fewer than {count(self.at_least)} for {WAIT:g} seconds, so the run ends: {AGAIN}")
            self.stop(now, exits.FAILED, is_quiet=True)

    def read_again(self) -> None:
        """Takes over what has changed in hosts.txt. A file that makes no sense changes nothing."""
        try:
            if (modified := os.stat(self.path).st_mtime_ns) == self.modified:
                return
            self.modified = modified
            hosts = read_hosts(self.path)
            require_elastic(hosts, self.path)
        except (OSError, UserError) as error:
            return self.say_once(f"{error}: the run goes on with the hosts that it knows")
        known, self.hosts = {host.label: host for host in self.hosts}, hosts
        for host in hosts:
            if host.label not in known:
                say(f"{host.label} is new in {self.path}")
            if host != known.get(host.label):
                self.try_at.pop(host.label, None)
