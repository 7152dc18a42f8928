"""The Python of launch_cluster.sh: starts a script on each host of hosts.txt, over ssh, as if it were one command.

Each host is one ssh process without a terminal, so nothing can ask for a password: keys it must be (remote_run.py is
its near end, host_run.py the far one). The run ends on all hosts when it has ended on one with an error, and on Ctrl-C;
with --elastic it goes on without a lost host (see elastic.py). Names and arguments of the script pass through no shell:
they are part of the job. Paths in them are the hosts', from the repository's root.
"""

import argparse
import functools
import os
import re
import secrets
import sys
import time
import uuid

import detached
import exits
import inventory
from check_hosts import check
from elastic import Elastic
from host_facts import PROJECT
from inventory import ROOT, Host, UserError, home_of, peer, read_hosts, require_elastic, without_password
from install import install
from remote_run import Launch


def variable(text: str) -> tuple[str, str]:
    """The type of --env: NAME=VALUE, or NAME for the value that it has here."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE, or the NAME of a variable that is set here")
    return name, value if equals else os.environ[name]


def host_counts(text: str) -> tuple[int, int]:
    """The type of --elastic: MIN:MAX."""
    match = re.fullmatch(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: write MIN:MAX, numbers of hosts from 1 on, as in 2:3")
    return int(match[1]), int(match[2])


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own flags, and what follows `--`: the script and its arguments."""
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="launch_cluster.sh", description=inventory.__doc__,
                                     usage="%(prog)s hosts.txt [--install] [--check] [--detach] [--elastic MIN:MAX] "
                                           "[--port N] [--env NAME] -- SCRIPT ARGUMENTS\n"
                                           "       %(prog)s hosts.txt (--attach, --status or --stop)",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", metavar="hosts.txt")
    parser.add_argument("--install", action="store_true",
                        help="first copy the project to each host, and make its virtual environment with the packages")
    parser.add_argument("--check", action="store_true", help="look at each host first; without SCRIPT only that")
    parser.add_argument("--elastic", type=host_counts, metavar="MIN:MAX",
                        help="go on without a lost host while MIN are left, and take hosts in again, up to MAX")
    what = parser.add_mutually_exclusive_group()
    for name, text in {"detach": "the run outlives this command, and continues without it on the hosts",
                       "attach": "show what the newest detached run prints, until it ends or Ctrl-C",
                       "status": "a row a host on its newest detached run",
                       "stop": "end the detached run; a training saves first"}.items():
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=text)
    parser.add_argument("--port", type=int, default=29500,
                        help="where the processes meet: on the first host, with --elastic on each (29500)")
    parser.add_argument("--env", type=variable, action="append", default=[], metavar="NAME[=VALUE]",
                        help="a variable for the hosts, more than once for more; nothing else of this environment "
                             "goes, but OMP_NUM_THREADS")
    (args, unknown), command = parser.parse_known_args(sys.argv[1:split]), without_password(sys.argv[split + 1:])
    if unknown:  # by the first flag's name only: what follows may be a password
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        parser.error(f"{flags[0]}: no such flag" if flags else "write -- before the script and its arguments")
    if args.what not in (None, "detach") and (
            command or args.install or args.check or args.elastic or args.env):
        parser.error(f"--{args.what} starts nothing: it takes no script, and no flag but hosts.txt")
    if not command and (args.what == "detach" or not (args.install or args.check or args.what)):
        parser.error("nothing to start: write -- and the script with its arguments at the end, --check or --install")
    if not 0 < args.port < 65536:
        parser.error(f"--port {args.port}: a port is a number from 1 to 65535")
    return args, command


def make_job(run: dict, elastic: tuple[int, int] | None, home: str, hosts: list[Host], host: Host) -> dict:
    """What host_run.py does on one of the hosts. `run`: what all of them have in common; "hosts": the addresses of all
    that were ever in hosts.txt, so that a host keeps its index in an elastic run."""
    job = {"nnodes": len(hosts), "node_rank": host.rank, "nproc": int(host.nproc), "interface": host.iface,
           "master_address": hosts[0].address if len(hosts) > 1 else "127.0.0.1", "master_port": run["port"],
           "peer": peer(hosts, host), "is_home": host.label == home, "mark": f"{run['id']} {host.label}",
           "folder": os.path.join("logs", "launches", run["id"], host.label),
           "command": run["command"], "environment": run["environment"], "started": run["started"],
           "is_detached": run["is_detached"], "id": run["id"]}
    if elastic:
        run["hosts"].extend(host.address for host in hosts if host.address not in run["hosts"])
        job["elastic"] = {"id": run["id"], "token": run["token"], "hosts": run["hosts"], "port": run["port"],
                          "host": run["hosts"].index(host.address), "at_least": elastic[0], "at_most": elastic[1],
                          "nproc": int(host.nproc)}
    return job


def launch(args: argparse.Namespace, command: list[str]) -> int:
    """The exit code. Raises UserError."""
    hosts = read_hosts(args.hosts)
    if args.what in (looks := {"attach": detached.attach, "status": detached.status, "stop": detached.stop}):
        return looks[args.what](hosts, args.hosts)
    if args.elastic and args.elastic[0] > len(hosts):
        raise UserError(f"--elastic {args.elastic[0]}:{args.elastic[1]} needs {args.elastic[0]} hosts to begin "
                        f"with, but {args.hosts} has {len(hosts)}: add hosts, or lower MIN")
    if args.elastic:
        require_elastic(hosts, args.hosts)
    if args.install and not install(hosts, ROOT, PROJECT, dict(args.env)):
        return exits.FAILED
    if args.check and not check(hosts, args.port):
        return exits.FAILED
    if not command:
        return exits.DONE
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    run = {"id": uuid.uuid4().hex, "token": secrets.token_hex(), "hosts": [], "started": time.time(), "port": args.port,
           "environment": {**threads, **dict(args.env)}, "command": command, "is_detached": args.what == "detach"}
    job = functools.partial(make_job, run, args.elastic, home_of(hosts).label)
    if args.what == "detach":
        return detached.detach(hosts, args.hosts, args.elastic, dict(args.env), run, job)
    if args.elastic:
        return Elastic(args.hosts, hosts, *args.elastic, job).run()
    return Launch(hosts, job).run()


def main() -> int:
    exits.outlive_a_full_disk(sys.stdout, sys.stderr)
    try:
        return launch(*parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
