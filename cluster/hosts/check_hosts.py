"""`launch_cluster.sh --check`: asks every host what could spoil a run, prints a row per host and a cure per failure.

On each host host_facts.py answers over one ssh connection, and says what is wrong there. What only a comparison shows
is found here: versions and clocks unlike those of the first host that answers, and ports that can't be reached. All
hosts listen, the first one on the port of the rendezvous, the others on any, since gloo and NCCL connect the ranks in
pairs through ports that the system chooses. Then each host tries to reach all others.
"""

import time

import host_facts
from host_facts import print_rows
from inventory import Host, peer
from remote_run import Contact, at_once

MAX_SKEW = 1.0  # seconds
COLUMNS = "host", "ssh", "Python", "torch", "CUDA", "project", "interface", "port", "clock", "disk", "memory", "GPU"
VERSIONS = ("Python", "torch", "CUDA", "transformers")  # what has to be equal everywhere
INSTALL = "launch_cluster.sh HOSTS --install"


class Checked(Contact):
    """A host that is looked at, and what is known about it."""

    def __init__(self, host: Host, program: str):
        super().__init__(host, host.python, "-c", program)
        self.report, self.offset = None, 0.0  # offset: of its clock to this machine's, in seconds
        self.cells, self.problems = {"host": host.label}, []  # as in host_facts.Report
        self.unreachable_from = []

    def ask(self, seconds: float, question) -> dict | None:
        """The answer; None where there is none within `seconds`: the reason is then among the problems."""
        answer = super().ask(seconds, question)
        return answer if isinstance(answer, dict) else self.fail("ssh", *answer)

    def fail(self, column: str | None, name: str, details: str, cure: str) -> None:
        """`column`: of the table; None for a warning."""
        self.problems.append([column, name, details, cure])

    def collect(self, hosts: list[Host], port: int) -> None:
        """Asks for the host's report. The first host listens on `port`."""
        host = self.host
        self.report = self.ask(90, {"root": host.dir, "interface": host.iface, "peer": peer(hosts, host),
                                    "port": port if host.rank == 0 else 0})
        if self.report:
            self.cells |= self.report["cells"]
            self.problems += self.report["problems"]

    def connect(self, contacts: list["Checked"]) -> None:
        """Lets the host try to reach the others' ports, and reads its clock."""
        others = [contact for contact in contacts if contact is not self and contact.report["port"]]
        sent = time.time()
        answer = self.ask(10 + 3 * len(others), [other.listens_at() for other in others])
        if answer:
            self.offset = answer["clock"] - sent
            for other, error in zip(others, answer["errors"]):
                if error:
                    other.unreachable_from.append(f"{self.host.label} ({error})")

    def listens_at(self) -> tuple[str, int]:
        """Where the others look for this host: for the rendezvous at its address in hosts.txt."""
        own = None if self.host.rank == 0 else self.report["address"]
        return own or self.host.address, self.report["port"]

    def compare(self, first: "Checked") -> None:
        """Versions, the project's files and the clock against the first host's; who could not connect, who could."""
        label, skew = first.host.label, self.offset - first.offset
        for name in VERSIONS:
            here, there = (it.cells.get(name, "none").split("+")[0] for it in (self, first))  # 2.13.0 of 2.13.0+cpu
            if here != there and (name == "Python" or "none" not in (self.cells["torch"], first.cells["torch"])):
                self.fail(name, f"other {name} version", f"{here}, but {label} has {there}",
                          f"{INSTALL}; for Python and CUDA another python=, or --device cpu for the script")
        here, there = self.cells["project"], first.cells["project"]
        if here != there and "none" not in (here, there):
            self.fail("project", "other project version",
                      f"hash {here} of {' and '.join(host_facts.PROJECT)}, but {label} has {there}",
                      INSTALL)
        self.cells["clock"] = f"{skew:+.2f} s"
        if abs(skew) > MAX_SKEW:
            self.fail("clock", "clock skew", f"{skew:+.1f} s from {label}", "on both: sudo timedatectl set-ntp true")
        if public := " and ".join(self.report["public"]):
            self.fail(None, "warning", f"the run's way is public, by {public}: what the ranks send is neither "
                      "encrypted nor protected by a password",
                      "a VPN: its interface as iface=, its address as address=, a firewall; or a network of your own")
        if self.unreachable_from:
            address, port, sources = *self.listens_at(), ", ".join(self.unreachable_from)
            self.fail("port", "blocked port", f"{address}:{port} can't be reached from {sources}",
                      "let the hosts reach each other on all TCP ports: sudo ufw allow proto tcp from THEIR_NETWORK")


def print_table(contacts: list[Checked]) -> None:
    """A row per host, `!` before what is wrong, and below the table the problems with their cures."""
    table = [COLUMNS]
    for contact in contacts:
        wrong = {column: name for column, name, *_ in contact.problems}
        contact.cells["ssh"] = wrong.get("ssh", "ok")
        table.append([f"{'! ' if column in wrong else ''}{contact.cells.get(column) or '-'}" for column in COLUMNS])
    print_rows(table)
    for contact in contacts:
        for _, name, details, cure in contact.problems:
            print(f"\n{contact.host.label}: {name}: {details}\n    cure: {cure}")


def check(hosts: list[Host], port: int) -> bool:
    """Asks all hosts at once and prints the table; True if nothing is wrong. `port`: of the rendezvous."""
    with open(host_facts.__file__, encoding="utf-8") as file:
        program = file.read()
    contacts = [Checked(host, program) for host in hosts]
    with at_once(contacts) as pool:
        list(pool.map(lambda contact: contact.collect(hosts, port), contacts))
        answered = [contact for contact in contacts if contact.report]
        list(pool.map(lambda contact: contact.connect(answered), answered))
    for contact in answered:
        contact.compare(answered[0])
    print_table(contacts)
    return not any(column for contact in contacts for column, *_ in contact.problems)
