"""A run that is asked to stop, or that loses one of its machines.

SIGTERM and Ctrl-C only leave a note: all ranks finish the step that they are in, save a checkpoint and end. Whoever
started them has to wait for that. launch_cluster.sh is told how long a step takes; torchrun waits for as long as a
variable said when it started, so that a run prints its name where steps take too long for it. In an elastic
run (launch_cluster.sh --elastic) ranks also watch each other. When one is gone, those that are left write what
they hold, by themselves, and end; torchrun's agents then start all of them anew without the lost one.

A rank that is killed closes its connections, and the others meet an error at once. A cut link closes nothing: so each
rank counts aloud, in the store of rank 0. One that falls silent for PATIENCE seconds is taken as gone where its machine
does not answer for it either: a board that swaps is slow, and still there.
"""

import contextlib
import datetime
import math
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from launching.host_facts import STOPS_WITHIN
from machine_facts import gather, this_host
from utils import UserError

BEAT, PATIENCE = 0.5, 6.0  # seconds
UNKNOWN = 600.0  # seconds that a stop may take where no step was measured yet, and while the last checkpoint is written
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds until torchrun kills what it has told to end; 30 by default
ALONE = 4.0  # seconds that a rank waits for its own agent to stop it
LOST = re.compile("peer|onnection|ocket|imed out|timeout|Broken pipe|NCCL|TCPStore|remote process", re.IGNORECASE)


def is_elastic() -> bool:
    """Whether torchrun starts lost processes anew: it then says so in the environment."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether it came of communicating with a rank that is gone."""
    is_ours = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
    return not is_ours and bool(LOST.search(str(error)))


def let_signals_kill() -> None:
    """For a training that can't end within a step: SIGTERM and Ctrl-C end the process, as they do by default."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Watch:
    """Notes signals from now on and, in an elastic run, whether the other ranks are alive. All ranks make one together.
    """

    def __init__(self):
        self.asked, self.rescue, self.lock, self.ended = False, None, threading.RLock(), threading.Event()
        self.longest, self.asked_at = 0.0, None  # seconds between two questions of ask_all; when the last one was
        self.torchrun_waits = float(os.environ.get(SHUTDOWN, 30)) if "TORCHELASTIC_RUN_ID" in os.environ else math.inf
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self.store = None
        if is_elastic() and self.world_size > 1:  # a connection of its own: the main thread's may be in use for long
            self.store = self.connect()
            self.store.add(f"beat/{self.rank}", 1)
            self.door = socket.create_server(("", 0))  # the system answers while this process lives
            self.door.setblocking(False)
            self.doors = gather((*this_host(), self.door.getsockname()[1]))  # from here on all counters are there
        self.noted, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # written at once, even where Python waits in C++
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                             timeout=datetime.timedelta(seconds=PATIENCE), wait_for_workers=False)

    def run(self) -> None:
        before, missed = [b"0"] * self.world_size, [0] * self.world_size  # looks of this rank, which may be slow itself
        while not self.ended.is_set():
            if select.select([self.noted], [], [], BEAT)[0] and os.read(self.noted, 64):
                self.asked = True
                if self.rescue is None:
                    print(f"rank {self.rank}: stopped before the training began", flush=True)
                    os._exit(is_elastic())
            if self.store is None:
                continue
            with contextlib.suppress(OSError):  # until nobody is left who has looked: the system keeps a few only
                while True:
                    self.door.accept()[0].close()
            try:
                self.store.add(f"beat/{self.rank}", 1)
                counts = self.store.multi_get([f"beat/{rank}" for rank in range(self.world_size)])
            except RuntimeError:
                self.look_for(0)
                with contextlib.suppress(RuntimeError):  # then the next look tries again
                    self.store = self.connect()
                continue
            for rank, count in enumerate(counts):
                missed[rank] = missed[rank] + 1 if count == before[rank] and int(count) >= 0 else 0
                if missed[rank] > PATIENCE / BEAT:
                    self.look_for(rank)
                    missed[rank] = 0
            before = counts

    def look_for(self, rank: int) -> None:
        """Ends this process by fail() where the machine of a silent rank does not answer for it."""
        name, *door = self.doors[rank]
        try:
            socket.create_connection(door, timeout=2).close()
        except OSError:
            self.fail(f"rank {rank} on {name} is silent")

    def begin(self, rescue: Callable[[], str]) -> None:
        """From now on there is something to lose: a signal ends the step first, and a lost rank calls `rescue`.

        It returns a line that says what it has saved.
        """
        self.rescue = rescue
        self.stops_within(UNKNOWN)

    @contextlib.contextmanager
    def changing_weights(self):
        """Around what changes the weights, whose number of steps goes with them: survivors never write half of a step.

        A GPU works off a queue. What is in it before, and waits for other ranks, is waited for without the lock, and
        the change itself with it: so the weights are always what the number says, whatever the queue waits for next.
        """
        self.wait_for_gpu()
        with self.lock:
            yield
            self.wait_for_gpu()

    def wait_for_gpu(self) -> None:
        if self.store is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def fail(self, reason: str) -> None:
        """Saves what can be saved, and ends this process. Does not return."""
        with self.lock:
            if self.ended.is_set():  # the training is over, and others leave as well
                return
            print(f"rank {self.rank}: {reason}", flush=True)
            try:
                if self.rescue:
                    print(f"rank {self.rank}: {self.rescue()}", flush=True)
            except Exception as error:
                print(f"rank {self.rank}: what it holds could not be written ({error!r})", flush=True)
            finally:  # nothing must keep it from ending
                os._exit(1)

    @contextlib.contextmanager
    def lost_peers(self):
        """Around what communicates: an error that a lost rank causes ends the process by fail()."""
        try:
            yield
        except RuntimeError as error:
            if self.store is not None and is_lost_peer(error):
                self.fail(f"a rank is lost ({str(error).splitlines()[0][:200]})")
            raise

    def ask_all(self) -> bool:
        """Whether any rank was told to stop, asked where a step ends: the step that runs is the last. Collective."""
        asked, now = torch.tensor(int(self.asked), dtype=torch.int32), time.monotonic()
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
        if asked:
            self.stops_within(UNKNOWN)
        return bool(asked)

    def stops_within(self, seconds: float) -> None:
        """Tells launch_cluster.sh, if it has started this process, how long it may take from a signal to the end."""
        if path := os.environ.get(STOPS_WITHIN):
            with contextlib.suppress(OSError), open(path, "r+") as file:
                file.write(f"{seconds:10.1f}")  # always as long, over what is there: nobody reads half a number

    def close(self) -> None:
        """The training is over: from here on no rank needs to hear of another one. Collective."""
        with self.lock:
            self.ended.set()
        self.thread.join()
        if self.store is not None:
            self.store.set(f"beat/{self.rank}", "-1")
        if self.group is not None:
            dist.barrier(self.group)  # rank 0, which has the store, leaves last

    def wait_for_own_signal(self) -> bool:
        """In an elastic run, after a stop that another rank was told: waits until this one's agent says so, too.

        An agent whose processes have ended well takes the run as done, and would not take part in the next one.
        """
        end = time.monotonic() + ALONE
        while not self.asked and time.monotonic() < end:
            self.asked = bool(select.select([self.noted], [], [], BEAT)[0])
        return self.asked


@contextlib.contextmanager
def end_of_elastic_run():
    """Around main(): an error that starting anew would only repeat ends the agent as well, which started this process.
    """
    try:
        yield
    except Exception as error:
        if not is_elastic():
            let_signals_kill()  # a rank that waits for rank 0 to speak ends where it is told to
        elif isinstance(error, UserError) or not LOST.search(str(error)):
            threading.Timer(1.0, os.kill, [os.getppid(), signal.SIGTERM]).start()  # after the message
        raise
