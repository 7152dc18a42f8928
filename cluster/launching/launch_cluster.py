"""The Python of launch_cluster.sh: one torchrun on each host of hosts.txt, over ssh, as if it were one command.

Each host is one ssh process without a terminal, so nothing can ask for a password: keys it must be. Down its standard
input go the job and heartbeats; what was started ends when they do (see host_run.py). What it prints comes back as
`host | line`. The run ends on all hosts when it has ended on one with an error, and on Ctrl-C. Names and arguments of
the script pass through no shell: they are part of the job. Paths in them are the hosts', from the repository's root.
"""

import argparse
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

import hosts as hosts_file
from hosts import Host, UserError, peer, read_hosts

HEARTBEAT = 0.5  # seconds at most between two of them
GRACE = 3  # seconds from the first failure until the others are stopped: whose fault was it?
STOP = 10  # seconds from there until ssh itself is ended: then the host is out of reach
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|Connection refused")


class Run:
    """The ssh process of one host: sends the job, prints what comes back, and puts itself in `events` at its end."""

    def __init__(self, host: Host, job: dict, width: int, events: queue.SimpleQueue):
        self.host, self.code, self.quiet = host, None, False
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
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # what a progress bar shows last
            self.last.append(text)
            if self.quiet:
                continue
            try:
                sys.stdout.write(f"{self.prefix}{text}\n")
                sys.stdout.flush()
            except OSError:
                events.put(signal.SIGPIPE)  # nobody reads any more
        self.code = self.process.wait()
        events.put(self)

    def stop(self, out_of_reach: bool) -> None:
        """Closing its input makes host_run.py end all; where the host is out of reach, ssh itself is ended."""
        with contextlib.suppress(OSError):  # ssh has ended meanwhile
            self.process.stdin.close()
        if out_of_reach:
            self.process.kill()


def launch(hosts: list[Host], jobs: list[dict]) -> int:
    """Runs the jobs until all have ended, one has failed or a signal comes; the exit code."""
    events, width = queue.SimpleQueue(), max(len(host.label) for host in hosts)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: events.put(number))
    left = {Run(host, job, width, events) for host, job in zip(hosts, jobs)}
    failed, signalled, stop_at = [], None, float("inf")
    while left:
        event = None
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=HEARTBEAT)
        now = time.monotonic()
        if isinstance(event, Run):
            left.discard(event)
            if event.code and now < stop_at:  # what ends later was told to
                failed.append(event)
                stop_at = min(stop_at, now + GRACE)
        elif event and not signalled:
            signalled, stop_at = event, min(stop_at, now)
        for run in left:
            if now < stop_at:
                run.send()
            else:
                run.quiet = bool(failed)  # torchrun's own reports of being stopped would bury the cause
                run.stop(now > stop_at + STOP)
    if failed:
        return report(failed)
    return 128 + signalled if signalled else 0


def report(failed: list[Run]) -> int:
    """Says which host failed first, and why; returns its exit code.

    When one host fails, the others soon fail too, in the middle of a collective. On unlike machines their end may be
    reported before its own, so the first one that does not complain about a lost peer counts.
    """
    run = next((run for run in failed if not any(map(LOST_PEER.search, run.last))), failed[0])
    lines = list(run.last)
    ends = [index for index, line in enumerate(lines) if "torch/distributed/elastic" in line and "exitcode" in line]
    shown = lines[:ends[0] + 1 if ends else None][-12:]  # after that torchrun speaks of itself
    what = f"{run.host.label} (node rank {run.host.rank}) failed first, with exit code {run.code}"
    print(f"\nlaunch_cluster: {what}", file=sys.stderr)
    if explained := run.host.explain(run.code, "\n".join(lines)):
        print(f"launch_cluster: {explained[0]}: {explained[1]}", file=sys.stderr)
    print("launch_cluster: its last lines:" if shown else "launch_cluster: it printed nothing", file=sys.stderr)
    print("".join(f"    {line}\n" for line in shown), end="", file=sys.stderr)
    return run.code if run.code > 0 else 128 - run.code


def variable(text: str) -> tuple[str, str]:
    """The type of --env: NAME=VALUE, or NAME for the value that it has here."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE, or the NAME of a variable that is set here")
    return name, value if equals else os.environ[name]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own flags, and what follows `--`: the script and its arguments."""
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="launch_cluster.sh", description=hosts_file.__doc__,
                                     usage="%(prog)s hosts.txt [--check] [--port N] [--env NAME] -- SCRIPT ARGUMENTS",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", metavar="hosts.txt")
    parser.add_argument("--check", action="store_true", help="look at each host first; without SCRIPT only that")
    parser.add_argument("--port", type=int, default=29500, help="of the rendezvous, on the first host (29500)")
    parser.add_argument("--env", type=variable, action="append", default=[], metavar="NAME[=VALUE]",
                        help="a variable for the hosts, more than once for more; nothing else of this environment "
                             "goes, but OMP_NUM_THREADS")
    args, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1:]
    if not command and not args.check:
        parser.error("nothing to start: write -- and the script with its arguments at the end, or --check")
    if not 0 < args.port < 65536:
        parser.error(f"--port {args.port}: a port is a number from 1 to 65535")
    return args, command


def main() -> int:
    args, command = parse_args()
    try:
        hosts = read_hosts(args.hosts)
        if args.check:
            from check_hosts import check

            if not check(hosts, args.port):
                return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    shared = {"nnodes": len(hosts), "master_port": args.port, "environment": {**threads, **dict(args.env)},
              "command": command, "master_address": hosts[0].address if len(hosts) > 1 else "127.0.0.1"}
    jobs = [{**shared, "node_rank": host.rank, "nproc": int(host.nproc), "interface": host.iface,
             "peer": peer(hosts, host)} for host in hosts]
    return launch(hosts, jobs) if command else 0


if __name__ == "__main__":
    sys.exit(main())
