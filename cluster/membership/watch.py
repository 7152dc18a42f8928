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
import json
import math
import multiprocessing.connection
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist

from launching.host_facts import STOPS_WITHIN
from membership.door import NO_ANSWER, knock, set_limit
from membership.meeting import VARIABLE, Members
from utils import UserError

BEAT, PATIENCE = 0.5, 6  # seconds
JOINING = 5.0  # seconds in which the members of a generation reach each other
UNKNOWN = 600.0  # seconds that a stop may take where no step was measured yet, and while the last checkpoint is written
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds until torchrun kills what it has told to end; 30 by default
NEWCOMER = "another process is taken in"
ALONE = 4.0  # seconds that a rank waits for its own agent to stop it
LOST = re.compile("peer|onnection|ocket|imed out|timeout|Broken pipe|NCCL|TCPStore|remote process", re.IGNORECASE)


class Lost(RuntimeError):
    """The generation has ended: a process of it is gone, or another one is to be taken in."""


def is_elastic() -> bool:
    """Whether processes that are lost are started anew: the agent then says so in the environment, as torchrun does."""
    return VARIABLE in os.environ or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether it came of communicating with a rank that is gone."""
    is_ours = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
    return not is_ours and bool(isinstance(error, Lost) or LOST.search(str(error)))


def let_signals_kill() -> None:
    """For a training that can't end within a step: SIGTERM and Ctrl-C end the process, as they do by default."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Signals:
    """Notes SIGTERM and Ctrl-C from now on: `asked`. Until `ready` is set, there is nothing to lose, and they end the
    process."""

    def __init__(self):
        self.asked, self.ready = False, False
        self.noted, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # written at once, even where Python waits in C++
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while os.read(self.noted, 64):
            self.asked = True
            if not self.ready:
                print("stopped before the training began", flush=True)
                os._exit(is_elastic())

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, or comes in time."""
        end = time.monotonic() + seconds
        while not self.asked and time.monotonic() < end:
            time.sleep(0.05)
        return self.asked


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
        set_limit(each, None)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": PATIENCE - 1}.items():
            each.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Watch:
    """Whether the ranks were told to stop, or others wait to be taken in. All ranks make one together.

    `members`: of a run that goes on in place, else None.
    """

    def __init__(self, members: Members | None, signals: Signals):
        self.members, self.signals, self.has_newcomers = members, signals, False
        self.longest, self.asked_at = 0.0, None  # seconds between two questions of ask_all; when the last one was
        self.torchrun_waits = float(os.environ.get(SHUTDOWN, 30)) if "TORCHELASTIC_RUN_ID" in os.environ else math.inf
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo") if self.world_size > 1 else None

    def begin(self) -> None:
        """From now on there is something to lose: a signal ends the step first."""
        self.signals.ready = True
        self.stops_within(UNKNOWN)

    def ask_all(self, work: float = 0.0, seconds: float = 0.0) -> bool:
        """Whether any rank was told to stop, asked where a step ends: the step that runs is the last. Collective.

        Afterwards `has_newcomers` is whether processes wait to be taken in, and `told` is the largest `seconds` of all,
        followed by each rank's `work`.
        """
        newcomers = self.members.newcomers() if self.members else []
        asked, now = torch.zeros(3 + self.world_size, dtype=torch.float64), time.monotonic()
        asked[[0, 1, 2, 3 + self.rank]] = torch.tensor([self.signals.asked, bool(newcomers), seconds, work]).double()
        if self.group:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.group)
        if self.asked_at and now - self.asked_at > self.longest:  # not of the first step, which warms up
            self.longest = now - self.asked_at
            self.stops_within(self.longest)
            if self.rank == 0 and self.longest > self.torchrun_waits / 2:  # the other half is for the checkpoint
                print(f"a step takes {self.longest:.0f} s, and torchrun ends its processes {self.torchrun_waits:.0f} s "
                      f"after Ctrl-C, saved or not: start it with {SHUTDOWN}={max(UNKNOWN, 4 * self.longest):.0f} on "
                      "each host", flush=True)
                self.torchrun_waits = math.inf
        self.asked_at = now
        stops, newcomers, *self.told = asked.tolist()
        stops, self.has_newcomers = bool(stops), bool(newcomers)
        if stops:
            self.stops_within(UNKNOWN)
        return stops

    def stops_within(self, seconds: float) -> None:
        """Tells launch_cluster.sh, if it has started this process, how long it may take from a signal to the end."""
        if path := os.environ.get(STOPS_WITHIN):
            with contextlib.suppress(OSError), open(path, "r+") as file:
                file.write(f"{seconds:10.1f}")  # always as long, over what is there: nobody reads half a number


@contextlib.contextmanager
def end_of_elastic_run():
    """Around main(): an error that starting anew would only repeat ends the agent as well, which started this process.

    Our own agent reads it from the exit code; torchrun's is told.
    """
    if VARIABLE in os.environ:  # until it has met the others: see one_clear_error
        os.environ["RANK"] = str(json.loads(os.environ[VARIABLE])["host"])
    try:
        yield
    except Exception as error:
        if not is_elastic():
            let_signals_kill()  # a rank that waits for rank 0 to speak ends where it is told to
        elif isinstance(error, UserError) or not LOST.search(str(error)):
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # a child of torchrun
                threading.Timer(1.0, os.kill, [os.getppid(), signal.SIGTERM]).start()  # after the message
            elif VARIABLE in os.environ and not isinstance(error, UserError):
                traceback.print_exc()
                os._exit(2)
        raise
