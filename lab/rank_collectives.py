"""The collectives of ranks in one process: all ranks of a group come to the same call, and take what all have given.

What they have in common with messages is here, too: the log, the groups and the clocks of thread_ranks.py.
"""

import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from lab.baton import Baton, Handle, Violation, place

COMBINE = {str(op): function for op, function in (
    (dist.ReduceOp.SUM, torch.add), (dist.ReduceOp.MAX, torch.maximum), (dist.ReduceOp.MIN, torch.minimum))}
NO_MESSAGE = 0  # the number of what needs none: a collective of one rank, a new group


class Event(NamedTuple):
    """A message or a collective, from the side of one rank. It is over after `end` rounds.

    An all-reduce counts as 2 (n - 1) messages of 1/n of the tensor, as in a ring.
    """

    rank: int
    kind: str  # "send", "receive", or the name of a collective
    group: tuple[int, ...]  # global ranks
    peer: int | None  # global rank
    num_bytes: int  # that this rank sends; of a receive, those that it receives
    end: int
    shape: tuple[int, ...] = ()  # of the tensor; of an all-to-all's rows
    dtype: str = ""
    number: int = NO_MESSAGE  # of the message or collective, in order of their first rank's call
    posted: int = 0  # the moments at which this rank began and ended it, on the world's count of moments
    done: int = 0

    def __str__(self) -> str:
        other = f"of the ranks {[*self.group]}" if self.peer is None else f"rank {self.peer}"
        word = {"send": "to ", "receive": "from "}.get(self.kind, "")
        return f"rank {self.rank}: {self.kind} {word}{other}, {self.num_bytes:,} bytes"


class Group:
    """Stands for a ProcessGroup. All of its ranks share one."""

    def __init__(self, world: "Collectives", ranks: tuple[int, ...]):
        self.world, self.ranks = world, ranks

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.world.rank) if self.world.rank in self.ranks else -1


def described(signature: tuple) -> tuple[tuple[int, ...], str]:
    """The shape and dtype that end the signature of a collective of tensors."""
    *_, shape, dtype = ((), "", *signature) if len(signature) > 1 else ((), "")
    return tuple(shape), str(dtype).removeprefix("torch.")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (a, b)))


class Collectives(Baton):
    """`size` ranks with collectives. After run(), `events` is the log."""

    def __init__(self, size: int):
        super().__init__(size)
        self.events: list[Event] = []
        self.before: Callable[[Event], None] | None = None  # called before an event is logged, for a debugger
        self.clocks = [0] * size  # in rounds
        self.everyone = Group(self, tuple(range(size)))
        self.counts: dict[tuple, int] = defaultdict(int)  # (rank, group) -> collectives that it has had
        self.collectives: dict[tuple, dict[int, tuple]] = defaultdict(dict)  # (group, number) -> what each rank gave
        self.taken: dict[tuple, int] = defaultdict(int)  # (group, number) -> ranks that have got its result
        self.moments, self.numbers = itertools.count(), itertools.count(1)  # what happens; messages and collectives
        self.number_of: dict[tuple, int] = {}  # that of a collective in `collectives`

    def group(self, group: Group | None) -> Group:
        """The group to communicate in, all ranks where it is None."""
        if group is not None and not isinstance(group, Group):
            raise Violation(f"rank {self.rank} is not in the group in which it wants to communicate. {place()}")
        return group or self.everyone

    def log(self, event: Event) -> None:
        if self.before:
            self.before(event)
        self.events.append(event)

    def check_tensor(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise Violation(f"rank {self.rank} sends or receives a tensor of shape {list(tensor.shape)} that is not "
                            f"contiguous: its numbers have to lie one behind the other in memory. {place()}")

    def meet(self, kind: str, group: Group | None, signature: tuple, given, num_bytes: int, rounds: int,
             take: Callable[[dict], None], async_op: bool = False) -> Handle | None:
        """This rank's next collective of the group. take(what all ranks gave) is called when all have come to it."""
        group, rank = self.group(group), self.rank
        self.counts[rank, group] += 1
        entries, key = self.collectives[group, self.counts[rank, group]], (group, self.counts[rank, group])
        if not entries:
            self.number_of[key] = next(self.numbers) if group.size() > 1 and kind != "new_group" else NO_MESSAGE
        posted, *tensor = next(self.moments), *described(signature)
        entries[rank] = (kind, *signature), given, place(), self.clocks[rank]
        (other, (first, *_)) = next(iter(entries.items()))
        if first != (kind, *signature):
            calls = "".join(f"\n  rank {each} calls {' '.join(map(str, entries[each][0]))}\n      {entries[each][2]}"
                            for each in (other, rank))
            raise Violation(f"collectives of the ranks {[*group.ranks]} do not match:{calls}")

        def finish() -> None:
            self.clocks[rank] = max(self.clocks[rank], max(entry[3] for entry in entries.values()) + rounds)
            self.log(Event(rank, kind, group.ranks, None, num_bytes, self.clocks[rank], *tensor, self.number_of[key],
                           posted, next(self.moments)))
            take({each: entries[each][1] for each in group.ranks})
            self.taken[key] += 1
            if self.taken[key] == group.size():  # a run of many steps does not keep what all are done with
                del self.collectives[key], self.taken[key]

        handle = Handle(self, f"{kind} of the ranks {[*group.ranks]}",
                        lambda: [each for each in group.ranks if each not in entries],
                        lambda: len(entries) == group.size(), finish)
        return handle if async_op else handle.wait() and None

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group: Group | None = None, async_op=False):
        size, content = self.group(group).size(), tensor.detach().clone()
        if (combine := COMBINE.get(str(op))) is None:
            raise Violation(f"{op} is not there on gloo, or not in this stand-in: use SUM, MAX or MIN. {place()}")
        self.check_tensor(tensor)
        where, rank = place(), self.rank

        def take(given: dict[int, torch.Tensor]) -> None:
            if not same_bits(tensor, content):
                raise Violation(f"rank {rank} changed a tensor during its all_reduce: {where}. Wait for it first.")
            first, *others = given.values()
            total = first.clone()
            for other in others:  # in the order of ranks, so all ranks get equal bits
                combine(total, other, out=total)
            tensor.detach().copy_(total)

        signature = (str(op).rpartition(".")[2], list(tensor.shape), tensor.dtype)
        hops = 2 * (size - 1)
        return self.meet("all_reduce", group, signature, content, hops * tensor.nbytes // size, hops, take, async_op)

    def all_gather(self, tensors: list, tensor: torch.Tensor, group: Group | None = None, async_op: bool = False):
        def take(given: dict[int, torch.Tensor]) -> None:
            for mine, theirs in zip(tensors, given.values(), strict=True):
                mine.detach().copy_(theirs)

        self.check_tensor(tensor)
        others = self.group(group).size() - 1
        return self.meet("all_gather", group, (list(tensor.shape), tensor.dtype), tensor.detach().clone(),
                         others * tensor.nbytes, others, take, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Group | None = None, async_op: bool = False):
        self.check_tensor(tensor)
        if src not in (ranks := self.group(group).ranks):
            raise Violation(f"rank {self.rank} takes part in a broadcast of rank {src} in the group of the ranks "
                            f"{[*ranks]}: choose one of these as its source. {place()}")
        return self.meet("broadcast", group, (src, list(tensor.shape), tensor.dtype), tensor.detach().clone(),
                         tensor.nbytes * (self.rank == src), math.ceil(math.log2(len(ranks))),
                         lambda given: tensor.detach().copy_(given[src]), async_op)

    def all_gather_object(self, objects: list, value: object, group: Group | None = None) -> None:
        num_bytes, others = len(pickle.dumps(value)), self.group(group).size() - 1
        self.meet("all_gather_object", group, (), value, others * num_bytes, others, lambda given: objects.__setitem__(
            slice(None), given.values()))

    def barrier(self, group: Group | None = None, *args, **kwargs) -> None:
        self.meet("barrier", group, (), None, 0, 0, lambda given: None)

    def all_to_all_single(self, output: torch.Tensor, rows: torch.Tensor, output_sizes=None, input_sizes=None,
                          group: Group | None = None, async_op: bool = False):
        self.check_tensor(rows)
        group = self.group(group)
        size, mine = group.size(), group.rank()
        parts = rows.detach().clone().split(input_sizes or [len(rows) // size] * size)
        expected = output.detach().split(output_sizes or [len(output) // size] * size)

        def take(given: dict[int, tuple]) -> None:
            for sender, theirs in given.items():
                target = expected[group.ranks.index(sender)]
                if target.shape != theirs[mine].shape:
                    raise Violation(f"rank {sender} sends {len(theirs[mine])} rows to rank {group.ranks[mine]}, which "
                                    f"expects {len(target)}: {place()}")
                target.copy_(theirs[mine])

        return self.meet("all_to_all_single", group, (list(rows.shape[1:]), rows.dtype), parts,
                         rows.nbytes - parts[mine].nbytes, size - 1, take, async_op)
