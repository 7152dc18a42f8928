"""One clock for the timeline of several machines, whose own clocks disagree and run at different speeds.

Each rank compares its clock with rank 0's before and after the step (Cristian 1989). It asks for the time and assumes
that the answer was given in the middle of the round trip, which is wrong by half of that trip at most. The quickest of
several trips counts, and between the two comparisons the offset is interpolated.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from training.common import gather


class ClockOffset(NamedTuple):
    """`offset`: what to add to this rank's clock to get rank 0's. `error`: by how much that can be wrong at most. `at`:
    when it was measured, by this rank's clock. All in nanoseconds.
    """

    offset: int
    error: int
    at: int


class CommonClock:
    """Turns moments of this rank's clock into those of rank 0's. All ranks make one before a step and end it after."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, compare_clocks(device)

    def end(self) -> float:
        """Compares the clocks again. Returns by how many microseconds those of two ranks can still differ at most."""
        self.after = compare_clocks(self.device)
        errors = sorted(gather(max(self.before.error, self.after.error)))
        return sum(errors[-2:]) / 1e3

    def by_rank_0(self, nanoseconds: int) -> int:
        drift = (self.after.offset - self.before.offset) / (self.after.at - self.before.at)
        return nanoseconds + self.before.offset + round(drift * (nanoseconds - self.before.at))


def compare_clocks(device: torch.device, rounds: int = 10) -> ClockOffset:
    """This rank's clock against rank 0's. All ranks call it together."""
    message = torch.zeros(1, dtype=torch.int64, device="cpu" if dist.get_backend() == "gloo" else device)
    best = None
    for rank in range(1, dist.get_world_size()):
        for _ in range(rounds):
            if dist.get_rank() == 0:
                dist.recv(message, rank)
                message.item()  # NCCL's recv returns before the message is there
                dist.send(message.fill_(time.perf_counter_ns()), rank)
            elif dist.get_rank() == rank:
                asked = time.perf_counter_ns()
                dist.send(message, 0)
                dist.recv(message, 0)
                theirs, answered = message.item(), time.perf_counter_ns()
                middle, error = (asked + answered) // 2, (answered - asked) // 2
                if best is None or error < best.error:
                    best = ClockOffset(theirs - middle, error, middle)
    return best or ClockOffset(0, 0, time.perf_counter_ns())
