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

import dataclasses
import datetime
import json
import os
import secrets
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from hosts import exits
from membership.channel import Channel, Listener
from membership.contacts import SILENT, Contacts
from membership.roster import History, Member, Roster, since_last
from ranks.lost import VARIABLE
from utils import UserError

WAIT = 600.0  # seconds that a process waits to be taken in
PAUSE = 0.05  # seconds between two calls
SETTLED = 3.0  # seconds without a new process, until a run begins with fewer hosts than hosts.txt has


class Members:
    """This process, `me`, among those of its elastic run.

    `limits`: hosts of a generation, at least and, to begin with, at most, and of what its processes are a multiple.
    `history`: the generations that it knows of, in files whose names begin with `path`. `contacts`: whom it calls,
    and who calls it. `links`: connections of other members, see failure_detector.py. `meeting`: the rendezvous that it
    takes part in, or has led to its generation. Raises UserError where another program has the run's port.
    """

    def __init__(self, record: dict, path: str, multiple: int):
        self.limits = record["at_least"], record["at_most"], multiple
        self.contacts, self.links = Contacts(record), []
        address, local_rank = self.contacts.address, int(os.environ.get("LOCAL_RANK", 0))
        self.history, self.meeting = History(record["id"], f"{path}.{address}", local_rank), Meeting(self)
        self.listener = Listener(self.contacts.token, self.answer, address)  # which answers from here on
        self.me = Member(uuid.uuid4().hex, record["host"], address, local_rank, self.listener.port, record["nproc"])

    @classmethod
    def from_environment(cls, path: str, multiple: int) -> "Members | None":
        return cls(json.loads(os.environ[VARIABLE]), path, multiple) if VARIABLE in os.environ else None

    @property
    def next(self) -> Roster | None:
        """That of the generation to which the meeting has led."""
        return self.meeting.next

    def begin(self, roster: Roster) -> None:
        """All members have joined: from now on this process belongs to that generation."""
        self.contacts.begin()
        self.meeting.state = "running"
        self.history.begin(roster)

    def answer(self, message: dict, channel: Channel) -> dict:
        """What the listener says to another process of the run."""
        if message["kind"] == "link":
            roster = self.next  # read once: the main thread may leave the meeting meanwhile
            if is_mine := roster is not None and message["secret"] == roster.secret:
                channel.keep()
                self.links.append(channel)
            return {"ok": is_mine}
        meeting = self.meeting
        if message["kind"] == "meet":
            member = Member(**message["me"])
            self.contacts.hear(member, message["knows"])
            self.contacts.silent.pop(member.address, None)
            if (roster := meeting.next) and meeting.basis.get(member.key) == message["knows"]:
                return {"state": "agreed", "roster": dataclasses.asdict(roster)}
        return {"state": meeting.state}

    def there(self) -> list:
        """See Contacts.there."""
        return self.contacts.there(self.me, self.history.knows())

    def newcomers(self) -> list[Member]:
        """Processes that wait to be taken in, while this one belongs to a generation."""
        members = self.history.roster.members
        if self.me.address != members[0].address:
            return []
        return [caller.member for caller in self.there() if caller.member not in members]

    def could_not_reach(self, member: Member) -> None:
        self.contacts.could_not_reach(self.me, member)

    def meet(self, told_to_stop: Callable[[], int]) -> Roster:
        """Waits until there is a next generation with this process, or a signal has told it to stop. Raises UserError
        after a long time."""
        meeting = self.meeting = Meeting(self, self.meeting.store)
        while self.next is None:
            if self.history.roster is None and time.monotonic() > meeting.heard_at + WAIT:
                raise UserError(f"no run took this process in, and too few hosts came to begin one, for {WAIT:g} "
                                f"seconds: are the others of {', '.join(self.contacts.hosts)} switched on?")
            if number := told_to_stop():
                print("stopped while it waited for other hosts", flush=True)
                os._exit(exits.after(number))
            meeting.look_around()
            time.sleep(PAUSE)
        self.history.agree(self.next)
        return self.next


class Meeting:
    """A rendezvous: from the moment when a process has no generation until there is one, `next`.

    `state`: what is answered to callers. `basis`: what each member of `next` knew when this process decided on it.
    `store`: of the last generation that this process has led to, which others may be about to leave; then of `next`.
    """

    def __init__(self, members: Members, store: dist.Store | None = None):
        self.members, self.contacts, self.limits, self.store = members, members.contacts, members.limits, store
        self.next, self.state, self.basis = None, "meeting", {}
        self.said, self.hears_enough, self.heard_at = "", True, time.monotonic()

    def look_around(self) -> None:
        """Calls the first host that answers; leads the rendezvous where that is this one.

        A new process, and one that hears too few, calls all: a run that goes on may be anywhere, and takes in who has
        called. One that stays out calls none.
        """
        self.state = "stays out" if self.contacts.stays_out() else "meeting"
        if self.state == "stays out":
            return
        me, roster = self.members.me, self.members.history.roster
        known = [member.address for member in roster.members] if roster else []
        leads, states = self.contacts.opens_port(self.members.listener), []
        for address in dict.fromkeys([*self.contacts.hosts, *known]):
            if address == me.address and leads:
                states.append("here")
            elif (answer := self.call((address, self.contacts.port))) and answer["state"] != "stays out":
                states.append(answer["state"])
                self.heard_at = time.monotonic()
                self.contacts.found_running |= answer["state"] == "running"
                if self.next:
                    return
            if states and self.hears_enough and roster and me in roster.members:
                break
        if states[:1] == ["here"] and "running" not in states:
            self.lead()

    def call(self, endpoint: tuple[str, int]) -> dict | None:
        """Says that this process is there. Another one that leads the rendezvous may answer with `next`."""
        me, knows = dataclasses.asdict(self.members.me), self.members.history.knows()
        answer = self.contacts.call(endpoint, {"kind": "meet", "me": me, "knows": knows})
        if answer and answer["state"] == "agreed":
            self.next = Roster.of(answer["roster"])
        return answer

    def lead(self) -> None:
        """Leads the rendezvous: sets `next` where all is known that has to be."""
        found = self.members.there()
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
        (at_least, at_most, multiple), hosts = self.limits, len({member.address for member in members})
        if hosts < at_least or len(members) % multiple or not known and not self.may_begin(members, at_most):
            self.say(f"waiting for others: hosts {hosts} of at least {at_least}, and to begin with more than half of "
                     f"{', '.join(self.contacts.hosts[:at_most])}; processes {len(members)}, which has to be a "
                     f"multiple of {multiple}")
            return
        address = self.members.me.address
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False,  # while it is referenced
                                   timeout=datetime.timedelta(seconds=SILENT))
        self.basis = {caller.member.key: caller.knows for caller in found}
        self.next = Roster(1 + max([0, *(each.generation for each in known)]), tuple(members),
                           (address, self.store.port), secrets.token_hex(8))

    def say(self, text: str) -> None:
        """Once in a row."""
        if text != self.said:
            self.said = text
            print(text, flush=True)

    def may_begin(self, members: list[Member], at_most: int) -> bool:
        """Whether these are enough for a first generation: more than half of the hosts, or half with the first one."""
        there, hosts = {member.address for member in members}, list(dict.fromkeys(self.contacts.hosts))[:at_most]
        return 2 * len(there) > len(hosts) or 2 * len(there) == len(hosts) and hosts[0] in there

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
        newest = max(self.contacts.callers[member.key].since for member in members)
        is_complete = nproc.keys() >= {*self.contacts.hosts} and len(members) == sum(nproc.values())
        return not is_complete and now < newest + SETTLED
