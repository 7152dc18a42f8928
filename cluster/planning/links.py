"""How fast the links between the machines are: each is timed alone, in both directions.

Small messages give the latency, one large enough to take a while the bandwidth. What it costs the processors to send is
in it.
"""

import itertools
import statistics
import time

import torch
import torch.distributed as dist

SMALLEST_MESSAGE, LARGEST_MESSAGE = 1 << 14, 1 << 24  # numbers of 4 bytes


def wait_for(device: torch.device) -> None:
    """Lets a GPU finish what it was given to do, because the clock is to be read then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    wait_for(device)
    return time.perf_counter()


def measure_links(device: torch.device, seconds: float) -> list[dict | None]:
    """Latency (seconds) and bandwidth (bytes a second) from this rank to each other, None to itself. Collective.

    All links together take about so many `seconds`.
    """
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    links = [None] * dist.get_world_size()
    pairs = list(itertools.permutations(range(len(links)), 2))
    for sender, receiver in pairs:
        if dist.get_rank() == sender:
            links[receiver] = time_link(receiver, wire, seconds / len(pairs))
        elif dist.get_rank() == receiver:
            answer_link(sender, wire)
    return links


def time_link(receiver: int, wire: torch.device, seconds: float) -> dict[str, float]:
    """Messages of growing size go to the receiver, an empty answer to each comes back.

    They grow until one takes a sixteenth of the time. The last size is sent again while there is time.
    """
    answer = torch.zeros(1, device=wire)

    def has_time(share: float) -> bool:
        return time.perf_counter() - start < share * seconds

    def round_trip(numbers: int) -> float:
        dist.send(torch.tensor([numbers], device=wire), receiver)  # what comes next
        message = torch.zeros(numbers, device=wire)
        dist.recv(answer, receiver)
        sent = now(wire)
        dist.send(message, receiver)
        dist.recv(answer, receiver)
        return now(wire) - sent

    round_trip(1)  # connects, and waits until the receiver has done with other links
    start = time.perf_counter()
    trips = [round_trip(1)]
    while len(trips) < 12 and has_time(0.2):
        trips.append(round_trip(1))
    latency = statistics.median(trips) / 2
    numbers, trips = SMALLEST_MESSAGE, []
    while len(trips) < 2 or len(trips) < 5 and has_time(0.8):
        trips.append(round_trip(numbers))
        is_quick = statistics.median_low(trips) - 2 * latency < seconds / 16
        if is_quick and numbers < LARGEST_MESSAGE and has_time(0.6):
            numbers, trips = 4 * numbers, []
    dist.send(torch.tensor([0], device=wire), receiver)
    trip = statistics.median_low(trips)
    return {"latency": latency, "bandwidth": 4 * numbers / max(trip - 2 * latency, trip / 4, 1e-9)}


def answer_link(sender: int, wire: torch.device) -> None:
    numbers, answer = torch.zeros(1, dtype=torch.int64, device=wire), torch.zeros(1, device=wire)
    while True:
        dist.recv(numbers, sender)
        if not numbers.item():
            return
        message = torch.empty(numbers.item(), device=wire)
        dist.send(answer, sender)
        dist.recv(message, sender)
        wait_for(wire)
        dist.send(answer, sender)
