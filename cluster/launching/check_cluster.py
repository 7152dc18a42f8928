"""`launch_cluster.sh --check`: asks every host what could spoil a run, prints a row per host and a cure per failure.

On each host host_facts.py answers over one ssh connection. All hosts listen, the first one on the port of the
rendezvous, the others on any: gloo and NCCL connect the ranks in pairs, through ports that the system chooses. Then
each host tries to reach all others. Versions and clocks are compared with the first host that answers.
"""

import concurrent.futures
import json
import os
import queue
import subprocess
import threading
import time

from cluster_hosts import HERE, Host, peer, ssh_failure

MAX_SKEW = 1.0  # seconds
MIN_DISK, MIN_MEMORY = 1e9, 0.5e9  # bytes
MARK = "host_facts:"  # as in host_facts.py
COLUMNS = ("host", "ssh", "python", "torch", "cuda", "project", "interface", "own name", "port", "clock", "disk",
           "memory", "GPU")


class Contact:
    """The connection to one host, what it has answered and what is wrong there."""

    def __init__(self, host: Host):
        self.host, self.facts, self.problems, self.offset = host, {}, [], 0.0
        with open(os.path.join(HERE, "host_facts.py"), encoding="utf-8") as file:
            words = host.ssh(host.python, "-c", file.read())
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process = subprocess.Popen(words, start_new_session=True, text=True, errors="replace", **pipes)
        self.answers, self.said = queue.Queue(), []
        threading.Thread(target=self.said.extend, args=(self.process.stderr,), daemon=True).start()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line.removeprefix(MARK)))
        self.answers.put(None)

    def ask(self, seconds: float, **request):
        """The answer, or None where there is none; the reason is then among the problems."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the answer is None then
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            return self.fail("no answer", f"to {request['ask']!r} within {seconds} s", "look what it is busy with")
        return answer if answer is not None else self.no_connection()

    def no_connection(self) -> None:
        code, said = self.process.wait(), "".join(self.said).strip()
        last = said.rpartition("\n")[2]
        if code == 255:
            name, cure = ssh_failure(self.host, said)
            return self.fail(name, last, cure)
        if code in (126, 127):
            return self.fail("no Python", f"at {self.host.python}: {last}", "give this host a python=")
        return self.fail("no answer", f"exit code {code}: {last}", f"try: ssh {self.host.to} {self.host.python}")

    def fail(self, name: str, detail: str, cure: str) -> None:
        self.problems.append((name, detail, cure))

    def set_clock(self) -> None:
        """The clock's offset to this machine's, in seconds, from the quickest of five answers."""
        times = []
        for _ in range(5):
            sent = time.time()
            if (there := self.ask(10, ask="clock")) is None:
                return
            times.append((time.time() - sent, there - (sent + time.time()) / 2))
        self.offset = min(times)[1]

    def end(self) -> None:
        try:
            self.process.stdin.close()
        except OSError:
            pass  # ssh has ended before
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()


def compare(contact: Contact, first: Contact) -> None:
    """Python, torch, CUDA, the project and the clock against the first host's."""
    here, there = contact.facts, first.facts
    label = first.host.label
    if "torch_error" in here:
        contact.fail("no torch", here["torch_error"], "pip install torch there, or give this host a python=")
    for name, cure in (("Python", "install Python {} there"), ("torch", "pip install torch=={} there"),
                       ("CUDA", "the same build of torch on all hosts, or --device cpu for the script"),
                       ("transformers", "pip install transformers=={} there")):
        mine, its = (str(facts[name.lower()]).split("+")[0] for facts in (here, there))  # 2.13.0 of 2.13.0+cpu
        if mine != its and (name == "Python" or here["torch"] and there["torch"]):
            contact.fail(f"other {name} version", f"{mine}, but {label} has {its}", cure.format(its))
    if not here["project"]:
        contact.fail("no project", f"there is no {contact.host.dir}", "copy it there, or give this host a dir=")
    elif here["project"] != there["project"]:
        copy = f"on {label}: rsync -a --delete {first.host.dir}/ {contact.host.to}:{contact.host.dir}/"
        contact.fail("other project version", f"hash of its files {here['project']}, not {there['project']}", copy)
    if abs(skew := contact.offset - first.offset) > MAX_SKEW:
        contact.fail("clock skew", f"{skew:+.1f} s from {label}", "on both: sudo timedatectl set-ntp true")


def check_host(contact: Contact, alone: bool) -> None:
    """Interface, host name, disk and memory; a host alone is looked for by nobody."""
    facts, host = contact.facts, contact.host
    own, name = facts["own_address"], facts["host_name"]
    if "interface_error" in facts:
        error = facts["interface_error"]
        contact.fail("no interface", error, "give this host an iface=: ip -brief address lists them")
    if not alone and not host.iface and (own is None or own.startswith("127.")):
        what = f"host name that resolves to {own}" if own else "host name that resolves to nothing"
        cure = f"iface={facts['interface'] or 'eth0'} for this host, or {name} with its real address in its /etc/hosts"
        contact.fail(what, f"{name}, by which other ranks would look for it in vain", cure)
    if "disk_error" in facts or facts["free_disk"] < MIN_DISK:
        why = facts.get("disk_error") or f"{facts['free_disk'] / 1e9:.2f} GB free, {MIN_DISK / 1e9:.0f} GB wanted"
        full = facts["free_disk"] < MIN_DISK
        contact.fail("full disk" if full else "no writing", f"{facts['runs']}: {why}",
                     "delete old runs there (du -sh runs/*)" if full else "make it writable for this user")
    if facts["free_memory"] and facts["free_memory"] < MIN_MEMORY:
        contact.fail("little memory", f"{facts['free_memory'] / 1e9:.2f} GB free", "end other programs there")


def check_ports(contacts: list[Contact], pool) -> None:
    """Every host tries to reach the port that each other one listens on."""
    targets = []
    for contact in contacts:
        port = contact.facts["port"]
        if "listen_error" in contact.facts:
            why = f"{contact.facts['listen_error']}, by another program or an earlier run"
            contact.fail("blocked port", f"{port}: {why}", f"--port {port + 1}, or see who has it: ss -ltnp")
        else:
            rendezvous = contact.host.rank == 0  # this one is looked for by the address of hosts.txt
            address = None if rendezvous else contact.facts["address"]
            targets.append((contact, [address or contact.host.address, port]))

    def try_all(source: Contact) -> list:
        others = [target for contact, target in targets if contact is not source]
        return list(zip(others, source.ask(10 + 3 * len(others), ask="connect", targets=others) or []))

    failures = {}
    for source, results in zip(contacts, pool.map(try_all, contacts)):
        for target, error in results:
            if error:
                failures.setdefault(tuple(target), []).append(f"{source.host.label} ({error})")
    for contact, (address, port) in targets:
        if failed := failures.get((address, port)):
            cure = "let the hosts reach each other on all TCP ports: sudo ufw allow proto tcp from THEIR_NETWORK"
            contact.fail("blocked port", f"{address}:{port} can't be reached from {', '.join(failed)}", cure)


def row(contact: Contact, first: Contact | None) -> list[str]:
    """The cells of a host; `!` stands where something is wrong."""
    facts, names = contact.facts, {name.split(" that ")[0] for name, _, _ in contact.problems}
    if not facts:
        return [contact.host.label, f"! {contact.problems[0][0]}", *["-"] * (len(COLUMNS) - 2)]

    def cell(value, *problems: str) -> str:
        return f"{'! ' * bool(names & set(problems))}{value or 'none'}"

    return [contact.host.label, "ok", cell(facts["python"], "other Python version"),
            cell(facts["torch"], "other torch version", "no torch"), cell(facts["cuda"], "other CUDA version"),
            cell(facts["project"], "other project version", "no project"),
            cell(f"{facts['interface'] or ''} {facts['address'] or ''}".strip() or "-", "no interface"),
            cell(facts["own_address"], "host name"), cell(facts["port"], "blocked port"),
            cell(f"{contact.offset - first.offset:+.2f} s", "clock skew"),
            cell(f"{facts['free_disk'] / 1e9:.1f} GB", "full disk", "no writing"),
            cell(f"{(facts['free_memory'] or 0) / 1e9:.1f} GB", "little memory"), ", ".join(facts["gpus"]) or "-"]


def check(hosts: list[Host], port: int) -> bool:
    """Asks all hosts at once and prints the table; True if nothing is wrong."""
    contacts = [Contact(host) for host in hosts]

    def ask(contact: Contact) -> None:
        host = contact.host
        listens = port if host is hosts[0] else 0
        contact.facts = contact.ask(90, ask="facts", folder=host.dir, interface=host.iface, peer=peer(hosts, host),
                                    port=listens) or {}
        if contact.facts:
            contact.set_clock()

    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(ask, contacts))
        there = [contact for contact in contacts if contact.facts]
        for contact in there:
            compare(contact, there[0])
            check_host(contact, len(hosts) == 1)
        check_ports(there, pool)
        list(pool.map(Contact.end, contacts))
    table = [COLUMNS, *(row(contact, there[0] if there else None) for contact in contacts)]
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    for contact in contacts:
        for name, detail, cure in contact.problems:
            print(f"\n{contact.host.label}: {name}: {detail}\n    cure: {cure}")
    return not any(contact.problems for contact in contacts)
