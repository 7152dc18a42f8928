"""The door of a process: where the other processes of its run find it, and strangers find nothing.

Who knocks has to know the run's token, and who answers, too: each side answers a challenge of the other one by an HMAC,
as multiprocessing.connection does it, so that the token itself never travels. What is said then is JSON, so nothing
that comes in at a door is ever unpickled. The answers depend on the address and the port of the door, so who listens
at another one can't pass on to a door what it is asked itself.
"""

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from ranks.sockets import set_limit

LIMIT = 1 << 20  # bytes of a message
GUESTS = 64  # connections that are served at once
NO_ANSWER = OSError, EOFError, ValueError, AuthenticationError


def trusted(sock: socket.socket, token: bytes, is_guest: bool, seconds: float | None) -> Connection:
    """A connection to a process that knows the token. Each read and write takes `seconds` at most (None: no limit).

    Raises one of NO_ANSWER.
    """
    address, port = (sock.getpeername if is_guest else sock.getsockname)()[:2]
    connection, key = Connection(os_handle(sock, seconds)), token + f" {address} {port}".encode()
    try:
        for ask in (answer_challenge, deliver_challenge) if is_guest else (deliver_challenge, answer_challenge):
            ask(connection, key)
    except NO_ANSWER:
        connection.close()
        raise
    return connection


def os_handle(sock: socket.socket, seconds: float | None) -> int:
    """The socket's file descriptor, without Python's own time-outs, which Connection does not know."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each message waits 40 ms for the one before
    set_limit(sock, seconds)
    return sock.detach()


def send(connection: Connection, message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection):
    return json.loads(connection.recv_bytes(LIMIT))


def knock(address: tuple[str, int], token: bytes, message, seconds: float = 1.0) -> tuple[Connection, dict]:
    """The connection to a door, and its answer to the message. Raises one of NO_ANSWER."""
    connection = trusted(socket.create_connection(address, timeout=seconds), token, True, seconds)
    try:
        send(connection, message)
        return connection, receive(connection)
    except NO_ANSWER:
        connection.close()
        raise


def call(address: tuple[str, int], token: bytes, message, seconds: float = 1.0) -> dict | None:
    """The answer of the process at that address; None where none that knows the token answers in time."""
    try:
        connection, answer = knock(address, token, message, seconds)
    except NO_ANSWER:
        return None
    connection.close()
    return answer


class Door:
    """Listens on a port of its own, `port`, and answers each message by `answer(message, connection)`.

    It returns what is sent back, and whether the connection stays open because it was kept.
    """

    def __init__(self, token: bytes, answer: Callable, address: str):
        self.address = address if address.startswith("127.") else ""  # else a name may stand for 127.0.1.1 here
        self.token, self.answer, self.selector = token, answer, selectors.DefaultSelector()
        self.guests = threading.BoundedSemaphore(GUESTS)
        self.port = self.listen(0)
        threading.Thread(target=self.run, daemon=True).start()

    def listen(self, port: int) -> int:
        """Also at this port (0: a free one). Returns it. Raises OSError where another process has it."""
        listener = socket.create_server((self.address, port), backlog=128)
        self.selector.register(listener, selectors.EVENT_READ)
        return listener.getsockname()[1]

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select(1.0):  # a port that was added meanwhile is waited for from the next look
                with contextlib.suppress(OSError):
                    sock, _ = key.fileobj.accept()
                    if self.guests.acquire(blocking=False):
                        threading.Thread(target=self.serve, args=[sock], daemon=True).start()
                    else:
                        sock.close()

    def serve(self, sock: socket.socket) -> None:
        kept = False
        try:
            connection = trusted(sock, self.token, False, 2.0)
            try:
                answer, kept = self.answer(receive(connection), connection)
                send(connection, answer)
            finally:
                if not kept:
                    connection.close()
        except NO_ANSWER:
            pass
        finally:
            self.guests.release()
