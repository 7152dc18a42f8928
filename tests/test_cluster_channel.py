"""The channel to a process of an elastic run: who knows the run's token is answered, and strangers learn nothing."""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest
import torch
from lab.launch import modules_of

with modules_of(9):
    from membership import channel
    from membership.channel import NO_ANSWER, Channel, Listener, authenticated, call

TOKEN = b"of the run"


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def listener():
    heard = []

    def answer(message, connection):
        heard.append(message)
        return {"heard": message["kind"]}

    made = Listener(TOKEN, answer, "127.0.0.1")
    made.heard, made.at = heard, ("127.0.0.1", made.port)
    return made


def stranger(listener) -> Connection:
    return Connection(socket.create_connection(listener.at).detach())


def closes(connection) -> bool:
    """Whether the other end closes it, whatever it says before."""
    try:
        while True:
            connection.recv_bytes()
    except (EOFError, OSError):
        return True


def test_torchs_store_listens_on_all_addresses():
    """As CHECKPOINTS.md says of it: one address is not enough, a firewall has to close the others."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()


def test_nothing_of_a_stranger_is_unpickled(listener, tmp_path):
    """Neither instead of the challenge's answer, nor before it, nor after one by a wrong token, nor as a message."""
    harm, path = pickle.dumps(Harmful(tmp_path / "harm")), tmp_path / "harm"
    instead = stranger(listener)
    instead.recv_bytes()
    instead.send_bytes(harm)
    before = stranger(listener)
    before.send_bytes(harm)
    for each in instead, before:
        assert closes(each)
    wrong = stranger(listener)
    with pytest.raises(NO_ANSWER):
        answer_challenge(wrong, b"another token")
    wrong.send_bytes(harm)
    assert closes(wrong) and not listener.heard
    own, key = stranger(listener), TOKEN + b" %s %d" % (listener.at[0].encode(), listener.port)  # one that knows it
    answer_challenge(own, key)
    deliver_challenge(own, key)
    own.send_bytes(harm)
    assert closes(own) and not path.exists() and not listener.heard
    assert pickle.loads(harm) is None and path.exists()  # it would have been seen
    assert call(listener.at, TOKEN, {"kind": "who"})


def test_a_client_does_not_speak_before_the_listener_has_shown_the_token():
    """A stranger that listens at a process's port hears nothing, and gets no answer of its own unpickled."""
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


def test_what_another_passes_on_is_not_answered(listener):
    """Somebody in the place of a listener can't use a real one to answer its challenge. The token never travels."""
    bytes_seen = []

    def pass_on(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                bytes_seen.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as between:
        def serve():
            guest = between.accept()[0]
            with guest, socket.create_connection(listener.at) as inner:
                threads = [threading.Thread(target=pass_on, args=pair) for pair in ((guest, inner), (inner, guest))]
                [each.start() for each in threads]
                [each.join() for each in threads]

        thread = threading.Thread(target=serve)
        thread.start()
        assert call(between.getsockname(), TOKEN, {"kind": "who"}) is None
        thread.join()
    seen = b"".join(bytes_seen)
    assert b"#CHALLENGE#" in seen and b'"who"' not in seen and TOKEN not in seen


@pytest.mark.parametrize("message", [b"no JSON", b"\xff\xfe", b'{"kind": ', None])
def test_a_message_that_says_nothing_or_is_too_long(listener, message):
    """A listener whose thread ended by it would still be there, and so would its place among the clients."""
    connection = authenticated(socket.create_connection(listener.at), TOKEN, True, 2.0)
    if message:
        connection.send_bytes(message)
    else:
        os.write(connection.fileno(), struct.pack("!i", channel.LIMIT + 1))
    assert closes(connection) and call(listener.at, TOKEN, {"kind": "who"}) == {"heard": "who"}


def test_silent_strangers_block_nobody(listener):
    silent, start = [socket.create_connection(listener.at) for _ in range(100)], time.monotonic()
    assert call(listener.at, TOKEN, {"kind": "who"}) and time.monotonic() - start < 1
    [each.close() for each in silent]


def trickle(sock: socket.socket, seconds: float = 30) -> float:
    """Sends a byte now and then, as of one long message, until the other end closes it. After how many seconds."""
    start = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() < start + seconds:
            sock.sendall(b"x")
            time.sleep(0.05)
    return time.monotonic() - start


@pytest.mark.parametrize("knows_the_token", [False, True])
def test_a_handshake_and_its_message_have_one_deadline(listener, monkeypatch, knows_the_token):
    """Each byte comes soon after the one before, and the message never ends."""
    monkeypatch.setattr(channel, "ALL", 0.4)
    sock = socket.create_connection(listener.at)
    if knows_the_token:
        authenticated(sock, TOKEN, True, 2.0)
    sock.settimeout(None)
    sock.sendall(struct.pack("!i", 250))
    assert 0.2 < trickle(sock) < 2


def test_a_call_has_a_deadline(monkeypatch):
    """Who listens in a process's place may be as slow as who calls."""
    monkeypatch.setattr(channel, "ALL", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        def be_slow():
            sock, _ = server.accept()
            sock.sendall(struct.pack("!i", 250))
            trickle(sock)

        threading.Thread(target=be_slow, daemon=True).start()
        start = time.monotonic()
        assert call(server.getsockname(), TOKEN, {"kind": "who"}) is None and time.monotonic() - start < 2


def test_who_has_the_token_is_answered_while_strangers_hold_all_places(listener, monkeypatch):
    """Also from their own address: the oldest of them gives way. Their number stays what it may be."""
    monkeypatch.setattr(channel, "AT_ONCE", 8)
    strangers = [socket.create_connection(listener.at) for _ in range(30)]
    for _ in range(10):
        assert call(listener.at, TOKEN, {"kind": "who"})
        strangers.append(socket.create_connection(listener.at))
    assert len(listener.strangers) <= 8
    [each.close() for each in strangers]


def test_strangers_take_no_place_of_another_address(listener, monkeypatch):
    """A slow host finishes its handshake, whatever comes from elsewhere meanwhile."""
    monkeypatch.setattr(channel, "AT_ONCE", 8)
    slow = stranger(listener)
    others = [socket.create_connection(listener.at, source_address=("127.0.0.2", 0)) for _ in range(50)]
    assert call(listener.at, TOKEN, {"kind": "who"})  # all of them have been accepted
    key = TOKEN + b" %s %d" % (listener.at[0].encode(), listener.port)
    answer_challenge(slow, key)
    deliver_challenge(slow, key)
    [each.close() for each in others]


def test_who_has_shown_the_token_makes_way_for_nobody(listener, monkeypatch):
    monkeypatch.setattr(channel, "AT_ONCE", 4)
    own = [authenticated(socket.create_connection(listener.at), TOKEN, True, 2.0) for _ in range(6)]
    strangers = [socket.create_connection(listener.at) for _ in range(20)]
    for each in own:
        each.send_bytes(b'{"kind": "who"}')
        assert each.recv_bytes() == b'{"heard": "who"}'
    [each.close() for each in strangers]


@pytest.mark.parametrize("length", [struct.pack("!i", (1 << 31) - 1), struct.pack("!iQ", -1, 1 << 62),
                                    struct.pack("!i", -2), struct.pack("!i", 0), b"GET / HTTP/1.1\r\n\r\n"])
def test_a_length_that_is_none(listener, length):
    sock = socket.create_connection(listener.at)
    sock.sendall(length)
    assert closes(Connection(sock.detach())) and call(listener.at, TOKEN, {"kind": "who"})


def test_a_program_that_answers_without_a_challenge():
    """Whoever has the port of a process that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def greet():
            Connection(server.accept()[0].detach()).send_bytes(b"220 mail ESMTP")

        threading.Thread(target=greet, daemon=True).start()
        assert call(server.getsockname(), TOKEN, {"kind": "who"}) is None


def test_where_descriptors_are_short_a_stranger_gives_one_back(listener):
    sock = socket.create_connection(listener.at)
    assert call(listener.at, TOKEN, {"kind": "who"}) and len(listener.strangers) == 1

    class Server:
        comes = iter([OSError(24, "Too many open files"), SystemExit()])

        def accept(self):
            raise next(self.comes)

    with pytest.raises(SystemExit):
        listener.accept(Server())
    assert closes(Connection(sock.detach())) and not listener.strangers


def test_a_listener_outlives_a_machine_without_threads(listener, monkeypatch):
    """Whoever comes then is not answered, and the next one is."""
    with monkeypatch.context() as patch:
        def none_left(*_args, **_kwargs):
            raise RuntimeError("can't start new thread")

        patch.setattr(channel.threading, "Thread", none_left)
        assert call(listener.at, TOKEN, {"kind": "a"}) is None
    assert call(listener.at, TOKEN, {"kind": "b"}) == {"heard": "b"}


def ends():
    """The two ends of a connection, both of which know the key: (the client's, the listener's)."""
    pair = [Connection(each.detach()) for each in socket.socketpair()]
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda end: Channel(end[1], b"key", end[0] == 0), enumerate(pair))]


@pytest.mark.parametrize("what", ["a bit", "twice", "out of order", "sent back", "of another connection"])
def test_what_was_done_to_a_message_on_the_way(what):
    """Who stands in between may pass on what they say, each message once and in order. Else that connection ends."""
    client, listener = ends()
    client.send_bytes(b"first"), client.send_bytes(b"second")
    first, second = (listener.connection.recv_bytes() for _ in range(2))
    passed_on = {"a bit": [first[:-1] + bytes([first[-1] ^ 1])], "twice": [first, first], "out of order": [second]}
    others = {"sent back": (listener, client), "of another connection": ends()}
    sender, receiver = others.get(what, (client, listener))
    for message in passed_on.get(what, [first]):
        sender.connection.send_bytes(message)
    if what == "twice":
        assert receiver.recv_bytes() == b"first"
    with pytest.raises(AuthenticationError, match="was changed, repeated or moved on the way"):
        receiver.recv_bytes()
    assert receiver.closed
