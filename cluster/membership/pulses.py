"""A run that is asked to stop, or that loses some of its processes.

SIGTERM and Ctrl-C only leave a note: all ranks finish the step that they are in, save a checkpoint and end. Whoever
started them has to wait for that. launch_cluster.sh is told how long a step takes; torchrun waits for as long as a
variable said when it started, so that a run prints its name where steps take too long for it.

In an elastic run (launch_cluster.sh --elastic) each process keeps a connection to each other one's door, over which
nothing travels. When a process ends, or leaves its generation, the system closes its connections; when a cable is cut,
the system's own probes get no answer for PATIENCE seconds. Either ends the generation for all: what the main thread
waits for will not come, in whichever receive it may be blocked. Neither destroying nor aborting a group of gloo's from
another thread ends such a wait, but shutting down the group's sockets does. A board that swaps is slow, and not lost:
its system answers the probes.
"""

import contextlib
import multiprocessing.connection
import os
import socket
import threading
import time

import torch.distributed as dist

from membership.door import NO_ANSWER, knock
from membership.meeting import Members
from ranks.lost import Lost
from ranks.sockets import connections, set_probes

BEAT = 0.5  # seconds
JOINING = 5.0  # seconds in which the members of a generation reach each other


class Pulses:
    """This process's connections to the doors of all other members of `members.next`. Raises Lost where one is gone.

    From then on a thread watches them. When one closes, `reason` says whose, and the sockets of all groups are shut
    down, again and again until close(). `before`: the sockets that are none of theirs.
    """

    def __init__(self, members: Members):
        self.reason, self.noticed, self.ended, self.members = None, threading.Event(), threading.Event(), members
        self.before, self.links = {inode for inode, _ in connections()}, {}
        self.thread = threading.Thread(target=self.run, daemon=True)
        deadline, roster = time.monotonic() + JOINING, members.next
        message = {"kind": "pulse", "secret": roster.secret, "rank": roster.members.index(members.me)}
        try:
            for member in roster.members:
                while member != members.me and member not in self.links.values():
                    link, answer = knock(member.door, members.token, message)
                    if answer["ok"]:
                        self.links[link] = member
                        set_probes(link.fileno())
                        continue
                    link.close()
                    if time.monotonic() > deadline:
                        raise Lost(f"{member.address} has not joined")
                    time.sleep(0.02)
        except (Lost, *NO_ANSWER) as error:
            if not isinstance(error, Lost):
                members.not_reached.setdefault(member.key, []).append(time.monotonic())
            self.close()
            raise error if isinstance(error, Lost) else Lost(f"{member.address} is lost ({error!r})") from None
        self.thread.start()

    def run(self) -> None:
        while self.reason is None and not self.ended.is_set():
            ready = multiprocessing.connection.wait([*self.links], BEAT)
            if ready and not self.ended.is_set():
                self.reason = f"{self.links[ready[0]].address} {how_it_ended(ready[0])}"
                self.noticed.set()
        while not self.ended.is_set():
            self.shut()
            self.ended.wait(BEAT / 5)

    def shut(self) -> None:
        """Ends what waits in a group of this generation."""
        keep = {os.fstat(link.fileno()).st_ino for link in [*self.links, *self.members.kept] if not link.closed}
        for inode, each in connections():
            if inode not in self.before and inode not in keep:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized() and dist.get_backend() == "nccl":  # by torch's documentation; never run
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """This process leaves the generation; the others hear of it."""
        self.ended.set()
        for link in self.members.kept:
            with contextlib.suppress(OSError):
                link.send_bytes(b"left")
        if self.thread.is_alive():  # it must not read what another connection gets under the same number
            for link in self.links:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as each:
                    each.shutdown(socket.SHUT_RDWR)
            self.thread.join()
        for link in [*self.members.kept, *self.links]:
            link.close()
        self.members.kept.clear()


def how_it_ended(link) -> str:
    """What is to be said of the member at the other end of a connection that can be read."""
    with contextlib.suppress(*NO_ANSWER):
        return "has lost another process" if link.recv_bytes() == b"left" else "is lost"
    return "is lost"
