"""How the processes of an elastic run notice that one of them is gone (launch_cluster.sh --elastic).

Each process keeps a connection to each other one, over which nothing travels. When a process ends, or leaves its
generation, the system closes its connections; when a cable is cut, the system's own probes get no answer for PATIENCE
seconds. Either ends the generation for all: what the main thread waits for will not come, in whichever receive it may
be blocked. Neither destroying nor aborting a group of gloo's from another thread ends such a wait, but shutting down
the group's sockets does. A board that swaps is slow, and not lost: its system answers the probes.
"""

import contextlib
import multiprocessing.connection
import os
import socket
import threading
import time

import torch.distributed as dist

import process_group_manager as pgm
from hosts import exits
from membership.channel import NO_ANSWER, AuthenticationError, Channel, connect
from membership.rendezvous import Members
from membership.roster import Member
from ranks.lost import MembershipChanged
from ranks.sockets import connections, set_probes

BEAT = 0.5  # seconds
JOINING = 5.0  # seconds in which the members of a generation reach each other


class FailureDetector:
    """This process's connections to all other members of `members.next`. Raises MembershipChanged where one is gone.

    From then on a thread watches them. When one closes, `reason` says whose, and the sockets of all groups are shut
    down, again and again until close(). `before`: the sockets that are none of theirs.
    """

    def __init__(self, members: Members):
        self.reason, self.noticed, self.ended, self.members = None, threading.Event(), threading.Event(), members
        self.before, self.links = {inode for inode, _ in connections()}, {}
        self.thread, deadline = threading.Thread(target=self.run, daemon=True), time.monotonic() + JOINING
        try:
            for member in members.next.members:
                if member != members.me:
                    self.links[self.link_to(member, deadline)] = member
        except MembershipChanged:
            self.close()
            raise
        self.thread.start()

    def link_to(self, member: Member, deadline: float) -> Channel:
        """The connection to a member, as soon as it has agreed to this generation, too."""
        message = {"kind": "link", "secret": self.members.next.secret}
        while True:
            try:
                link, answer = connect(member.endpoint, self.members.contacts.token, message)
                set_probes(link.fileno())
            except NO_ANSWER as error:
                if isinstance(error, socket.gaierror) and time.monotonic() < deadline:  # its name, for a moment
                    continue
                self.members.could_not_reach(member)
                raise MembershipChanged(f"{member.address} is lost ({error!r})") from None
            if answer["ok"]:
                link.keep()
                return link
            link.close()
            if time.monotonic() > deadline:
                raise MembershipChanged(f"{member.address} has not joined")
            time.sleep(0.02)

    def run(self) -> None:
        while self.reason is None and not self.ended.is_set():
            ready = multiprocessing.connection.wait([*self.links], BEAT)
            if ready and not self.ended.is_set():
                self.reason = f"{self.links[ready[0]].address} {how_it_ended(ready[0])}"
                self.noticed.set()
        given_up_at = time.monotonic() + pgm.timeout.total_seconds()
        while not self.ended.is_set():
            self.shut()
            self.ended.wait(BEAT / 5)
            if time.monotonic() > given_up_at:  # gloo waits for a connection that the lost one was to open
                os._exit(exits.FAILED)

    def shut(self) -> None:
        """Ends what waits in a group of this generation."""
        links = {os.fstat(link.fileno()).st_ino for link in [*self.links, *self.members.links] if not link.closed}
        for inode, each in connections():
            if inode not in self.before | links:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized() and dist.get_backend() == "nccl":  # by torch's documentation; never run
            abort_all = getattr(dist.distributed_c10d, "_abort_process_group", dist.group.WORLD.abort)  # else one group
            abort_all()

    def close(self) -> None:
        """This process leaves the generation; the others hear of it."""
        self.ended.set()
        for link in self.members.links:
            with contextlib.suppress(OSError):
                link.send_bytes(b"left")
        if self.thread.is_alive():  # it must not read what another connection gets under the same number
            for link in self.links:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as each:
                    each.shutdown(socket.SHUT_RDWR)
            self.thread.join()
        for link in [*self.members.links, *self.links]:
            link.close()
        self.members.links.clear()


def how_it_ended(link: Channel) -> str:
    """What is to be said of the member at the other end of a connection that can be read."""
    try:
        return "has lost another process" if link.recv_bytes() == b"left" else "is lost"
    except NO_ANSWER as error:
        return f"is lost: {error}" if isinstance(error, AuthenticationError) else "is lost"
