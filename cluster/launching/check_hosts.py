"""`launch_cluster.sh --check`: asks every host what could spoil a run, prints a row per host and a cure per failure.

On each host host_facts.py answers over one ssh connection. All hosts listen, the first one on the port of the
rendezvous, the others on any: gloo and NCCL connect the ranks in pairs, through ports that the system chooses. Then
each host tries to reach all others. Versions and clocks are compared with the first host that answers.
"""

import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import host_facts
from hosts import Host, peer

MAX_SKEW = 1.0  # seconds
MIN_DISK, MIN_MEMORY = 1e9, 0.5e9  # bytes
COLUMNS = ("host", "ssh", "Python", "torch", "CUDA", "project", "interface", "own name", "port", "clock", "disk",
           "memory", "GPU")
VERSIONS = {  # what has to be equal everywhere -> the cure where it is not
    "Python": "install Python {} there, or give this host a python=",
    "torch": "pip install torch=={} there",
    "CUDA": "the same build of torch on all hosts, or --device cpu for the script",
    "transformers": "pip install transformers=={} there",
}


class Contact:
    """The ssh connection to one host, what the host answers, and what is wrong with it."""

    def __init__(self, host: Host):
        self.host, self.facts, self.offset = host, {}, 0.0  # offset: of its clock to this machine's, in seconds
        self.problems = []  # (column of the table, what is wrong, details, cure)
        self.said = tempfile.TemporaryFile("w+", errors="replace")  # what ssh writes to standard error
        with open(host_facts.__file__, encoding="utf-8") as file:
            words = host.ssh(host.python, "-c", file.read())
        self.process = subprocess.Popen(words, start_new_session=True, text=True, errors="replace", stderr=self.said,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, seconds: float, **request):
        """The answer; None where there is none within `seconds`: the reason is then among the problems."""
        watchdog = threading.Timer(seconds, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(host_facts.MARK):
                    return json.loads(line.removeprefix(host_facts.MARK))
        except OSError:
            pass  # ssh has ended
        finally:
            watchdog.cancel()
        self.explain_silence(seconds)

    def explain_silence(self, seconds: float) -> None:
        code, host = self.process.wait(), self.host
        self.said.seek(0)
        said = self.said.read().strip()
        last_line = said.rpartition("\n")[2]
        if code == 255:
            name, cure = host.ssh_failure(said)
            self.fail("ssh", name, last_line, cure)
        elif code in (126, 127):
            self.fail("ssh", "no Python", f"at {host.python}: {last_line}", "give this host a python=")
        else:
            what = f"within {seconds} s" if code < 0 else f"exit code {code}: {last_line}"
            self.fail("ssh", "no answer", what, f"see what it is busy with, and whether {host.python} starts there")

    def fail(self, column: str, name: str, details: str, cure: str) -> None:
        self.problems.append((column, name, details, cure))

    def collect(self, port: int, towards: str | None) -> None:
        """Asks for the facts, and for the time."""
        host = self.host
        self.facts = self.ask(90, ask="facts", root=host.dir, interface=host.iface, peer=towards, port=port) or {}
        sent = time.time()
        if self.facts and (there := self.ask(10, ask="clock")):
            self.offset = there - (sent + time.time()) / 2

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


def compare(contact: Contact, first: Contact) -> None:
    """Versions, the project's files and the clock against the first host's."""
    mine, its, label = contact.facts, first.facts, first.host.label
    if "torch_error" in mine:
        contact.fail("torch", "no torch", mine["torch_error"], "pip install torch there, or give this host a python=")
    for name, cure in VERSIONS.items():
        here, there = (str(facts[name]).split("+")[0] for facts in (mine, its))  # 2.13.0 of 2.13.0+cpu
        if here != there and (name == "Python" or mine["torch"] and its["torch"]):
            contact.fail(name, f"other {name} version", f"{here}, but {label} has {there}", cure.format(there))
    if not mine["project"]:
        contact.fail("project", "no project", f"nothing of it is in {mine['root']}",
                     "copy the repository there, or give this host a dir=")
    elif mine["project"] != its["project"]:
        details = f"hash {mine['project']} of {' and '.join(host_facts.PROJECT)}, but {label} has {its['project']}"
        contact.fail("project", "other project version", details, f"on {label}: {copy_project(contact, first)}")
    if abs(skew := contact.offset - first.offset) > MAX_SKEW:
        contact.fail("clock", "clock skew", f"{skew:+.1f} s from {label}", "on both: sudo timedatectl set-ntp true")


def copy_project(contact: Contact, first: Contact) -> str:
    """The command that copies what the hash covers from the first host to this one; it removes nothing there."""
    host = contact.host
    shell = ["-e", f"ssh -p {host.port}"] if host.port else []
    folders = [os.path.join(first.facts["root"], name) for name in host_facts.PROJECT]
    return shlex.join(["rsync", "-a", *shell, *folders, f"{host.to}:{contact.facts['root']}/"])


def check_host(contact: Contact, alone: bool) -> None:
    """Interface, host name, disk and memory. A host that is `alone` need not be found by its name."""
    facts, own, name = contact.facts, contact.facts["own_address"], contact.facts["host_name"]
    if "interface_error" in facts:
        contact.fail("interface", "no interface", facts["interface_error"],
                     "give this host an iface=: ip -brief address lists them")
    if not alone and not contact.host.iface and (own is None or own.startswith("127.")):
        contact.fail("own name", f"host name that resolves to {own or 'nothing'}",
                     f"{name}, by which other ranks would look for it in vain",
                     f"iface={facts['interface'] or 'eth0'} for this host, or {name} with its real address in its "
                     "/etc/hosts")
    if facts["free_disk"] < MIN_DISK:
        contact.fail("disk", "full disk", f"{facts['runs']}: {gigabytes(facts['free_disk'])} free, "
                     f"{gigabytes(MIN_DISK)} wanted", "make room there: du -sh runs/* shows what old runs take")
    elif "disk_error" in facts:
        contact.fail("disk", "no writing", f"{facts['runs']}: {facts['disk_error']}", "make it writable for this user")
    if facts["free_memory"] < MIN_MEMORY:
        contact.fail("memory", "little memory", f"{gigabytes(facts['free_memory'])} free", "end other programs there")


def check_ports(contacts: list[Contact], pool: ThreadPoolExecutor) -> None:
    """Every host tries to reach the port that each other one listens on."""
    addresses = {}  # contact -> [address, port]
    for contact in contacts:
        facts, port = contact.facts, contact.facts["port"]
        if "listen_error" in facts:
            contact.fail("port", "blocked port", f"{port}: {facts['listen_error']}, by another program or an earlier "
                         "run", f"--port {port + 1}, or see who has it: ss -ltnp")
        elif contact.host.rank == 0:  # the others look for the rendezvous at its address in hosts.txt
            addresses[contact] = [contact.host.address, port]
        else:
            addresses[contact] = [facts["address"] or contact.host.address, port]

    def try_others(source: Contact) -> dict[Contact, str | None]:
        others = [contact for contact in addresses if contact is not source]
        errors = source.ask(10 + 3 * len(others), ask="connect", targets=[addresses[other] for other in others])
        return dict(zip(others, errors or []))

    errors = dict(zip(contacts, pool.map(try_others, contacts)))  # errors[source][target]
    for target, (address, port) in addresses.items():
        failed = [f"{source.host.label} ({error})" for source in contacts if (error := errors[source].get(target))]
        if failed:
            target.fail("port", "blocked port", f"{address}:{port} can't be reached from {', '.join(failed)}", "let the "
                        "hosts reach each other on all TCP ports: sudo ufw allow proto tcp from THEIR_NETWORK")


def gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"


def row(contact: Contact, first: Contact) -> list[str]:
    """The cells of a host; `!` stands before what is wrong."""
    facts, wrong = contact.facts, {column for column, *_ in contact.problems}
    cells = {"host": contact.host.label, "ssh": "ok"}
    if not facts:
        cells["ssh"] = contact.problems[0][1]
    else:
        cells |= {name: facts[name] or "none" for name in ("Python", "torch", "CUDA", "project")}
        cells |= {"interface": f"{facts['interface'] or ''} {facts['address'] or ''}".strip(), "port": facts["port"],
                  "own name": facts["own_address"], "clock": f"{contact.offset - first.offset:+.2f} s",
                  "disk": gigabytes(facts["free_disk"]), "memory": gigabytes(facts["free_memory"]),
                  "GPU": ", ".join(facts["GPU"])}
    return [f"{'! ' if column in wrong else ''}{cells.get(column) or '-'}" for column in COLUMNS]


def check(hosts: list[Host], port: int) -> bool:
    """Asks all hosts at once and prints the table; True if nothing is wrong. `port`: of the rendezvous."""
    contacts = [Contact(host) for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda it: it.collect(port if it.host.rank == 0 else 0, peer(hosts, it.host)), contacts))
        answered = [contact for contact in contacts if contact.facts]
        for contact in answered:
            compare(contact, answered[0])
            check_host(contact, len(hosts) == 1)
        check_ports(answered, pool)
        list(pool.map(Contact.end, contacts))
    table = [COLUMNS, *(row(contact, answered[0] if answered else contact) for contact in contacts)]
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    for contact in contacts:
        for _, name, details, cure in contact.problems:
            print(f"\n{contact.host.label}: {name}: {details}\n    cure: {cure}")
    return not any(contact.problems for contact in contacts)
