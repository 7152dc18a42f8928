"""What the ranks of a step's train.py exchange in its second optimizer step, counted on ranks in this process."""

from collections import Counter

from lab.program import Program
from lab.ranks import run, threads
from lab.watch.messages import Messages

KINDS = ("send", "receive", "all_reduce", "all_to_all_single")
LOGGED = 64  # numbers for the log have so many bytes at most, and are left out


def messages(step: int, num_ranks: int, flags: list) -> list[Counter]:
    """Of each rank, the Counter of (kind, other ranks of the group, peer, bytes). See rank_collectives.Event."""
    run(Program(step, flags), threads(num_ranks), [seen := Messages()])
    return [Counter(event[1:5] for event in seen.between(rank, 0) if event.kind in KINDS and event.num_bytes > LOGGED)
            for rank in range(num_ranks)]
