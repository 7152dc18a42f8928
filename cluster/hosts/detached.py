"""--detach, --attach, --status and --stop: runs that outlive the launcher, as a daemon on each host (daemon.py).

A launcher only looks on, and Ctrl-C leaves the run alone. Any machine that has hosts.txt and reaches the hosts will do.
"""

import os
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from check_hosts import Contact
from daemon import KILLED, NO_PART
from elastic import RETRY, Elastic
from host_run import UNHEARD
from inventory import Host, UserError
from remote_run import Launch, Run, far_end, say

STOPPED = 143  # the exit code of a daemon that was asked to end
NOTHING = "no part of the run is there"


def ask_all(hosts: list[Host], what: str, jobs: dict[str, dict] | None = None) -> dict[str, dict]:
    """The states of the hosts' parts, by label, as daemon.answer() gives them; {"away": why} where a host is silent."""
    def ask(host: Host) -> dict:
        contact = Contact(host, far_end(host))
        part = contact.ask(60, {"ask": what, "label": host.label, "run": "*", "job": (jobs or {}).get(host.label)})
        contact.end()
        return {"away": "{1}: {2}".format(*contact.problems[0])} if part is None else part

    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        return dict(zip([host.label for host in hosts], pool.map(ask, hosts)))


def ending(code: int) -> str:
    return {KILLED: "was killed", STOPPED: "was stopped"}.get(code, f"has ended with code {code}")


def newest(parts: dict[str, dict]) -> dict | None:
    """The job of the newest run, by the clock of the machine on which it was typed."""
    return max((part["job"] for part in parts.values() if "job" in part), key=lambda job: job["started"], default=None)


def status(hosts: list[Host], path: str) -> int:
    """Prints a row a host."""
    table = [("host", "reachable", "run", "script", "state", "last line")]
    for label, part in ask_all(hosts, "look").items():
        row = [label, "no" if "away" in part else "yes", "-", "-", "-", part.get("away", "-")]
        if "job" in part:
            script, *words = part["job"]["command"]
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["job"]["started"]))
            row[2:] = [part["job"]["id"][:8], shlex.join([os.path.basename(script), *words])[:40],
                       f"runs since {since}" if part["is_alive"] else ending(part["code"]), *part["last"][-1:]]
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    return 0


class Follow(Launch):
    """Prints what the parts of a run print, until it has ended. A host that is out of reach or has no part is tried
    again and again, and so is one whose part was killed, which --detach may start again. By label, `ends`: whose parts
    have ended; `away`: why there is none, and when to look again; `killed`: when to look again."""

    def __init__(self, hosts: list[Host], run: dict):
        super().__init__(hosts, lambda hosts, host: {"ask": "follow", "label": host.label, "run": run["id"],
                                                     "again": host.label in self.killed})
        self.is_elastic = "elastic" in run
        self.alarm = Elastic.alarm if self.is_elastic else None
        self.ends, self.away, self.killed, self.is_over = {}, {}, {}, False

    def ended(self, run: Run, now: float) -> None:
        label = run.host.label
        if now >= self.stop_at:
            return
        why, _ = self.away.pop(label, ("", 0.0))
        is_away = run.code in (255, NO_PART, UNHEARD, 126, 127) or run.code < 0
        if is_away and label in self.killed:
            self.killed[label] = now + RETRY
        elif is_away:
            found = ": ".join(run.host.explain(run.code, "\n".join(run.last)) or (NOTHING,))
            if found != why:
                say(f"{label}: {found}")
            self.away[label] = found, now + RETRY
        else:
            self.ends[label] = run
            if self.is_elastic and run.code == KILLED:
                self.killed[label] = now + RETRY
            say(f"{label}: its part of the run {ending(run.code)}")

    def look_around(self, now: float) -> None:
        if now >= self.stop_at:
            return
        self.away = {label: away for label, away in self.away.items()
                     if label not in self.running or not self.running[label].has_begun}
        for label in [label for label in self.killed if label in self.running and self.running[label].has_begun]:
            del self.killed[label], self.ends[label]
        codes = {run.code for run in self.ends.values()}
        is_known = not self.is_elastic or codes & {0, STOPPED} or all(why == NOTHING for why, _ in self.away.values())
        if codes and len(self.ends) + len(self.away) == len(self.hosts) and is_known:
            self.is_over = True
            if not self.is_elastic or 0 not in codes:  # an elastic run goes on without those that have failed
                self.failed = [run for run in self.ends.values() if run.code not in (0, STOPPED)]
            self.stop(now, STOPPED if STOPPED in codes else 0)
            for run in self.running.values():  # those that are out of reach
                run.process.kill()
            return
        for host in self.hosts:
            again_at = self.killed.get(host.label, self.away.get(host.label, ("", now))[1])
            if host.label not in self.running and now > again_at:
                self.start(host, is_quiet=True)


def detach(hosts: list[Host], path: str, elastic: tuple[int, int] | None, env: dict, run: dict, job: Callable) -> int:
    """Starts the parts of a run that do not run yet. What a living one of them knows is taken over into `run`, from
    which job(hosts, host) makes the job of a host. Raises UserError."""
    found = ask_all(hosts, "look")
    if first := newest(alive := {label: part for label, part in found.items() if part.get("is_alive")}):
        its = first.get("elastic", {})
        if (not elastic or (its.get("at_least"), its.get("at_most")) != elastic or first["command"] != run["command"]
                or first["master_port"] != run["port"] or not env.items() <= first["environment"].items()):
            raise UserError(f"the run {first['id'][:8]} ({shlex.join(first['command'])}) is alive on "
                            f"{', '.join(alive)}: end it first, by launch_cluster.sh {path} --stop. Only an elastic "
                            "run takes hosts in, by the very command that has started it")
        run |= {"id": first["id"], "token": its["token"], "hosts": its["hosts"], "started": first["started"],
                "environment": first["environment"]}
    away = [f"{label}: {part['away']}" for label, part in found.items() if "away" in part]
    if len(hosts) - len(away) < (elastic[0] if elastic else len(hosts)):
        raise UserError(f"nothing is started, since hosts are missing: {'; '.join(away)}")
    has_part = [label for label, part in found.items() if "job" in part and part["job"]["id"] == run["id"]
                and (part["is_alive"] or part["code"] == 0)]
    missing = [host for host in hosts if host.label not in has_part and "away" not in found[host.label]]
    missing = missing[:max(0, elastic[1] - len(has_part))] if elastic else missing
    for label, part in ask_all(missing, "start", {host.label: job(hosts, host) for host in missing}).items():
        if "away" in part or not part["is_alive"] and part["code"]:
            stop(missing, path)
            raise UserError(f"{label} could not start its part, so all were stopped: "
                            + (part.get("away") or "\n    ".join(part["last"])))
    for why in away:
        say(f"no part yet has {why}. The same command starts it later")
    say(f"the run {run['id'][:8]} goes on by itself on {', '.join(has_part + [host.label for host in missing])}, with "
        f"its output in logs/launches/{run['id']}/ there")
    say(f"launch_cluster.sh {path} --attach shows what it prints, --status how it is; --stop lets it save and ends it")
    return 0


def attach(hosts: list[Host], path: str) -> int:
    """Raises UserError where there is nothing to look at."""
    if not (run := newest(ask_all(hosts, "look"))):
        raise UserError(f"no host of {path} that answers has a detached run: start one by --detach")
    follow = Follow(hosts, run)
    code = follow.run()
    if not follow.is_over:
        say("left. The run goes on: --attach comes back to it, --stop ends it")
    return code


def stop(hosts: list[Host], path: str) -> int:
    """Asks the newest parts to end, and waits for that. The exit code is 1 where a host is out of reach."""
    parts = ask_all(hosts, "stop")
    away = [label for label, part in parts.items() if "away" in part]
    if run := newest(alive := {label: part for label, part in parts.items() if part.get("is_alive")}):
        follow = Follow([host for host in hosts if host.label in alive], run)
        code = follow.run()
        if not follow.is_over:
            say("left. The hosts go on to end the run: --status says when they have")
            return code
        away += follow.away
    say(f"out of reach, where it may go on: {', '.join(away)}" if away else "no part of a run is alive any more")
    return 1 if away else 0
