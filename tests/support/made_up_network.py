"""Processes of an elastic run without sockets and without time: members that meet, join, train, are lost and come back.

    network = Network(monkeypatch, folder, hosts=3)
    network.start(host)             a process, as its agent starts it
    network.parts = [{0, 1}, {2}]   from now on these hosts reach each other only (None: all do); [{0, 1}, {1, 2}]:
                                    only 0 and 2 don't
    network.run(seconds)            of the clock in here

What membership/rendezvous.py does is the real thing. What generation.py does around it is done here in small: a
generation begins on one member after the other when all have joined, and ends on each when one is out of reach.
"""

import json
import pathlib
import random

from membership import contacts, rendezvous

TURN, JOINING, AGAIN = 0.05, 3.0, 1.0  # seconds: between two turns, until a member gives up, until an agent starts anew


class Process:
    """One of a host. `phase`: meeting, joining, training; ended: its agent will start another one; killed: nobody."""

    def __init__(self, members, host: int, now: float):
        self.members, self.host, self.phase, self.since, self.is_complete = members, host, "meeting", now, False

    @property
    def roster(self):
        return self.members.next

    def is_in(self, roster) -> bool:
        return self.phase in ("joining", "training") and self.roster is not None and self.roster.secret == roster.secret

    def meets(self, now: float) -> None:
        self.phase, self.since, self.is_complete = "meeting", now, False
        self.members.meeting = rendezvous.Meeting(self.members, self.members.meeting.store)


class Network:
    """It is the module time of what runs in here, and the store, of which the port is asked."""

    port = 1

    def __init__(self, monkeypatch, folder: pathlib.Path, hosts: int, *, nproc: int = 1, at_least: int = 1,
                 multiple: int = 1, run_id: str = "run", seed: int = 0):
        self.now, self.listeners, self.processes, self.parts = 0.0, {}, [], None
        self.random, self.sleeping, self.current, self.monkeypatch = random.Random(seed), [], None, monkeypatch
        self.folder, self.multiple, self.trained = folder, multiple, []  # generations of which all members trained
        self.record = {"id": run_id, "token": "token", "hosts": [f"127.0.0.{host + 1}" for host in range(hosts)],
                       "port": 29600, "at_least": at_least, "at_most": hosts, "nproc": nproc}
        network = self

        class Listener:
            def __init__(self, token, answer, address):
                self.address, self.answer, self.port = address, answer, len(network.listeners) + 1
                network.listeners[address, self.port] = self

            def listen(self, port: int) -> None:
                if (self.address, port) in network.listeners:
                    raise OSError(98, "Address already in use")
                network.listeners[self.address, port] = self

        monkeypatch.setattr(rendezvous, "Listener", Listener)
        monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: self)
        monkeypatch.setattr(contacts, "call", self.call)
        for module in rendezvous, contacts:
            monkeypatch.setattr(module, "time", self)

    def start(self, host: int, local_rank: int = 0) -> Process:
        self.monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        path = str(self.folder / f"host{host}" / ".members")
        process = Process(rendezvous.Members({**self.record, "host": host}, path, self.multiple), host, self.now)
        self.processes.append(process)
        return process

    def begun(self, hosts: int) -> list[Process]:
        """One process a host, all in their first generation."""
        processes = [self.start(host) for host in range(hosts)]
        self.run(1)
        assert all(process.phase == "training" for process in processes)
        return processes

    def end(self, process: Process, phase: str = "killed") -> None:
        process.phase, process.since = phase, self.now
        self.listeners = {at: each for at, each in self.listeners.items() if each is not process.members.listener}

    def reach(self, host: int, other: int) -> bool:
        return host == other or self.parts is None or any({host, other} <= part for part in self.parts)

    def call(self, address, token, message, seconds=1.0):
        listener = self.listeners.get(tuple(address))
        if listener is None or not self.reach(self.current.host, self.record["hosts"].index(address[0])):
            return None
        return json.loads(json.dumps(listener.answer(json.loads(json.dumps(message)), None)))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """The others have their turns meanwhile."""
        self.sleeping.append(self.current)
        self.run(seconds)
        self.current = self.sleeping.pop()

    def run(self, seconds: float) -> None:
        end = self.now + seconds - TURN / 2
        while self.now < end:
            self.now += TURN
            for process in [*self.processes]:
                if process in self.processes and process not in self.sleeping and process.phase != "killed":
                    self.turn(process)
            self.look()

    def together(self, roster) -> list[Process] | None:
        """The processes of that generation, if all are in it, and each reaches each."""
        found = [process for process in self.processes if process.members.me in roster.members]
        is_one = len(found) == len(roster.members) and all(process.is_in(roster) for process in found)
        return found if is_one and all(self.reach(a.host, b.host) for a in found for b in found) else None

    def turn(self, process: Process) -> None:
        self.current, members, slow = process, process.members, self.random.random() < 0.5
        if process.phase == "ended":
            if self.now > process.since + AGAIN:
                self.processes.remove(process)
                self.start(process.host, members.me.local_rank)
        elif process.phase == "meeting":
            members.meeting.look_around()
            if members.next:
                members.history.agree(members.next)
                process.phase, process.since = "joining", self.now
        elif process.phase == "joining":
            found = self.together(process.roster)
            if found:
                for each in found:
                    each.is_complete = True
            if found and process.is_complete and slow:
                process.phase = "training"
                members.begin(process.roster)
            elif self.now > process.since + JOINING or process.is_complete and not found:
                for other in process.roster.members:
                    if not self.reach(process.host, other.host):
                        members.could_not_reach(other)
                process.meets(self.now)
        elif not self.together(process.roster) and slow:
            process.meets(self.now)
        elif (found := self.together(process.roster)) and all(each.phase == "training" for each in found) and any(
                each.members.newcomers() for each in found):
            for each in found:
                each.meets(self.now)

    def look(self) -> None:
        """Never may two generations train at the same time."""
        rosters = {process.roster.secret: process.roster for process in self.processes if process.phase == "training"}
        training = [roster for roster in rosters.values() if (found := self.together(roster)) and all(
            process.phase == "training" for process in found)]
        assert len(training) <= 1, f"at {self.now:.2f}: {training}"
        if training and (not self.trained or self.trained[-1].secret != training[0].secret):
            self.trained.append(training[0])
