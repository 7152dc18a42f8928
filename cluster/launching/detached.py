"""`--detach`, `--attach`, `--status` and `--stop`: runs that outlive the launcher, as a daemon on each host (daemon.py).

A launcher only looks on. Any machine that has hosts.txt and reaches the hosts can do so:

    --detach    starts the daemons, and ends when all have begun; of an elastic run, those that are missing
    --attach    prints what they print, until they have ended or until Ctrl-C, which leaves them alone
    --stop      asks them to end, as Ctrl-C does in a run that is not detached, and waits for that
"""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from daemon import ANSWER, KILLED, NO_PART
from elastic import RETRY, Elastic
from host_run import UNHEARD
from hosts import Host, UserError
from remote_run import Launch, Run, far_end, say

STOPPED = 143  # the exit code of a daemon that was asked to end
PATIENCE = 30  # seconds until a host has to answer
NOTHING = "no part of a run is there"


def look(host: Host) -> tuple[dict | None, str]:
    """(the host's newest part of a run, why it does not say so). See daemon.answer()."""
    question = json.dumps({"ask": "look", "label": host.label}) + "\n"
    try:
        done = subprocess.run(far_end(host), input=question, capture_output=True, text=True, errors="replace",
                              timeout=PATIENCE, start_new_session=True)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {PATIENCE} seconds"
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER)), ""
    explained = host.explain(done.returncode, done.stderr)
    last = done.stderr.strip().rpartition("\n")[2]
    return None, ": ".join(explained) if explained else f"exit code {done.returncode}: {last}"


def look_at_all(hosts: list[Host]) -> dict[str, tuple[dict | None, str]]:
    """By the hosts' labels."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return dict(zip([host.label for host in hosts], pool.map(look, hosts)))


def id_of(job: dict) -> str:
    return job["mark"].partition(" ")[0]


def ending(code: int) -> str:
    return {KILLED: "was killed", STOPPED: "was stopped"}.get(code, f"has ended with code {code}")


def newest(parts: list[dict]) -> dict | None:
    return max(parts, key=lambda part: part["job"]["started"], default=None)


def status(hosts: list[Host]) -> int:
    """Prints a row a host."""
    table = [("host", "reachable", "run", "script", "state", "last line")]
    for label, (part, why) in look_at_all(hosts).items():
        if not part:
            table.append((label, "no" if why else "yes", "-", "-", "-", why or "-"))
            continue
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["job"]["started"]))
        script, *words = part["job"]["command"]
        table.append((label, "yes", id_of(part["job"])[:8], shlex.join([os.path.basename(script), *words])[:40],
                      f"runs since {since}" if part["is_alive"] else ending(part["code"]), part["last"][:80] or "-"))
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    return 0


class Start(Launch):
    """Starts daemons and follows them until all have begun."""

    def look_around(self, now: float) -> None:
        if not self.failed and all(run.has_begun for run in self.running.values()):
            self.stop(now, 0)

    def ended(self, run: Run, now: float) -> None:
        if run.code and now < self.stop_at:
            self.fail(run, now)


class Follow(Launch):
    """Follows the parts of a run, and asks them to end where `ask` is "stop"; the exit code that they had together.

    A host that is out of reach, or has no part, is tried again and again until the others have ended.
    """

    def __init__(self, hosts: list[Host], ask: str, run: str | None = None, is_elastic: bool = False):
        super().__init__(hosts, lambda hosts, host: {"ask": ask, "label": host.label, "run": run})
        self.ask, self.is_elastic, self.alarm = ask, is_elastic, Elastic.alarm if is_elastic else None
        self.codes: dict[str, int] = {}
        self.away: dict[str, tuple[str, float]] = {}  # why, and when the host is tried next
        self.is_over = False

    def ended(self, run: Run, now: float) -> None:
        label = run.host.label
        if now >= self.stop_at:
            return
        if run.code in (255, NO_PART, UNHEARD, 126, 127) or run.code < 0:
            explained = run.host.explain(run.code, "\n".join(run.last)) or ("no contact",)
            why = NOTHING if run.code == NO_PART else ": ".join(explained)
            if self.away.get(label, ("",))[0] != why:
                say(f"{label}: {why}")
            self.away[label] = why, now + RETRY
            return
        self.codes[label] = run.code
        self.away.pop(label, None)
        say(f"{label}: its part of the run {ending(run.code)}")
        if run.code not in (0, STOPPED):
            self.failed.append(run)

    def look_around(self, now: float) -> None:
        for label in [label for label, run in self.running.items() if run.has_begun]:
            self.away.pop(label, None)
        is_known = self.ask == "stop" or self.codes and (not self.is_elastic or 0 in self.codes.values())
        if now < self.stop_at and not self.running.keys() - self.away.keys() and (is_known or not self.unreached()):
            self.is_over = True
            self.stop(now, STOPPED if STOPPED in self.codes.values() else 0)
            for run in self.running.values():  # those that are out of reach
                run.process.kill()
        for host in self.hosts if now < self.stop_at else ():
            if host.label not in self.running and now > self.away.get(host.label, ("", float("inf")))[1]:
                self.start(host, is_quiet=True)

    def unreached(self) -> list[str]:
        return [label for label, (why, _) in self.away.items() if why != NOTHING]

    def report(self) -> int:
        """As Launch does, where the run has ended with an error: an elastic one goes on when a host is lost."""
        if not self.is_over or self.ask == "stop" or self.is_elastic and 0 in self.codes.values():
            return self.code
        return super().report()


def detach(hosts: list[Host], path: str, elastic: tuple[int, int] | None, env: dict, run: dict, job: Callable) -> int:
    """Starts the parts of a run that do not run yet. What a living one of them knows is taken over into `run`, from
    which job(hosts, host) makes the job of a host. Raises UserError."""
    found = look_at_all(hosts)
    alive = {label: part for label, (part, _) in found.items() if part and part["is_alive"]}
    if alive:
        first = newest(list(alive.values()))["job"]
        its = first.get("elastic", {})
        if (not elastic or (its.get("at_least"), its.get("at_most")) != elastic or first["command"] != run["command"]
                or first["master_port"] != run["port"] or not env.items() <= first["environment"].items()):
            raise UserError(f"the run {id_of(first)[:8]} ({shlex.join(first['command'])}) is alive on "
                            f"{', '.join(alive)}: end it by {path} --stop, or look at it by --attach. Only an elastic "
                            "run takes hosts in, by the very command that has started it")
        run |= {"id": id_of(first), "token": its["token"], "hosts": its["hosts"], "started": first["started"],
                "environment": first["environment"]}
    away = {label: why for label, (_, why) in found.items() if why}
    if len(found) - len(away) < (elastic[0] if elastic else len(hosts)):
        raise UserError(f"nothing is started, since hosts are missing: {'; '.join(map(': '.join, away.items()))}")
    has_part = [label for label, (part, _) in found.items()
                if part and id_of(part["job"]) == run["id"] and (part["is_alive"] or part["code"] == 0)]
    missing = [host for host in hosts if host.label not in has_part and host.label not in away]
    missing = missing[:max(0, elastic[1] - len(has_part))] if elastic else missing
    for label, why in away.items():
        say(f"{label} has no part yet ({why}): the same command starts it later")
    if missing:
        start = Start(missing, lambda _, host: {"ask": "start", "job": job(hosts, host)})
        if code := start.run():
            Follow(missing, "stop").run()
            return code
    say(f"the run {run['id'][:8]} goes on by itself on {', '.join(has_part + [host.label for host in missing])}, with its "
        f"output in logs/launches/{run['id']}/ there")
    say(f"launch_cluster.sh {path} --attach shows what it prints, --status how it is; --stop lets it save and ends it")
    return 0


def attach(hosts: list[Host], path: str) -> int:
    """Raises UserError where there is nothing to look at."""
    found = look_at_all(hosts)
    part = newest([part for part, _ in found.values() if part])
    if not part:
        away = "".join(f"; {label}: {why}" for label, (_, why) in found.items() if why)
        raise UserError(f"no host of {path} that answers has a detached run: start one by --detach{away}")
    follow = Follow(hosts, "follow", id_of(part["job"]), "elastic" in part["job"])
    code = follow.run()
    if not follow.is_over:
        say("left. The run goes on: --attach comes back to it, --stop ends it")
    return code


def stop(hosts: list[Host]) -> int:
    follow = Follow(hosts, "stop")
    code = follow.run()
    if not follow.is_over:
        say("left. The hosts go on to end the run: --status says when they have")
        return code
    if unreached := follow.unreached():
        say(f"{', '.join(unreached)} could not be reached: what runs there goes on")
    return 1 if unreached else 0
