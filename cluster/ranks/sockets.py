"""This process's TCP connections, and how soon the system closes one whose other end does not answer."""

import contextlib
import os
import socket
from collections.abc import Iterator

from ranks.lost import PATIENCE


def connections() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP connections: (inode, a socket that is closed after it).

    A file descriptor's number may be another's a moment later, even that of a port at which something listens. So what
    it is, is asked of the same copy with which something is then done.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    is_listening = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if each.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                        yield os.fstat(each.fileno()).st_ino, each


def set_probes(fd: int) -> None:
    """The system asks each second whether the other end is there, and closes the connection after PATIENCE."""
    with socket.socket(fileno=os.dup(fd)) as each:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": PATIENCE - 1}.items():
            each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
