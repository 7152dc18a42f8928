"""hosts.txt, and how a host is reached over ssh: what launch_cluster.py and check_hosts.py have in common.

hosts.txt names one host a line, in rank order; the first one hosts the rendezvous:

    # [user@]host     what may follow, where it is not as it is here
    pi@pi0            iface=eth0
    pi@pi1            port=2222 nproc=1 python=~/venv/bin/python dir=~/tutorial
    desk              nproc=2 address=192.168.1.7

`port` is ssh's. `nproc`: processes on that host. `python`, `dir`: its Python and its copy of this repository, in whose
root the run starts. `iface`: the network interface of the run, else the one that reaches the first host. `address`:
where the other hosts find it.

No shell reads a word of this file: each word has to look like what it is, and is quoted besides.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import socket
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository
# ssh takes the first value that it is given. What must not be changed therefore precedes SSH_OPTIONS, the rest follows.
FIXED = ["-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o", "ControlPath=none"]
DEFAULTS = ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
VALUES = {"port": r"[0-9]{1,5}", "nproc": r"[1-9][0-9]{0,3}", "iface": r"[A-Za-z0-9_][A-Za-z0-9._-]{0,14}",
          "address": r"[A-Za-z0-9_][A-Za-z0-9._:-]*", "python": r"[^-\s][^\x00-\x1f]*", "dir": r"[^-\s][^\x00-\x1f]*"}
SSH_FAILURES = (  # what ssh says, what it means, what to do
    ("Permission denied", "wrong key", "ssh-copy-id{to}, or the right key by SSH_OPTIONS='-i KEY' or ~/.ssh/config"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "other host key",
     "if it was set up anew, take its old key out of ~/.ssh/known_hosts; else somebody answers in its place"),
    ("Host key verification failed", "unknown host key", "ssh{to} once by hand, and compare the fingerprint"),
    ("Could not resolve", "unreachable host", "its name is not known here: check it, or write its IP address"),
    ("Connection refused", "unreachable host", "it is there, but no ssh server at this port: start sshd, or port=N"),
    ("", "unreachable host", "switch it on, look at cable and network, try: ssh{to} true"),
)
NOT_STARTED, OF_SSH = (126, 127), 255  # exit codes: a shell's, of what it can't start; ssh's own
WARNING = ("warning: --sudo_pass is ignored, nothing here needs it; never write a password on a command line. What "
           "started this still shows it to ps, and your shell's history has it: change that password")


class UserError(ValueError):
    """A mistake in what the user wrote: the launcher prints the message only. Other errors keep their traceback."""


def without_password(words: list[str], warns: bool = True) -> list[str]:
    """The words of a command line without --sudo_pass and its value. Where it was there, stderr gets a warning."""
    left = [word for word, before in zip(words, ["", *words]) if "--sudo_pass" not in (word.partition("=")[0], before)]
    if warns and left != words:
        print(WARNING, file=sys.stderr, flush=True)
    return left


@dataclasses.dataclass
class Host:
    """One line of hosts.txt."""

    to: str  # what ssh is told: [user@]host
    port: str | None = None
    nproc: str = "1"
    python: str = sys.executable
    dir: str = ROOT
    iface: str | None = None
    address: str | None = None
    rank: int = 0  # of the host: torchrun's node rank
    given: set[str] = dataclasses.field(default_factory=set)  # the keys in its line

    @property
    def label(self) -> str:
        """What the host is called in the output: two hosts may have the same name and differ in the port."""
        name = self.to.rpartition("@")[2]
        return f"{name}:{self.port}" if self.port else name

    def ssh(self, *words: str) -> list[str]:
        """The local command line that runs `words` on the host, quoted for the shell that ssh starts there.

        A relative path begins in the home directory there, so a leading ~/, which quotes would disable, is dropped.
        """
        words = [word.removeprefix("~/") for word in words]
        port = ["-p", self.port] if self.port else []
        return ["ssh", *FIXED, *ssh_options(), *DEFAULTS, *port, "--", self.to, shlex.join(words)]

    def explain(self, code: int, said: str) -> tuple[str, str] | None:
        """(what is wrong, what to do) where the exit code of ssh() says that the words did not even start there."""
        if code in NOT_STARTED:
            return "no Python", f"can't start {self.python} there: give this host a python="
        if code != OF_SSH:
            return None
        name, cure = next((name, cure) for text, name, cure in SSH_FAILURES if text in said)
        return name, cure.format(to=f" -p {self.port} {self.to}" if self.port else f" {self.to}")


def ssh_options() -> list[str]:
    return shlex.split(os.environ.get("SSH_OPTIONS", ""))


def find_address(host: Host) -> str:
    """The host name that ssh connects to, which ~/.ssh/config may set. Raises UserError for what ssh refuses."""
    try:
        done = subprocess.run(["ssh", *ssh_options(), "-G", "--", host.to], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"ssh can't be started on this machine ({error}): install an ssh client") from None
    if done.returncode:
        raise UserError(f"ssh does not take {host.to}: {done.stderr.strip()}")
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname "))


def read_host(line: str) -> Host | None:
    """The host of one line, None for an empty line. Raises UserError."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:  # a quotation mark without another
        raise UserError(str(error)) from None
    if not words:
        return None
    if not re.fullmatch(rf"({NAME}@)?{NAME}", words[0]):
        raise UserError(f"{words[0]!r} is no [user@]host: letters, digits, dots, dashes (an IPv6 host: address=)")
    host = Host(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in VALUES or not equals or key in host.given:
            raise UserError(f"{word!r} is none of {', '.join(f'{name}=' for name in VALUES)}, each at most once")
        if not re.fullmatch(VALUES[key], value) or key == "port" and not 0 < int(value) < 65536:
            raise UserError(f"{value!r} can't be the value of {key}=")
        setattr(host, key, value)
        host.given.add(key)
    return host


def read_hosts(path: str) -> list[Host]:
    """All hosts, with rank and address. Raises UserError, which names the line where one makes no sense."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # without the mark that some editors put first
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read ({error}): name a text file with one host a line") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            if host := read_host(line):
                hosts.append(host)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise UserError(f"{path} names no host: write one a line, [user@]host, in the order of the ranks")
    labels = [host.label for host in hosts]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(f"{path} names {', '.join(twice)} more than once: for more processes there write nproc=2")
    for rank, host in enumerate(hosts):
        host.rank, host.address = rank, host.address or find_address(host)
    if len(hosts) > 1 and re.fullmatch(r"localhost|127\..*", hosts[0].address):
        raise UserError(f"the other hosts can't reach the first one as {hosts[0].address}: give it an address=")
    return hosts


def require_elastic(hosts: list[Host], path: str) -> None:
    """Raises UserError where a host of an elastic run is known by an address of IPv6, or by that of another one."""
    if found := [host.label for host in hosts if ":" in host.address]:
        raise UserError(f"--elastic meets at IPv4 addresses only, but {', '.join(found)} has one of IPv6: give it "
                        "another address=, or start the run without --elastic")
    if len({host.address for host in hosts}) < len(hosts):
        raise UserError(f"--elastic knows hosts by their addresses, but {path} has one of them twice: give each "
                        "host an address= of its own, and for more processes on one host nproc=2")


def home_of(hosts: list[Host]) -> Host:
    """The host that is this machine, on which the user types; the first one where none of them is."""
    return next((host for host in hosts if is_here(host.address)), hosts[0])


def is_here(address: str) -> bool:
    """Whether this machine has the address: nobody can bind a socket to another machine's."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def peer(hosts: list[Host], host: Host) -> str | None:
    """The address towards which a host's interface is looked for: the first host's, and for that one the second's."""
    return None if len(hosts) == 1 else hosts[1 if host.rank == 0 else 0].address
