"""--detach, --attach, --status and --stop: runs that outlive the launcher, as a daemon on each host.

    logs/launches/RUN/HOST/    job.json, with the token of the run: nobody else may read it
                               output, pid; the hosts, if some have come later; at the end the exit code, in `code`

The daemon is host_run.py in a session of its own, with job.json as its standard input. That file stays open and locked
for as long as it runs: the number in `pid` could be another program's after the machine was switched off.

A launcher only looks on, and Ctrl-C leaves the run alone. Any machine that has hosts.txt and reaches the hosts will do:
over ssh it starts this module there, which reads one question about that host's part, a line of JSON, and answers it.
"""

import contextlib
import fcntl
import glob
import json
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

import exits
from elastic import RETRY, Elastic
from host_facts import MARK, print_rows
from host_run import BEGUN, BLANK, ROOT, exit_code, fill_in, watch, without_secrets
from inventory import NOT_STARTED, OF_SSH, Host, UserError
from remote_run import NEVER, Contact, Launch, Run, at_once, far_end, say

NOTHING = "no part of the run is there"
LAST = 20  # lines that a follower begins with


# At the far end, in the host's copy of the repository. `folder`: of this host's part of a run.

def is_locked(file, kind: int, tries: int = 1) -> bool:
    """Whether this process gets the lock, within so many tries of 20 ms."""
    for again in range(tries):
        time.sleep(0.02 * bool(again))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
    return False


def is_alive(folder: pathlib.Path) -> bool:
    with open(folder / "job.json") as file:
        return not is_locked(file, fcntl.LOCK_SH)


def last_lines(file: BinaryIO) -> list[bytes]:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * LAST))
    return file.readlines()[-LAST:]


def forget_secrets(folder: pathlib.Path) -> None:
    """Of a part that has ended, however it did: nobody needs the variables of --env any more."""
    with contextlib.suppress(OSError, ValueError), open(folder / "job.json", "r+b") as file:
        if is_locked(file, fcntl.LOCK_EX):
            os.pwrite(file.fileno(), without_secrets(file.read().decode()), 0)


def start(job: dict) -> None:
    """Starts the daemon, unless it runs, and waits until it has started the script. Raises OSError."""
    folder = pathlib.Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    private = os.open(folder / "job.json", os.O_RDWR | os.O_CREAT, 0o600)
    with open(private, "r+") as file, open(folder / "output", "ab") as output:
        if not is_locked(file, fcntl.LOCK_EX, tries=50):  # a daemon has it; a mere look at it takes a moment
            return
        for name in "pid", "code":  # take their room now, when a full disk is an error of the start
            (folder / name).write_text(BLANK)
        file.truncate()
        file.write(json.dumps(job) + "\n")
        file.seek(0)  # which flushes
        before = output.tell()
        daemon = subprocess.Popen([sys.executable, os.path.join("cluster", "hosts", "host_run.py")], stdin=file,
                                  stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        fill_in(folder / "pid", daemon.pid)
    lines = []
    while is_alive(folder) and not any(map(BEGUN.match, lines)):
        time.sleep(0.05)
        lines = (folder / "output").read_bytes()[before:].decode(errors="replace").splitlines()


class Follower:
    """Prints the output of a part. As in a Popen, `returncode` is None until poll() finds that the part has ended. What
    is typed goes nowhere."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.returncode, self.output = folder, None, open(folder / "output", "rb")
        self.typed = queue.SimpleQueue()
        sys.stdout.buffer.writelines([b"the last lines of this part:\n", *last_lines(self.output)])

    def poll(self) -> int | None:
        has_ended = not is_alive(self.folder)
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()
        self.returncode = exit_code(self.folder) if has_ended else None
        return self.returncode


def answer(question: dict) -> int:
    """What the launcher asks about this host's part of the `run`, where "*" stands for any: one that is alive or else
    the newest. To "look", "start" and "stop" the answer is a line of JSON, {} where there is no part. It has the job
    with its token, for a launcher that starts the part of another host. "start" may have a `job`, and the hosts that
    are `known` from now on."""
    if "job" in question:
        try:
            start(question["job"])
        except OSError as error:
            sys.exit(f"{question['job']['folder']}: {error.strerror}: make room there, or set its rights")
    jobs = {}
    for file in pathlib.Path("logs", "launches").glob(f"{question['run']}/{glob.escape(question['label'])}/job.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # of another user, just being written, or not elastic
            jobs[file.parent] = json.loads(file.read_text())
            if "known" in question:
                file.with_name("hosts.new").write_text(json.dumps(question["known"]))
                file.with_name("hosts.new").replace(file.with_name("hosts"))
            jobs[file.parent]["elastic"]["hosts"] = json.loads(file.with_name("hosts").read_text())
    alive = {folder: is_alive(folder) for folder in jobs}
    for folder in (folder for folder in jobs if not alive[folder]):
        forget_secrets(folder)
    # The clocks by which runs have started may have been set since: what is alive comes first.
    folder, state = max(jobs, key=lambda folder: (alive[folder], jobs[folder]["started"]), default=None), {}
    if question["ask"] == "follow":
        is_there = folder and (alive[folder] or not question["again"])
        return watch(Follower(folder)) if is_there else exits.NO_PART
    if folder:
        with open(folder / "output", "rb") as file:
            lines = [line.decode(errors="replace").rstrip() for line in last_lines(file)]
        state = {"job": jobs[folder], "is_alive": alive[folder], "code": exit_code(folder), "last": lines}
        if question["ask"] == "stop" and state["is_alive"]:
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
    print(MARK + json.dumps(state), flush=True)
    return exits.DONE


# At the near end, where the user types.

def ask_all(hosts: list[Host], what: str, jobs: dict[str, dict] | None = None, **more) -> dict[str, dict]:
    """The states of the hosts' parts, by label, as answer() gives them; {"away": why} where a host is silent. `jobs`:
    what is started, by label; `more` is part of the question."""
    def ask(contact: Contact) -> dict:
        label = contact.host.label
        job = {"job": jobs[label]} if jobs and label in jobs else {}
        part = contact.ask(60, {"ask": what, "label": label, "run": "*", **more, **job})
        return part if isinstance(part, dict) else {"away": "{}: {}".format(*part)}

    with at_once(contacts := [Contact(host, *far_end(host, "detached.py")) for host in hosts]) as pool:
        return dict(zip([host.label for host in hosts], pool.map(ask, contacts)))


def newest(parts: dict[str, dict]) -> dict | None:
    """The job of a run that is alive, or else the newest, by the clock of the machine on which it was typed."""
    part = max((part for part in parts.values() if "job" in part), default=None,
               key=lambda part: (part["is_alive"], part["job"]["started"]))
    return part and part["job"]


def status(hosts: list[Host], path: str) -> int:
    """Prints a row a host."""
    table = [("host", "reachable", "run", "script", "state", "last line")]
    for label, part in ask_all(hosts, "look").items():
        row = [label, "no" if "away" in part else "yes", "-", "-", "-", part.get("away", "-")]
        if "job" in part:
            script, *words = part["job"]["command"]
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["job"]["started"]))
            row[2:] = [part["job"]["id"][:8], shlex.join([os.path.basename(script), *words])[:40],
                       f"runs since {since}" if part["is_alive"] else exits.ending(part["code"]), *part["last"][-1:]]
        table.append(row)
    print_rows(table)
    return exits.DONE


class Follow(Launch):
    """Prints what the parts of a run print, until it has ended. A host that is out of reach or has no part is tried
    again and again, and so is one whose part was killed, which --detach may start again. By label, `ends`: whose parts
    have ended; `away`: why there is none."""

    program = "detached.py"

    def __init__(self, hosts: list[Host], run: dict):
        super().__init__(hosts, lambda hosts, host: {"ask": "follow", "label": host.label, "run": run["id"],
                                                     "again": host.label in self.ends})
        self.is_elastic = "elastic" in run
        self.alarm = Elastic.alarm if self.is_elastic else None
        self.ends, self.away, self.is_over = {}, {}, False

    def ended(self, run: Run, now: float) -> None:
        if now >= self.stop_at:
            return
        label = run.host.label
        is_away = run.code in (OF_SSH, exits.NO_PART, exits.UNHEARD, *NOT_STARTED) or run.code < 0
        if not is_away:
            self.ends[label] = run
            self.away.pop(label, None)
            say(f"{label}: its part of the run {exits.ending(run.code)}")
        elif label not in self.ends:
            why = ": ".join(run.explain() or (NOTHING,))
            if why != self.away.get(label):
                say(f"{label}: {why}")
            self.away[label] = why
        may_begin = is_away or self.is_elastic and run.code == exits.KILLED
        self.try_at[label] = now + RETRY if may_begin else NEVER

    def look_around(self, now: float) -> None:
        if now >= self.stop_at:
            return
        for label in [label for label, run in self.running.items() if run.has_begun]:
            self.ends.pop(label, None)
            self.away.pop(label, None)
        codes = {run.code for run in self.ends.values()}
        is_known = not self.is_elastic or codes & {exits.DONE, exits.STOPPED} or set(self.away.values()) <= {NOTHING}
        if codes and len(self.ends) + len(self.away) == len(self.hosts) and is_known:
            self.is_over = True
            if not self.is_elastic or exits.DONE not in codes:  # an elastic run goes on without those that have failed
                self.failed = [run for run in self.ends.values() if run.code not in (exits.DONE, exits.STOPPED)]
            self.stop(now, exits.STOPPED if exits.STOPPED in codes else exits.DONE)
            for run in self.running.values():  # those that are out of reach
                run.process.kill()
        else:
            self.start()


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
        run |= {"token": its["token"], **{name: first[name] for name in ("id", "started", "environment")}}
    parts = {label: part for label, part in found.items() if "job" in part and part["job"]["id"] == run["id"]}
    # Each knows the hosts of its start, and of later ones if it was told.
    run["hosts"] = max((part["job"]["elastic"]["hosts"] for part in parts.values()), key=len, default=[])
    away = [f"{label}: {part['away']}" for label, part in found.items() if "away" in part]
    if len(hosts) - len(away) < (elastic[0] if elastic else len(hosts)):
        raise UserError(f"nothing is started, since hosts are missing: {'; '.join(away)}")
    has_part = [label for label, part in parts.items() if part["is_alive"] or part["code"] == exits.DONE]
    missing = [host for host in hosts if host.label not in has_part and "away" not in found[host.label]]
    missing = missing[:max(0, elastic[1] - len(has_part))] if elastic else missing
    jobs = {host.label: job(hosts, host) for host in missing}
    # All parts know all hosts: else one that comes while these are away could get the number of one of them.
    known = {"known": run["hosts"]} if parts and elastic else {}
    here = [host for host in hosts if "away" not in found[host.label]] if known else missing
    for label, part in ask_all(here, "start", jobs, run=run["id"], **known).items():
        if label in jobs and ("away" in part or not part["is_alive"] and part["code"]):
            stop(missing, path)
            why = part.get("away") or "\n    ".join(part["last"])
            raise UserError(f"{label} could not start its part, so all were stopped: {why}")
        if known and "job" in part and part["job"]["elastic"]["hosts"] != run["hosts"]:
            say(f"{label} can't keep the list of hosts: make room in logs/launches/ there, and type this again")
    for why in away:
        say(f"no part yet has {why}. The same command starts it later")
    say(f"the run {run['id'][:8]} goes on by itself on {', '.join(has_part + [host.label for host in missing])}, with "
        f"its output in logs/launches/{run['id']}/ there")
    say(f"launch_cluster.sh {path} --attach shows what it prints, --status how it is; --stop lets it save and ends it")
    return exits.DONE


def attach(hosts: list[Host], path: str) -> int:
    """Raises UserError where there is nothing to look at."""
    if not (run := newest(ask_all(hosts, "look"))):
        raise UserError(f"no host of {path} that answers has a detached run: start one by --detach")
    code = (follow := Follow(hosts, run)).run()
    if not follow.is_over:
        say("left. The run goes on: --attach comes back to it, --stop ends it")
    return code


def stop(hosts: list[Host], path: str) -> int:
    """Asks the newest parts to end, and waits for that. FAILED where a host is out of reach."""
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
    return exits.FAILED if away else exits.DONE


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(answer(json.loads(sys.stdin.readline())))
