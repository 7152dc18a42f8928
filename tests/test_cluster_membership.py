"""Who takes part in an elastic run: rendezvous, of which only one half of a cut network may go on.

Most of them are in a network and a time that are made up, so that each is over in no time.
"""

import dataclasses
import json
import os
import random
import socket
import threading
import time

import pytest
from lab.launch import modules_of

with modules_of(9):
    from hosts import host_facts
    from membership import contacts, rendezvous, roster
    from membership.channel import call
    from support.made_up_network import Network
    from utils import UserError


@pytest.fixture
def network(monkeypatch, tmp_path):
    return lambda hosts, **options: Network(monkeypatch, tmp_path, hosts, **options)


def places(process) -> list[tuple[int, int]]:
    return [(member.host, member.local_rank) for member in process.roster.members]


def test_the_first_meeting_waits_for_all_hosts(network):
    net = network(3, nproc=2)
    processes = [net.start(host, local_rank) for host, local_rank in ((2, 1), (0, 1), (1, 0), (2, 0), (0, 0))]
    net.run(rendezvous.SETTLED - 0.5)
    assert all(each.phase == "meeting" for each in processes)
    processes.append(net.start(1, 1))
    net.run(1)
    assert all(each.phase == "training" for each in processes)
    assert places(processes[0]) == [(host, local_rank) for host in range(3) for local_rank in range(2)]


@pytest.mark.parametrize("options, too_few, enough, text", [
    (dict(at_least=3), 2, 3, "waiting for others: hosts 2 of at least 3, and to begin"),
    (dict(multiple=2), 3, 4, "processes 3, which has to be a "
                             "multiple of 2")])
def test_too_few_hosts_or_processes_to_begin(network, capsys, options, too_few, enough, text):
    net = network(4, **options)
    for host in range(too_few):
        net.start(host)
    net.run(10)
    assert not net.trained and capsys.readouterr().out.count(text) == 1
    for host in range(too_few, enough):
        net.start(host)
    net.run(10)
    assert len(net.trained) == 1 and len(net.trained[0].members) == enough


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_survivors_go_on_at_once_and_the_lost_one_comes_back(network, lost):
    net = network(3)
    processes = net.begun(3)
    net.end(processes.pop(lost), "ended")
    net.run(0.8)
    left = [(host, 0) for host in range(3) if host != lost]
    assert all(each.phase == "training" and places(each) == left for each in processes)
    net.run(3)
    assert places(processes[0]) == [(0, 0), (1, 0), (2, 0)] and len(net.trained) == 3


def test_a_rank_that_has_not_noticed_is_waited_for(network, monkeypatch):
    """It still computes, and its listener answers."""
    net = network(3)
    processes = net.begun(3)
    net.end(processes[2])
    turn, busy = net.turn, processes[1]
    monkeypatch.setattr(net, "turn", lambda process: process is busy or turn(process))
    net.run(5)
    assert processes[0].phase == "meeting"
    monkeypatch.setattr(net, "turn", turn)
    net.run(1)
    assert places(processes[0]) == places(busy) == [(0, 0), (1, 0)] and processes[0].phase == "training"


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_halves(network, seed):
    """Of each cut at most one part goes on: the one with more than half, or with half and the first. And all heal."""
    rng = random.Random(seed)
    hosts, parts = rng.randint(2, 7), [set(), set(), set()][: rng.randint(2, 3)]
    net = network(hosts, seed=seed)
    net.begun(hosts)
    for host in range(hosts):
        rng.choice(parts).add(host)
    net.parts = parts
    goes_on = [part for part in parts if 2 * len(part) > hosts or 2 * len(part) == hosts and 0 in part]
    net.run(20)
    training = [each for each in net.processes if each.phase == "training"]
    assert len(goes_on) <= 1 and {each.host for each in training} == set().union(*goes_on)
    assert all({host for host, _ in places(each)} == goes_on[0] for each in training)
    net.parts = None
    net.run(20)
    assert all(each.phase == "training" and len(each.roster.members) == hosts for each in net.processes)


def test_the_second_of_two_hosts_waits_for_the_first_with_what_it_has(network, capsys):
    """It can't tell a lost host from a cut cable. The first one, started anew, gets all from its memory."""
    net = network(2)
    first, second = net.begun(2)
    net.end(first)
    net.run(30)
    assert second.phase == "meeting" and capsys.readouterr().out.count("too few: this host hears 1 of the 2") == 1
    net.processes.remove(first)
    net.start(0)
    net.run(3)
    assert second.phase == "training" and places(second) == [(0, 0), (1, 0)] and second in net.processes


@pytest.mark.parametrize("cut, left, has_begun", [((1, 2), {0, 1}, False), ((0, 1), {0, 2}, True)])
def test_two_hosts_that_do_not_reach_each_other(network, monkeypatch, cut, left, has_begun):
    """The run goes on without one of them, which tries again ever more seldom. When it can, it takes it in."""
    monkeypatch.setattr(contacts, "STAYS_OUT", 10.0)
    net = network(3)
    if has_begun:
        net.begun(3)
    else:
        [net.start(host) for host in range(3)]
    net.parts = [{0, 1, 2} - {host} for host in cut]
    net.run(8)
    training = [each for each in net.processes if each.phase == "training"]
    count = len(net.trained)
    assert {each.host for each in training} == left
    net.run(20)
    assert len(net.trained) <= count + 2, "a run that is remade all the time makes no steps"
    net.parts = None
    net.run(50)
    assert all(each.phase == "training" and len(each.roster.members) == 3 for each in net.processes)


def test_a_minority_that_starts_anew_knows_that_it_is_one(network, monkeypatch, tmp_path):
    """From its disk. The file of another run says nothing."""
    net = network(3)
    for process in net.begun(3):
        net.end(process)
    net.processes.clear()
    net.parts = [{0}, {1, 2}]
    alone = net.start(0)
    net.run(10)
    assert alone.phase == "meeting" and alone.members.history.roster.generation == 1
    net.start(1), net.start(2)
    net.run(10)
    assert alone.phase == "meeting" and {host for host, _ in places(net.processes[-1])} == {1, 2}
    other = network(3, run_id="another run")
    pair = [other.start(0), other.start(1)]
    other.run(10)
    assert all(each.phase == "training" for each in pair)


@pytest.mark.parametrize("hosts, first, second", [(4, {0, 1}, {2, 3}), (3, {0}, {1, 2}), (5, {0, 1}, {2, 3, 4})])
def test_halves_at_the_start_do_not_both_begin(network, hosts, first, second):
    """Nobody knows a last generation yet: more than half of the hosts begin, or half of them with the first one."""
    net = network(hosts)
    net.parts = [first, second]
    for host in range(hosts):
        net.start(host)
    net.run(20)
    expected = first if 2 * len(first) == hosts else second
    assert {each.host for each in net.processes if each.phase == "training"} == expected


def test_a_host_without_its_first_process_knows_the_last_generation(network):
    """Host 0 has lost its local rank 0, went on with the other one, and is cut off: it must not begin anew."""
    net = network(2, nproc=2)
    zero, _, two, three = [net.start(host, local_rank) for host in range(2) for local_rank in range(2)]
    net.run(1)
    net.end(zero)
    net.processes.remove(zero)
    net.run(3)
    assert places(two) == [(0, 1), (1, 0), (1, 1)]
    net.parts = [{0}, {1}]
    net.run(10)
    net.start(0, 0), net.start(0, 1)
    net.run(20)
    assert {each.host for each in net.processes if each.phase == "training"} == {1}


def mistreat(network, seed: int) -> None:
    """A dozen faults: cuts, also of single links, and lost processes. Then all heals."""
    rng = random.Random(seed)
    hosts = rng.randint(2, 5)
    net = network(hosts, seed=seed)
    net.begun(hosts)
    for _ in range(12):
        if (chance := rng.random()) < 0.4:
            net.parts = [set() for _ in range(rng.randint(1, 3))]
            [rng.choice(net.parts).add(host) for host in range(hosts)]
        elif chance < 0.5:
            net.parts = None
        elif chance < 0.65:
            net.parts = [{a, b} for a in range(hosts) for b in range(a) if rng.random() < 0.6]
        elif live := [each for each in net.processes if each.phase != "ended"]:
            net.end(rng.choice(live), "ended")
        net.run(rng.choice([0.05, 0.1, 0.2, 0.5, 1, 3, 8]))
    net.parts = None
    net.run(60)
    assert all(each.phase == "training" and len(each.roster.members) == hosts for each in net.processes), seed


@pytest.mark.parametrize("seed", [3, 26, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 120))])
def test_faults_by_chance(network, seed):
    """Never do two generations train at the same time, and where all heals, all train together."""
    mistreat(network, seed)


def member(monkeypatch, tmp_path, host: int, port: int, hosts: int = 3, **more):
    record = {"id": "run", "token": "token", "hosts": [f"127.0.0.{i + 1}" for i in range(hosts)], "host": host,
              "port": port, "at_least": 1, "at_most": hosts, "nproc": 1, **more}
    monkeypatch.setenv(rendezvous.VARIABLE, json.dumps(record))
    return rendezvous.Members.from_environment(str(tmp_path / str(host) / ".members.json"), 1)


def test_three_processes_meet_over_sockets(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.9", 0)) as free:
        port = free.getsockname()[1]
    everyone = [member(monkeypatch, tmp_path, host, port) for host in range(3)]
    found = {}

    def meet(members) -> None:
        found[members.me.host] = members.meet(lambda: False)

    def all_meet(these) -> list:
        threads = [threading.Thread(target=meet, args=[each]) for each in these]
        [each.start() for each in threads]
        [each.join(10) for each in threads]
        for each in these:
            each.begin(found[each.me.host])
        return [found[each.me.host] for each in these]

    first, *others = all_meet(everyone)
    assert [each.host for each in first.members] == [0, 1, 2] and others == [first, first]
    monkeypatch.setattr(contacts, "call", lambda at, *more: None if at[0] == "127.0.0.1" else call(at, *more))
    start = time.monotonic()
    second, other = all_meet(everyone[1:])  # the first host is gone
    assert other == second and second.generation == 2 and [each.host for each in second.members] == [1, 2]
    assert time.monotonic() - start < 1.5 and second.store[0] == "127.0.0.2"


def test_a_meeting_is_left_while_another_process_is_answered(monkeypatch, tmp_path):
    """The main thread leaves it, and so what it has led to, while a thread of the listener reads that."""
    it = member(monkeypatch, tmp_path, 0, 1)
    agreed = roster.Roster(1, (it.me,), ("127.0.0.1", 1), "secret")

    class Left(rendezvous.Meeting):
        next = property(lambda self: reads.pop(), lambda self, value: None)

    it.meeting = Left(it)
    it.meeting.basis = {it.me.key: []}
    reads = [None, agreed]
    assert call(it.me.endpoint, b"token", {"kind": "link", "secret": "secret"}) == {"ok": True}
    reads = [None, agreed]
    meets = {"kind": "meet", "me": dataclasses.asdict(it.me), "knows": []}
    assert call(it.me.endpoint, b"token", meets)["roster"]["secret"] == "secret"


def test_a_port_that_stays_taken_is_one_error_that_names_the_holder(monkeypatch, tmp_path):
    """And one that is free a moment later is none: an earlier run may be just ending."""
    monkeypatch.setattr(contacts, "PORT_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        it = member(monkeypatch, tmp_path, 0, port)
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is taken by process {os.getpid()} .*--port"):
            it.meet(lambda: False)
        it = member(monkeypatch, tmp_path, 0, port)
        assert not it.contacts.opens_port(it.listener)
        with pytest.raises(OSError, match=f"^{port}: Address already in use, by process {os.getpid()} "):
            host_facts.listen(port, 0.3)
        threading.Timer(0.5, other.close).start()
        host_facts.listen(port, 5.0).close()


def test_a_name_that_is_not_found_for_a_moment(monkeypatch):
    """A run goes on: it is looked up again."""
    found, look_up = iter([socket.gaierror, socket.gaierror, None]), host_facts.socket.socket.connect

    class Probe(socket.socket):
        def connect(self, address):
            if error := next(found):
                raise error("Temporary failure in name resolution")
            return look_up(self, ("127.0.0.1", 9))

    monkeypatch.setattr(host_facts.socket, "socket", Probe)
    assert host_facts.interface_towards("node0") == ("lo", "127.0.0.1")


@pytest.mark.parametrize("processes, needed", [([1], []), ([1, 1], ["a"]), ([1, 1, 1], []), ([1, 1, 2], []),
                                               ([2, 1, 1], ["a"]), ([1, 3], ["b"])])
def test_hosts_without_which_the_others_do_not_go_on(processes, needed):
    members = [roster.Member(f"{host}{rank}", "abc".index(host), host, rank, 1, count)
               for host, count in zip("abc", processes) for rank in range(count)]
    assert roster.Roster(1, tuple(members)).needed_hosts() == needed
