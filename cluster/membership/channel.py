"""An authenticated channel to a process: others of its run are answered there, and strangers learn nothing.

Who connects has to know the run's token, and who answers, too: each side answers a challenge of the other one by an
HMAC, as multiprocessing.connection does it, so that the token itself never travels. What is said then is JSON, so
nothing that comes in is ever unpickled. The answers depend on the address and the port of the listener, so who listens
at another one can't pass on to a listener what it is asked itself.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from ranks.sockets import set_limit

LIMIT, AT_ONCE = 1 << 20, 256  # bytes of a message; connections that a listener serves at the same time
NO_ANSWER = OSError, EOFError, ValueError, AuthenticationError


def authenticated(sock: socket.socket, token: bytes, is_client: bool, seconds: float) -> Connection:
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
    except NO_ANSWER:
        connection.close()
        raise
    return connection


def send(connection: Connection, message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection):
    return json.loads(connection.recv_bytes(LIMIT))


def connect(address: tuple[str, int], token: bytes, message) -> tuple[Connection, dict]:
    """The connection to a listener, and its answer to the message. Raises one of NO_ANSWER."""
    connection = authenticated(socket.create_connection(address, timeout=1.0), token, True, 1.0)
    try:
        send(connection, message)
        return connection, receive(connection)
    except NO_ANSWER:
        connection.close()
        raise


def call(address: tuple[str, int], token: bytes, message) -> dict | None:
    """The answer of the process at that address; None where none that knows the token answers in time."""
    with contextlib.suppress(*NO_ANSWER):
        connection, answer = connect(address, token, message)
        connection.close()
        return answer


class Listener:
    """Listens on a port of its own, `port`, and sends back what `answer(message, connection)` returns to each message.

    Then it closes the connection, unless answer() has copied it.
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
            with contextlib.suppress(*NO_ANSWER), authenticated(sock, self.token, False, 2.0) as connection:
                send(connection, self.answer(receive(connection), connection))
        finally:
            self.places.release()
