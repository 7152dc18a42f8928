"""An authenticated channel to a process: others of its run are answered there, and strangers learn nothing.

Who connects has to know the run's token, and who answers, too: each side answers a challenge of the other one by an
HMAC, as multiprocessing.connection does it, so that the token itself never travels. What is said then is JSON, so
nothing that comes in is ever unpickled. The answers depend on the address and the port of the listener, so who listens
at another one can't pass on to a listener what it is asked itself. And who stands between two processes can't change a
message, repeat it, or send it elsewhere: each carries an HMAC by a key of this connection and direction, over its
number.
"""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from ranks.sockets import set_limit

LIMIT, AT_ONCE = 1 << 20, 256  # bytes of a message; connections that a listener serves at the same time
DIGEST, SIZE = "sha256", 32  # of an HMAC, and its bytes
NO_ANSWER = OSError, EOFError, ValueError, AuthenticationError


def mark(key: bytes, number: int, data: bytes) -> bytes:
    """What precedes message `number` of a connection."""
    return hmac.digest(key, number.to_bytes(8, "big") + data, DIGEST)


class Channel:
    """A connection whose messages are known to be the other end's, each once and in order. `key`: what both ends know.

    The keys of its two directions depend on a number that each end draws, so no other connection has them.
    """

    def __init__(self, connection: Connection, key: bytes, is_client: bool):
        self.connection, self.fileno, self.close = connection, connection.fileno, connection.close
        self.is_kept, own = False, secrets.token_bytes(SIZE)  # `is_kept`: a Listener leaves it open
        connection.send_bytes(own)
        other = connection.recv_bytes(SIZE)
        drawn = own + other if is_client else other + own
        keys = [hmac.digest(key, drawn + end, DIGEST) for end in (b"client", b"listener")]
        self.own, self.others = keys if is_client else reversed(keys)
        self.sent = self.received = 0

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_) -> None:
        if not self.is_kept:
            self.close()

    @property
    def closed(self) -> bool:
        return self.connection.closed

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
    """A connection to a process that knows the token. Each read and write takes `seconds` at most.

    Raises one of NO_ANSWER.
    """
    address, port = (sock.getpeername if is_client else sock.getsockname)()[:2]
    sock.settimeout(None)  # Connection does not know Python's own time-outs
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each message waits 40 ms for the one before
    set_limit(sock, seconds)
    connection, key = Connection(sock.detach()), token + f" {address} {port}".encode()
    try:
        for ask in (answer_challenge, deliver_challenge) if is_client else (deliver_challenge, answer_challenge):
            ask(connection, key)
        return Channel(connection, key, is_client)
    except NO_ANSWER:
        connection.close()
        raise


def connect(address: tuple[str, int], token: bytes, message) -> tuple[Channel, dict]:
    """The connection to a listener, and its answer to the message. Raises one of NO_ANSWER."""
    channel = authenticated(socket.create_connection(address, timeout=1.0), token, True, 1.0)
    try:
        channel.send_bytes(json.dumps(message).encode())
        return channel, json.loads(channel.recv_bytes())
    except NO_ANSWER:
        channel.close()
        raise


def call(address: tuple[str, int], token: bytes, message) -> dict | None:
    """The answer of the process at that address; None where none that knows the token answers in time."""
    with contextlib.suppress(*NO_ANSWER):
        channel, answer = connect(address, token, message)
        channel.close()
        return answer


class Listener:
    """Listens on a port of its own, `port`, and sends back what `answer(message, channel)` returns to each message.

    Then it closes the connection, unless answer() has set channel.is_kept.
    """

    def __init__(self, token: bytes, answer: Callable, address: str):
        self.address = address if address.startswith("127.") else ""  # else a name may stand for 127.0.1.1 here
        self.token, self.answer, self.places = token, answer, threading.BoundedSemaphore(AT_ONCE)
        self.port = self.listen(0)

    def listen(self, port: int) -> int:
        """Also at this port (0: a free one). Returns it. Raises OSError where another process has it."""
        server = socket.create_server((self.address, port), backlog=128)
        threading.Thread(target=self.accept, args=[server], daemon=True).start()
        return server.getsockname()[1]

    def accept(self, server: socket.socket) -> None:
        """For good: where threads or file descriptors are short, and while AT_ONCE are served, the next ones wait."""
        while True:
            self.places.acquire()
            try:
                sock, _ = server.accept()
                threading.Thread(target=self.serve, args=[sock], daemon=True).start()
            except (OSError, RuntimeError):
                self.places.release()
                time.sleep(0.1)

    def serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(*NO_ANSWER), authenticated(sock, self.token, False, 2.0) as channel:
                channel.send_bytes(json.dumps(self.answer(json.loads(channel.recv_bytes()), channel)).encode())
        finally:
            self.places.release()
