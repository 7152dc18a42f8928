"""A run that is asked to stop.

SIGTERM and Ctrl-C only leave a note: all ranks finish the step that they are in, save a checkpoint and end, with 143 or
130 where it was not the last step. Whoever started them has to wait for that. launch_cluster.sh is told how long a step
takes; torchrun waits for as long as TORCH_ELASTIC_SHUTDOWN_TIMEOUT said when it started, 30 seconds by default.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import process_group_manager as pgm
from hosts import exits
from hosts.host_facts import STOPS_WITHIN

UNKNOWN = 600.0  # seconds that a stop may take where no step was measured yet, and while the last checkpoint is written


def let_signals_kill() -> None:
    """For a training that can't end within a step: SIGTERM and Ctrl-C end the process, as they do by default."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Signals:
    """Notes SIGTERM and Ctrl-C from now on: `asked` is the number of the last one, or 0. Until `ready` is set, there
    is nothing to lose, and they end the process."""

    def __init__(self):
        self.asked, self.ready = 0, False
        self.noted, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # written at once, even where Python waits in C++
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while numbers := os.read(self.noted, 64):
            self.asked = numbers[-1]
            if not self.ready:
                print("stopped before the training began", flush=True)
                os._exit(exits.after(numbers[0]))  # an agent starts it anew, as after any failure

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, or comes in time."""
        end = time.monotonic() + seconds
        while not self.asked and time.monotonic() < end:
            time.sleep(0.05)
        return bool(self.asked)


class StopAgreement:
    """Whether the ranks were told to stop, or others wait to be taken in. All ranks make one together.

    `newcomers()`: of a run that goes on in place, the processes that wait; else None.
    """

    def __init__(self, newcomers: Callable | None, signals: Signals):
        self.newcomers, self.signals, self.has_newcomers = newcomers, signals, False
        self.longest, self.asked_at = 0.0, None  # seconds between two questions of agree; when the last one was
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=pgm.timeout) if self.world_size > 1 else None

    def begin(self) -> None:
        """From now on there is something to lose: a signal ends the step first."""
        self.signals.ready = True
        self.stops_within(UNKNOWN)

    def agree(self, seconds: float = 0.0, of_this_rank: Sequence[float] = ()) -> int:
        """The signal by which a rank was told to stop, 0 for none. Asked where a step ends, which then is the last.
        Collective.

        Afterwards `has_newcomers` is whether processes wait to be taken in, `longest_step` is the largest `seconds` of
        all ranks, and `of_ranks` each rank's numbers `of_this_rank`, which are as many on each and -1 or more.
        """
        newcomers, now = self.newcomers() if self.newcomers else [], time.monotonic()
        asked = torch.full((3 + self.world_size * len(of_this_rank),), -1.0, dtype=torch.float64)
        asked[:3] = torch.tensor([self.signals.asked, bool(newcomers), seconds])
        numbers = asked[3:].view(self.world_size, -1)  # (ranks, numbers)
        numbers[self.rank] = torch.tensor(of_this_rank, dtype=torch.float64)
        if self.group:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.group)
        if self.asked_at and now - self.asked_at > self.longest:  # not of the first step, which warms up
            self.longest = now - self.asked_at
            self.stops_within(self.longest)
        self.asked_at = now
        stops, newcomers, self.longest_step = asked[:3].tolist()
        self.has_newcomers, self.of_ranks = bool(newcomers), numbers.tolist()
        if stops:
            self.stops_within(UNKNOWN)
        return int(stops)

    def stops_within(self, seconds: float) -> None:
        """Tells launch_cluster.sh, if it has started this process, how long it may take from a signal to the end."""
        if path := os.environ.get(STOPS_WITHIN):
            with contextlib.suppress(OSError), open(path, "r+") as file:
                file.write(f"{seconds:10.1f}")  # always as long, over what is there: nobody reads half a number
