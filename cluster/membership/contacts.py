"""Whom a process of an elastic run calls, and who has called it."""

import collections
import time

from hosts.host_facts import PORT_PATIENCE, holder
from membership.channel import Listener, call
from membership.roster import Caller, Member
from utils import UserError

FRESH = 2.0  # seconds for which a process that has called counts as there
SILENT = 5.0  # seconds for which a host that did not answer is not asked again
ATTEMPTS = 2  # to reach an earlier member, and twice as many for a later one, until a process stays out
STAYS_OUT = 30.0  # seconds for which it does; each time twice as long


class Contacts:
    """The hosts of a run, by their addresses, how this process, at `address`, reaches them, and who has called it.

    `silent`: addresses that did not answer, until when they are not asked. `not_reached`: keys of processes, how often,
    and `callers`: those that have called, by their keys; both since the last generation began. `found_running`: a run
    that was under way.
    """

    def __init__(self, record: dict):
        self.token, self.hosts, self.port = record["token"].encode(), record["hosts"], record["port"]
        self.address = self.hosts[record["host"]]
        self.silent, self.not_reached, self.callers = {}, collections.Counter(), {}
        self.has_port, self.taken_at, self.found_running = False, None, False
        self.out_until, self.out_for = 0.0, STAYS_OUT

    def begin(self) -> None:
        """A generation has begun: what callers said before is no longer so."""
        self.callers.clear()
        self.not_reached.clear()

    def hear(self, member: Member, knows: list[dict]) -> Caller:
        """That process has called."""
        now, before = time.monotonic(), self.callers.get(member.key)
        caller = self.callers[member.key] = Caller(member, knows, before.since if before else now, now)
        return caller  # a generation that begins meanwhile forgets all callers

    def there(self, me: Member, knows: list[dict]) -> list[Caller]:
        """Those who have called a moment ago, and `me`: one a place, the last to come. By their ranks."""
        own, now = self.hear(me, knows), time.monotonic()
        fresh = {caller.member.place: caller for caller in sorted([*self.callers.values()], key=lambda each: each.since)
                 if now - caller.at < FRESH}
        return sorted({**fresh, me.place: own}.values(), key=lambda each: each.member.order)

    def call(self, endpoint: tuple[str, int], message: dict) -> dict | None:
        """A process's answer. A host that is out of reach is not asked again for a while."""
        now = time.monotonic()
        if now < self.silent.get(endpoint[0], 0):
            return None
        answer = call(endpoint, self.token, message)
        if answer is None and time.monotonic() > now + 0.5:  # nobody refused
            self.silent[endpoint[0]] = time.monotonic() + SILENT
        return answer

    def opens_port(self, listener: Listener) -> bool:
        """Whether this process listens at the run's port of its host. Another one of the run may do so."""
        if not self.has_port:
            try:
                listener.listen(self.port)
                self.has_port = True
            except OSError:
                if call((self.address, self.port), self.token, {"kind": "who"}) is None:
                    self.taken_at = self.taken_at or time.monotonic()
                    if time.monotonic() > self.taken_at + PORT_PATIENCE:
                        raise UserError(f"port {self.port} of {self.address} is taken by "
                                        f"{holder(self.port)}: end that, or give launch_cluster.sh another --port")
        return self.has_port

    def could_not_reach(self, me: Member, member: Member) -> None:
        """Of two that do not reach each other the later one stays out, or the one that alone knows of it."""
        self.not_reached[member.key] += 1
        if self.not_reached[member.key] >= ATTEMPTS * (1 if member.order < me.order else 2):
            print(f"{self.address} and {member.address} do not reach each other: this process stays out for "
                  f"{self.out_for:g} s. Can each host reach each other one at all ports?", flush=True)
            self.out_until, self.out_for = time.monotonic() + self.out_for, 2 * self.out_for
            self.not_reached.clear()

    def stays_out(self) -> bool:
        return time.monotonic() < self.out_until
