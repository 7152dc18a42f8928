"""Who takes part in an elastic run: doors that strangers find shut, and meetings of which only one half goes on."""

import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest
from launch import modules_of

with modules_of(9):
    from made_up_network import Network
    from membership import door as doors, meeting
    from membership.door import NO_ANSWER, Door, call, knock
    from utils import UserError

TOKEN = b"of the run"


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def door():
    heard = []

    def answer(message, connection):
        heard.append(message)
        return {"heard": message["kind"]}, False

    made = Door(TOKEN, answer, "127.0.0.1")
    made.heard, made.at = heard, ("127.0.0.1", made.port)
    return made


def stranger(door) -> Connection:
    return Connection(socket.create_connection(door.at).detach())


def closes(connection) -> bool:
    """Whether the other end closes it, whatever it says before."""
    try:
        while True:
            connection.recv_bytes()
    except (EOFError, OSError):
        return True


def test_who_knows_the_token_is_answered(door):
    assert call(door.at, TOKEN, {"kind": "who"}) == {"heard": "who"} and door.heard == [{"kind": "who"}]


def test_nothing_of_a_stranger_is_unpickled(door, tmp_path):
    """Neither instead of the challenge's answer, nor before it, nor after one by a wrong token, nor as a message."""
    harm, path = pickle.dumps(Harmful(tmp_path / "harm")), tmp_path / "harm"
    instead = stranger(door)
    instead.recv_bytes()
    instead.send_bytes(harm)
    before = stranger(door)
    before.send_bytes(harm)
    for each in instead, before:
        assert closes(each)
    wrong = stranger(door)
    with pytest.raises(NO_ANSWER):
        answer_challenge(wrong, b"another token")
    wrong.send_bytes(harm)
    assert closes(wrong) and not door.heard
    own = stranger(door)  # even one that knows the token
    answer_challenge(own, TOKEN)
    deliver_challenge(own, TOKEN)
    own.send_bytes(harm)
    assert closes(own) and not path.exists() and not door.heard
    assert pickle.loads(harm) is None and path.exists()  # it would have been seen
    assert call(door.at, TOKEN, {"kind": "who"})


def test_a_guest_does_not_speak_before_the_door_has_shown_the_token():
    """A stranger that listens where a door was hears nothing, and gets no answer of its own unpickled."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        def be_a_stranger():
            connection = Connection(server.accept()[0].detach())
            connection.send_bytes(b"#CHALLENGE#" + b"{sha256}" + b"x" * 40)
            heard.append(connection.recv_bytes())
            connection.send_bytes(b"#WELCOME#")
            heard.append(connection.recv_bytes())
            connection.send_bytes(b"what it should be")
            with pytest.raises(EOFError):
                while True:
                    heard.append(connection.recv_bytes())

        thread = threading.Thread(target=be_a_stranger)
        thread.start()
        assert call(server.getsockname(), TOKEN, {"kind": "meet", "me": "a secret"}) is None
        thread.join()
    assert not any(b"a secret" in each or TOKEN in each for each in heard)


def test_the_token_never_travels(door):
    """All bytes of a visit in both directions, recorded on the way."""
    bytes_seen = []

    def pass_on(source, target):
        while data := source.recv(65536):
            bytes_seen.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as between:
        def serve():
            guest = between.accept()[0]
            with guest, socket.create_connection(door.at) as inner:
                threads = [threading.Thread(target=pass_on, args=pair) for pair in ((guest, inner), (inner, guest))]
                [each.start() for each in threads]
                [each.join() for each in threads]

        thread = threading.Thread(target=serve)
        thread.start()
        assert call(between.getsockname(), TOKEN, {"kind": "who"}) == {"heard": "who"}
        thread.join()
    assert b'{"kind": "who"}' in b"".join(bytes_seen) and TOKEN not in b"".join(bytes_seen)


@pytest.mark.parametrize("message", [b"no JSON", b"\xff\xfe", b'{"kind": '])
def test_a_message_that_says_nothing(door, message):
    """A door whose thread ended by it would still be there, and so would its place among the guests."""
    connection = doors.trusted(socket.create_connection(door.at), TOKEN, True, 2.0)
    connection.send_bytes(message)
    assert closes(connection) and call(door.at, TOKEN, {"kind": "who"})


def test_a_message_that_is_too_long(door):
    connection = doors.trusted(socket.create_connection(door.at), TOKEN, True, 2.0)
    os.write(connection.fileno(), struct.pack("!i", doors.LIMIT + 1))
    assert closes(connection) and call(door.at, TOKEN, {"kind": "who"})


def test_silent_strangers_block_nobody(monkeypatch):
    """Each has a thread of its own, for two seconds; who comes when all places are taken is sent away at once."""
    monkeypatch.setattr(doors, "GUESTS", 4)
    made = Door(TOKEN, lambda message, connection: ({}, False), "127.0.0.1")
    at, start = ("127.0.0.1", made.port), time.monotonic()
    silent = [socket.create_connection(at) for _ in range(3)]
    assert call(at, TOKEN, {}) == {} and time.monotonic() - start < 1
    silent += [socket.create_connection(at) for _ in range(3)]
    time.sleep(0.2)
    assert call(at, TOKEN, {}) is None
    while call(at, TOKEN, {}) is None:
        assert time.monotonic() < start + 5
        time.sleep(0.1)
    [each.close() for each in silent]


def test_a_connection_that_is_kept():
    kept = []
    made = Door(TOKEN, lambda message, connection: (kept.append(connection) or {}, True), "127.0.0.1")
    connection, answer = knock(("127.0.0.1", made.port), TOKEN, {})
    kept[0].send_bytes(b"later")
    assert answer == {} and connection.recv_bytes() == b"later"


# Meetings, in a network and a time that are made up.


@pytest.fixture
def network(monkeypatch, tmp_path):
    return lambda hosts, **options: Network(monkeypatch, tmp_path, hosts, **options)


def places(process) -> list[tuple[int, int]]:
    return [(member.host, member.local_rank) for member in process.roster.members]


def test_the_first_meeting_waits_for_all_hosts(network):
    net = network(3, nproc=2)
    processes = [net.start(host, local_rank) for host, local_rank in ((2, 1), (0, 1), (1, 0), (2, 0), (0, 0))]
    net.run(meeting.SETTLED - 0.5)
    assert all(each.phase == "meeting" for each in processes)
    processes.append(net.start(1, 1))
    net.run(1)
    assert all(each.phase == "training" for each in processes)
    assert places(processes[0]) == [(host, local_rank) for host in range(3) for local_rank in range(2)]


def test_a_host_that_is_not_switched_on_is_not_waited_for(network):
    net = network(3)
    processes = [net.start(0), net.start(2)]
    net.run(meeting.SETTLED - 0.5)
    assert all(each.phase == "meeting" for each in processes)
    net.run(2)
    assert all(each.phase == "training" and places(each) == [(0, 0), (2, 0)] for each in processes)


@pytest.mark.parametrize("options, missing, text", [(dict(at_least=3), 1, "at least 3"), (dict(multiple=2), 1, "a multiple of 2"),
                                                    (dict(multiple=2), 2, None)])
def test_too_few_hosts_or_processes_to_begin(network, capsys, options, missing, text):
    net = network(4 if missing == 2 else 3, **options)
    for host in range(len(net.record["hosts"]) - missing):
        net.start(host)
    if text and "multiple" in text:
        net.start(net.record["hosts"].index("127.0.0.3"))
    net.run(10)
    said = [line for line in capsys.readouterr().out.splitlines() if "waiting for others" in line]
    assert bool(net.trained) == (text is None) and len({*said}) <= 2 and (text is None or text in said[-1])


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
    """It still computes, and its door answers."""
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


@pytest.mark.parametrize("seed", range(20))
def test_halves(network, seed):
    """Of each cut at most one part goes on: the one with more than half, or with half and the first. And all heal."""
    rng = random.Random(seed)
    hosts, parts = rng.randint(2, 7), [set(), set(), set()][: rng.randint(2, 3)]
    net = network(hosts, seed=seed)
    first = net.begun(hosts)
    for host in range(hosts):
        rng.choice(parts).add(host)
    net.parts = parts
    goes_on = [part for part in parts if 2 * len(part) > hosts or 2 * len(part) == hosts and 0 in part]
    net.run(20)
    assert [{host for host, _ in places(each)} for each in net.processes if each.phase == "training"] == [
        part for part in goes_on for _ in part] and len(net.trained) == 1 + (len(goes_on) if goes_on != [{*range(hosts)}] else 0)
    ended = {each.host for each in first if each.phase == "ended"}
    assert ended == {*range(hosts)} - set().union(*goes_on)  # each of them heard that it is too few
    net.parts = None
    net.run(20)
    assert all(each.phase == "training" and len(each.roster.members) == hosts for each in net.processes)


def test_a_minority_that_starts_anew_knows_that_it_is_one(network, monkeypatch, tmp_path):
    """From its disk. The file of another run says nothing."""
    net = network(3)
    for process in net.begun(3):
        net.end(process)
    net.processes.clear()
    net.parts = [{0}, {1, 2}]
    alone = net.start(0)
    net.run(10)
    assert alone.phase == "meeting" and alone.members.roster.generation == 1
    net.start(1), net.start(2)
    net.run(10)
    assert alone.phase == "meeting" and {host for host, _ in places(net.processes[-1])} == {1, 2}
    other = network(3, run_id="another run")
    alone = other.start(0)
    other.run(10)
    assert alone.phase == "training"


def test_half_of_a_generation_that_one_rank_has_not_seen_begin(network):
    """Rank 0 goes on alone, as the first of two. The other one of the two has agreed, and can't know it."""
    net = network(3)
    zero, one, two = net.begun(3)
    net.parts = [{0, 1}, {2}]
    zero.is_complete = False
    for _ in range(200):
        net.run(0.05)
        if zero.roster and len(zero.roster.members) == 2 and zero.phase == "training" and one.phase == "joining":
            break
        assert one.phase != "training" or len(one.roster.members) == 3 or pytest.skip("both have begun")
    net.parts = [{0}, {1, 2}]
    net.run(15)
    assert zero.phase == "training" and places(zero) == [(0, 0)]
    assert not any(each.phase == "training" for each in net.processes if each.host)


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


@pytest.mark.parametrize("seed", [3, 26, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 160))])
def test_faults_by_chance(network, seed):
    """Never do two generations train at the same time, and where all heals, all train together."""
    mistreat(network, seed)


def member(monkeypatch, tmp_path, host: int, port: int, hosts: int = 3, **more):
    record = {"id": "run", "token": "token", "hosts": [f"127.0.0.{i + 1}" for i in range(hosts)], "host": host,
              "port": port, "at_least": 1, "nproc": 1, **more}
    monkeypatch.setenv(meeting.VARIABLE, json.dumps(record))
    return meeting.Members.from_environment(str(tmp_path / str(host) / ".members.json"), 1)


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
    monkeypatch.setattr(meeting, "call", lambda at, *more: None if at[0] == "127.0.0.1" else call(at, *more))
    start = time.monotonic()
    second, other = all_meet(everyone[1:])  # the first host is gone
    assert other == second and second.generation == 2 and [each.host for each in second.members] == [1, 2]
    assert time.monotonic() - start < 1.5 and second.store[0] == "127.0.0.2"


def test_a_port_that_is_taken_is_one_error(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        it = member(monkeypatch, tmp_path, 0, other.getsockname()[1])
        with pytest.raises(UserError, match="port [0-9]+ of 127.0.0.1 is taken by another .*--port"):
            it.meet(lambda: False)
