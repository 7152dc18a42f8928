"""Who takes part in an elastic run, and as which rank: agreed on by the processes themselves.

Each process listens (see channel.py), and one process of each host does so at the run's port, too. A rendezvous is led
by the first host of hosts.txt that answers there, so no host is needed for ever:

    a new process       calls until a run takes it in, or until enough hosts are there to begin one
    a rank of a run     calls when its groups have broken, and waits until each of the others has come or is gone
    whoever leads it    hands out the roster: the processes in the order of hosts.txt, a store for them, a generation

Two halves of a cut network must not both train. So a rendezvous goes on with more than half of the ranks of the last
generation only, or with half of them where the lowest of these ranks is among them. A process that its agent has
started anew stands for the one before it, which is certainly gone. Since a rank belongs to one generation at a time and
a generation begins when all its ranks have joined, at most one half can be it. A rank that has agreed to a generation
and then loses the others can't know whether it has begun for them, so it counts as one that has. And nobody agrees to
what was decided without all that it knows. This each host also keeps on its disk, for processes that start anew.

A part that hears too few waits, with what it has in memory, until it hears more. Not every host need reach every other
one: of two that could not, twice in a row, the later one stays out for a while.
"""

import collections
import contextlib
import dataclasses
import datetime
import glob
import json
import os
import secrets
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from hosts import exits
from hosts.host_facts import PORT_PATIENCE, holder
from membership.channel import Channel, Listener, call
from membership.roster import Caller, Member, Roster, since_last
from ranks.files import replace
from ranks.lost import VARIABLE
from utils import UserError

WAIT = 600.0  # seconds that a process waits to be taken in
FRESH = 2.0  # seconds for which a process that has called counts as there
PAUSE = 0.05  # seconds between two calls
SILENT = 5.0  # seconds for which a host that did not answer is not asked again
SETTLED = 3.0  # seconds without a new process, until a run begins with fewer hosts than hosts.txt has
ATTEMPTS = 2  # to reach an earlier member, and twice as many for a later one, until a process stays out
STAYS_OUT = 30.0  # seconds for which it does; each time twice as long


class Members:
    """This process among those of its elastic run. `roster`: of the generation that it belongs to, or belonged to.

    `path`: what the names of the files begin with in which each process keeps what it knows. `multiple`: of so many
    processes a generation has to be. Raises UserError where another program has the run's port.
    """

    def __init__(self, record: dict, path: str, multiple: int):
        self.token, self.hosts, self.port = record["token"].encode(), record["hosts"], record["port"]
        self.run_id, self.at_least, self.at_most = record["id"], record["at_least"], record["at_most"]
        self.multiple, self.is_done, self.heard_at = multiple, False, 0.0
        self.next, self.state, self.said = None, "meeting", ""
        self.callers: dict[str, Caller] = {}  # by their keys
        self.basis: dict[str, list] = {}  # what the members of `next` knew when this process decided on it
        self.silent: dict[str, float] = {}  # addresses that did not answer, until when they are not asked
        self.links: list[Channel] = []  # of other members, see failure_detector.py
        self.not_reached = collections.Counter()  # keys of processes: how often, since the last generation began
        self.stays_out_until, self.stays_out = 0.0, STAYS_OUT
        self.hears_enough, self.has_port, self.found_running, self.taken_at = True, False, False, None
        address = self.hosts[record["host"]]
        self.path = f"{path}.{address}"
        self.roster, self.agreed = self.read()  # `agreed`: later ones, which may have begun for others
        self.listener = Listener(self.token, self.answer, address)
        self.me = Member(uuid.uuid4().hex, record["host"], address,
                         int(os.environ.get("LOCAL_RANK", 0)), self.listener.port, record["nproc"])

    @classmethod
    def from_environment(cls, path: str, multiple: int) -> "Members | None":
        return cls(json.loads(os.environ[VARIABLE]), path, multiple) if VARIABLE in os.environ else None

    def read(self) -> tuple[Roster | None, list[Roster]]:
        """The last roster of this run that a process of this host knew, and those that were agreed on since."""
        rosters = []
        for path in glob.glob(f"{glob.escape(self.path)}.*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="utf-8") as file:
                record = json.load(file)
                if record["run"] == self.run_id:
                    rosters += map(Roster.of, record["knows"])
                    self.is_done = self.is_done or record["is_done"]
        return since_last(rosters)

    def knows(self) -> list[dict]:
        """This process's generation, and those that it has agreed to since, as JSON has them."""
        return [dataclasses.asdict(each) for each in [self.roster, *self.agreed] if each]

    def begin(self, roster: Roster) -> None:
        """All members have joined: from now on this process belongs to that generation."""
        self.roster, self.agreed, self.state = dataclasses.replace(roster, has_begun=True), [], "running"
        self.callers.clear()  # what they said then is no longer so
        self.not_reached.clear()
        self.keep()

    def keep(self, is_done: bool = False) -> None:
        """Writes what this process knows, unless the disk is full."""
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            record = {"run": self.run_id, "is_done": is_done, "knows": self.knows()}
            replace(f"{self.path}.{self.me.local_rank}.json", json.dumps(record))

    def may_begin(self, members: list[Member]) -> bool:
        """Whether these are enough for a first generation: more than half of the hosts, or half with the first one."""
        there, hosts = {member.address for member in members}, list(dict.fromkeys(self.hosts))[:self.at_most]
        return 2 * len(there) > len(hosts) or 2 * len(there) == len(hosts) and hosts[0] in there

    def answer(self, message: dict, channel: Channel) -> dict:
        """What the listener says to another process of the run."""
        if message["kind"] == "link":
            is_mine = self.next is not None and message["secret"] == self.next.secret
            if is_mine:
                channel.is_kept = True
                self.links.append(channel)
            return {"ok": is_mine}
        if message["kind"] == "meet":
            member = Member(**message["me"])
            self.hear(member, message["knows"])
            self.silent.pop(member.address, None)
            if self.next and self.basis.get(member.key) == message["knows"]:
                return {"state": "agreed", "roster": dataclasses.asdict(self.next)}
        return {"state": self.state}

    def hear(self, member: Member, knows: list[dict]) -> Caller:
        now, before = time.monotonic(), self.callers.get(member.key)
        caller = self.callers[member.key] = Caller(member, knows, before.since if before else now, now)
        return caller  # a generation that begins meanwhile forgets all callers

    def there(self) -> list[Caller]:
        """Those who have called a moment ago, and this process: one a place, the last to come. By their ranks."""
        own, now = self.hear(self.me, self.knows()), time.monotonic()
        fresh = {caller.member.place: caller for caller in sorted([*self.callers.values()], key=lambda each: each.since)
                 if now - caller.at < FRESH}
        return sorted({**fresh, self.me.place: own}.values(), key=lambda each: each.member.order)

    def newcomers(self) -> list[Member]:
        """Processes that wait to be taken in, while this one belongs to a generation."""
        if self.me.address != self.roster.members[0].address:
            return []
        return [caller.member for caller in self.there() if caller.member not in self.roster.members]

    def could_not_reach(self, member: Member) -> None:
        """Of two that do not reach each other the later one stays out, or the one that alone knows of it."""
        self.not_reached[member.key] += 1
        if self.not_reached[member.key] >= ATTEMPTS * (1 if member.order < self.me.order else 2):
            print(f"{self.me.address} and {member.address} do not reach each other: this process stays out for "
                  f"{self.stays_out:g} s. Can each host reach each other one at all ports?", flush=True)
            self.stays_out_until, self.stays_out = time.monotonic() + self.stays_out, 2 * self.stays_out
            self.not_reached.clear()

    def meet(self, told_to_stop: Callable[[], int]) -> Roster:
        """Waits until there is a next generation with this process, or a signal has told it to stop. Raises UserError
        after a long time."""
        self.state, self.next, self.hears_enough, self.heard_at = "meeting", None, True, time.monotonic()
        while self.next is None:
            if self.roster is None and time.monotonic() > self.heard_at + WAIT:
                raise UserError(f"no run took this process in, and too few hosts came to begin one, for {WAIT:g} "
                                f"seconds: are the others of {', '.join(self.hosts)} switched on?")
            if number := told_to_stop():
                print("stopped while it waited for other hosts", flush=True)
                os._exit(exits.after(number))
            self.look_around()
            time.sleep(PAUSE)
        self.agree()
        return self.next

    def agree(self) -> None:
        """From now on the next generation may begin for others, whether this process hears of it or not."""
        self.agreed = [*(each for each in self.agreed if each.places != self.next.places), self.next]
        self.keep()

    def look_around(self) -> None:
        """Calls the first host that answers; leads the rendezvous where that is this one.

        A new process, and one that hears too few, calls all: a run that goes on may be anywhere, and takes in who has
        called. One that stays out calls none.
        """
        self.state = "meeting" if time.monotonic() >= self.stays_out_until else "stays out"
        if self.state == "stays out":
            return
        known = [member.address for member in self.roster.members] if self.roster else []
        leads, states = self.opens_port(), []
        for address in dict.fromkeys([*self.hosts, *known]):
            if address == self.me.address and leads:
                states.append("here")
            elif (answer := self.call((address, self.port))) and answer["state"] != "stays out":
                states.append(answer["state"])
                self.heard_at = time.monotonic()
                self.found_running = self.found_running or answer["state"] == "running"
                if self.next:
                    return
            if states and self.hears_enough and self.roster and self.me in self.roster.members:
                break
        if states[:1] == ["here"] and "running" not in states:
            self.lead()

    def call(self, endpoint: tuple[str, int]) -> dict | None:
        """Says that this process is there. A host that is out of reach is not asked again for a while."""
        now = time.monotonic()
        if now < self.silent.get(endpoint[0], 0):
            return None
        answer = call(endpoint, self.token, {"kind": "meet", "me": dataclasses.asdict(self.me), "knows": self.knows()})
        if answer and answer["state"] == "agreed":
            self.next = Roster.of(answer["roster"])
        if answer is None and time.monotonic() > now + 0.5:  # nobody refused
            self.silent[endpoint[0]] = time.monotonic() + SILENT
        return answer

    def opens_port(self) -> bool:
        """Whether this process listens at the run's port of its host. Another one of the run may do so."""
        if not self.has_port:
            try:
                self.listener.listen(self.port)
                self.has_port = True
            except OSError:
                if call((self.me.address, self.port), self.token, {"kind": "who"}) is None:
                    self.taken_at = self.taken_at or time.monotonic()
                    if time.monotonic() > self.taken_at + PORT_PATIENCE:
                        raise UserError(f"port {self.port} of {self.me.address} is taken by "
                                        f"{holder(self.port)}: end that, or give launch_cluster.sh another --port")
        return self.has_port

    def lead(self) -> None:
        """Leads the rendezvous: sets `next` where all is known that has to be."""
        found = self.there()
        members = [caller.member for caller in found]
        last, agreed = since_last([Roster.of(each) for caller in found for each in caller.knows])
        if self.may_come(members, last):
            return
        known = [each for each in [last, *agreed] if each]
        self.hears_enough = all(roster.may_go_on(members) for roster in known)
        if not self.hears_enough:
            self.say(f"too few: this host hears {len(members)} of the {len(known[-1].members)} processes of the run, "
                     "and the others may be training: this part waits, until it hears more of them")
            return
        if (hosts := len({member.address for member in members})) < self.at_least or len(members) % self.multiple or (
                not known and not self.may_begin(members)):
            self.say(f"waiting for others: hosts {hosts} of at least {self.at_least}, and to begin with more than half "
                     f"of {', '.join(self.hosts[:self.at_most])}; processes {len(members)}, which has to be a multiple "
                     f"of {self.multiple}")
            return
        self.store = dist.TCPStore(self.me.address, 0, is_master=True, wait_for_workers=False,  # while it is referenced
                                   timeout=datetime.timedelta(seconds=SILENT))
        self.basis = {caller.member.key: caller.knows for caller in found}
        self.next = Roster(1 + max([0, *(each.generation for each in known)]), tuple(members),
                           (self.me.address, self.store.port), secrets.token_hex(8))

    def say(self, text: str) -> None:
        """Once in a row."""
        if text != self.said:
            self.said = text
            print(text, flush=True)

    def may_come(self, members: list[Member], last: Roster | None) -> bool:
        """Whether somebody is to be waited for: a rank that lives and has not noticed yet that its groups are broken,
        or belongs to a later generation, which takes this process in; where no rank has anything in memory, the
        processes of hosts that have just been started."""
        places = {member.place for member in members}
        absent = [member for member in last.members if member.place not in places] if last else []
        with ThreadPoolExecutor(max(1, len(absent))) as pool:
            answers = [*pool.map(lambda member: self.call(member.endpoint), absent)]
        if any(answer and answer["state"] != "stays out" for answer in answers):
            return True
        if last and any(member in last.members for member in members):
            return False
        now, nproc = time.monotonic(), {member.address: member.nproc for member in members}
        newest = max(self.callers[member.key].since for member in members)
        is_complete = nproc.keys() >= {*self.hosts} and len(members) == sum(nproc.values())
        return not is_complete and now < newest + SETTLED
