"""An authenticated channel to a process: others of its run are answered there, and strangers learn nothing.

Who connects has to know the run's token, and who answers, too: each side answers a challenge of the other one by an
HMAC, as multiprocessing.connection does it, so that the token itself never travels. What is said then is JSON, so
nothing that comes in is ever unpickled. The answers depend on the address and the port of the listener, so who listens
at another one can't pass on to a listener what it is asked itself. And who stands between two processes can't change a
message, repeat it, or send it elsewhere: each carries an HMAC by a key of this connection and direction, over its
number.

A stranger can hold a connection open and say nothing, or a byte a second. So all that is said has one deadline, and
where many connections have not shown the token yet, a new one takes the place of an old one. Who has shown it needs no
place.
"""

import collections
import contextlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge

LIMIT, AT_ONCE = 1 << 20, 256  # bytes of a message; connections of a listener that have not shown the token yet
ALL = 5.0  # seconds from the connection to the answer: five reads of a slow host's, each a second late
DIGEST, SIZE = "sha256", 32  # of an HMAC, and its bytes
NO_ANSWER = OSError, EOFError, ValueError, AuthenticationError


def mark(key: bytes, number: int, data: bytes) -> bytes:
    """What precedes message `number` of a connection."""
    return hmac.digest(key, number.to_bytes(8, "big") + data, DIGEST)


class Wire:
    """Messages over a socket, each behind its length: of one `each` seconds at most pass without a byte, and all are
    said before `deadline`. It is what answer_challenge() and deliver_challenge() take for a Connection, which has no
    deadline."""

    def __init__(self, sock: socket.socket, each: float):
        self.sock, self.each, self.deadline = sock, each, time.monotonic() + ALL
        self.fileno, self.close = sock.fileno, sock.close

    @property
    def closed(self) -> bool:
        return self.fileno() < 0

    def wait_for(self, do: Callable, what):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the other end took longer than {ALL:g} s")
        self.sock.settimeout(min(self.each, left))
        return do(what)

    def send_bytes(self, data: bytes) -> None:
        self.wait_for(self.sock.sendall, struct.pack("!i", len(data)) + data)

    def recv_bytes(self, most: int = LIMIT) -> bytes:
        size, = struct.unpack("!i", self.read(4))
        if not 0 <= size <= most:
            raise OSError(f"a message of {size} bytes, where {most} are the most")
        return self.read(size)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.wait_for(self.sock.recv, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class Channel:
    """A connection whose messages are known to be the other end's, each once and in order. `key`: what both ends know.

    The keys of its two directions depend on a number that each end draws, so no other connection has them.
    """

    def __init__(self, connection: Wire, key: bytes, is_client: bool):
        self.connection, self.fileno, self.close = connection, connection.fileno, connection.close
        self.is_kept, own = False, secrets.token_bytes(SIZE)
        connection.send_bytes(own)
        other = connection.recv_bytes(SIZE)
        drawn = own + other if is_client else other + own
        keys = [hmac.digest(key, drawn + end, DIGEST) for end in (b"client", b"listener")]
        self.own, self.others = keys if is_client else reversed(keys)
        self.sent = self.received = 0

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def keep(self) -> None:
        """It stays open after the answer, for as long as both ends want."""
        self.is_kept, self.connection.deadline = True, math.inf

    def send_bytes(self, data: bytes) -> None:
        self.connection.send_bytes(mark(self.own, self.sent, data) + data)
        self.sent += 1

    def recv_bytes(self) -> bytes:
        """Raises AuthenticationError, and closes the connection, for what is not the next message of the other end."""
        message = self.connection.recv_bytes(LIMIT)
        data = message[SIZE:]
        if not hmac.compare_digest(message[:SIZE], mark(self.others, self.received, data)):
            self.close()
            raise AuthenticationError(f"message {self.received} was changed, repeated or moved on the way")
        self.received += 1
        return data


def authenticated(sock: socket.socket, token: bytes, is_client: bool, seconds: float) -> Channel:
    """A connection to a process that knows the token. Each read and write takes `seconds` at most, all of them ALL.

    Raises one of NO_ANSWER; the socket is the caller's to close.
    """
    address, port = (sock.getpeername if is_client else sock.getsockname)()[:2]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each message waits 40 ms for the one before
    connection, key = Wire(sock, seconds), token + f" {address} {port}".encode()
    try:
        for ask in (answer_challenge, deliver_challenge) if is_client else (deliver_challenge, answer_challenge):
            ask(connection, key)
    except AssertionError as error:  # of Python 3.10 and 3.11, where the other end sends no challenge
        raise AuthenticationError(str(error)) from None
    return Channel(connection, key, is_client)


def connect(address: tuple[str, int], token: bytes, message) -> tuple[Channel, dict]:
    """The connection to a listener, and its answer to the message. Raises one of NO_ANSWER."""
    sock = socket.create_connection(address, timeout=1.0)
    try:
        channel = authenticated(sock, token, True, 1.0)
        channel.send_bytes(json.dumps(message).encode())
        return channel, json.loads(channel.recv_bytes())
    except NO_ANSWER:
        sock.close()
        raise


def call(address: tuple[str, int], token: bytes, message) -> dict | None:
    """The answer of the process at that address; None where none that knows the token answers in time."""
    with contextlib.suppress(*NO_ANSWER):
        channel, answer = connect(address, token, message)
        channel.close()
        return answer


class Listener:
    """Listens on a port of its own, `port`, and sends back what `answer(message, channel)` returns to each message.

    Then it closes the connection, unless answer() has called channel.keep(). `strangers`: the sockets of those who have
    not shown the token yet, the oldest first, and their addresses.
    """

    def __init__(self, token: bytes, answer: Callable, address: str):
        self.address = address if address.startswith("127.") else ""  # else a name may stand for 127.0.1.1 here
        self.token, self.answer, self.strangers, self.lock = token, answer, {}, threading.Lock()
        self.port = self.listen(0)

    def listen(self, port: int) -> int:
        """Also at this port (0: a free one). Returns it. Raises OSError where another process has it."""
        server = socket.create_server((self.address, port), backlog=128)
        threading.Thread(target=self.accept, args=[server], daemon=True).start()
        return server.getsockname()[1]

    def accept(self, server: socket.socket) -> None:
        """For good. Where threads or descriptors are short, a stranger gives them back, else the next ones wait."""
        while True:
            sock = None
            try:
                sock, (address, *_) = server.accept()
                with self.lock:
                    self.strangers[sock] = address
                if len(self.strangers) > AT_ONCE:
                    self.send_away()
                threading.Thread(target=self.serve, args=[sock], daemon=True).start()
            except (OSError, RuntimeError):
                if sock:
                    self.forget(sock)
                    sock.close()
                self.send_away()
                time.sleep(0.1)  # until its thread has closed it: else all would be sent away

    def send_away(self) -> bool:
        """The oldest stranger of the address that has most of them. Whether there was one."""
        with self.lock:
            counts = collections.Counter(self.strangers.values()).most_common(1)
            for sock in [sock for sock, address in self.strangers.items() if address == counts[0][0]][:1]:
                del self.strangers[sock]
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # its thread, which waits for a message, closes it
        return bool(counts)

    def forget(self, sock: socket.socket) -> None:
        with self.lock:
            self.strangers.pop(sock, None)

    def serve(self, sock: socket.socket) -> None:
        channel = None
        try:
            with contextlib.suppress(*NO_ANSWER):
                channel = authenticated(sock, self.token, False, 2.0)
                self.forget(sock)
                channel.send_bytes(json.dumps(self.answer(json.loads(channel.recv_bytes()), channel)).encode())
        finally:
            self.forget(sock)
            if not (channel and channel.is_kept):
                sock.close()
