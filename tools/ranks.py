"""Ranks in one process: a stand-in for torch.distributed, in which the same program always runs in the same order.

    world = World(4)
    results = world.run(program)  # program(rank) on each rank; meanwhile torch.distributed's functions are the world's

Each rank is a thread, and one of them runs at a time (baton.py). Where no rank can go on, a picture says why.

A send is a rendezvous: it is done once its receive is posted, as large messages over NCCL are. Programs that rely on
buffers for their sends therefore stop here. What is received is in its tensor after wait(), and before it is NaN. A
tensor that changes while it is sent, a message of another size than its receive expects, collectives that do not
match, and messages that nobody receives end the run with a Violation.

`events` is the log of all messages. Time is counted in rounds: in a round, a rank can send one message and receive one.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from baton import Baton, Handle, Violation, place

INTEGER_POISON = 99  # what a tensor of integers holds until its message is there


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


class Group:
    """Stands for a ProcessGroup. All of its ranks share one."""

    def __init__(self, world: "World", ranks: tuple[int, ...]):
        self.world, self.ranks = world, ranks

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.world.rank) if self.world.rank in self.ranks else -1


class Send:
    """A message from its sender's side."""

    def __init__(self, rank: int, tensor: torch.Tensor, arrival: int):
        self.rank, self.tensor, self.arrival, self.place = rank, tensor, arrival, place()
        self.content, self.handle, self.is_matched = tensor.detach().clone(), None, False

    def check_unchanged(self) -> None:
        if not self.handle.waited and not same_bits(self.tensor, self.content):
            raise Violation(f"rank {self.rank} changed a tensor while it was being sent: {self.place}. Wait for the "
                            "send first, or send a copy.")


class Receive:
    """A message from its receiver's side."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.place, self.message = tensor, place(), None


class P2POp:
    """Stands for torch.distributed.P2POp: a send or a receive for batch_isend_irecv."""

    def __init__(self, op: Callable, tensor: torch.Tensor, peer: int | None = None, group=None, tag: int = 0,
                 group_peer: int | None = None):
        self.post = lambda: op(tensor, peer, group, tag, group_peer)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (a, b)))


class World(Baton):
    """`size` ranks that communicate. After run(), `events` is the log and `rounds` says when the last message ended."""

    def __init__(self, size: int):
        super().__init__(size)
        self.events: list[Event] = []
        self.clocks, self.sends_until, self.receives_until = [0] * size, [0] * size, [0] * size  # in rounds
        self.everyone = Group(self, tuple(range(size)))
        self.groups: dict[tuple, Group] = {}  # (how many its ranks have made before, ranks)
        self.counts: dict[tuple, int] = defaultdict(int)  # how many groups or collectives a rank has had
        self.sends: dict[tuple, list[Send]] = defaultdict(list)  # (group, sender, receiver) -> not matched yet
        self.receives: dict[tuple, list[Receive]] = defaultdict(list)
        self.collectives: dict[tuple, dict[int, tuple]] = defaultdict(dict)  # (group, number) -> what each rank gave

    @property
    def rounds(self) -> int:
        return max((event.end for event in self.events), default=0)

    def num_bytes(self, rank: int | None = None) -> int:
        """What this rank, or all of them, have sent."""
        return sum(event.num_bytes for event in self.events if event.kind != "receive" and rank in (None, event.rank))

    def run(self, program: Callable[[int], object], timeout: float = 60) -> list:
        with mock.patch.multiple(
                dist, P2POp=P2POp, init_process_group=mock.Mock(), destroy_process_group=mock.Mock(),
                get_rank=lambda group=None: (group or self.everyone).rank(),
                get_world_size=lambda group=None: (group or self.everyone).size(),
                get_global_rank=lambda group, rank: group.ranks[rank],
                get_process_group_ranks=lambda group: [*(group or self.everyone).ranks],
                get_backend=lambda group=None: "gloo", is_initialized=lambda: True,
                send=lambda *args, **kwargs: self.isend(*args, **kwargs).wait() and None,
                recv=lambda *args, **kwargs: self.irecv(*args, **kwargs).wait() and None,
                batch_isend_irecv=lambda operations: [operation.post() for operation in operations],
                monitored_barrier=lambda group=None, *args, **kwargs: self.barrier(group),
                **{name: getattr(self, name) for name in (
                    "new_group", "new_subgroups_by_enumeration", "isend", "irecv", "barrier", "all_reduce",
                    "all_gather", "all_gather_object", "all_to_all_single", "broadcast")}):
            return super().run(program, timeout)

    def new_group(self, ranks=None, timeout=None, backend=None, **options) -> Group | None:
        """All ranks make all groups in the same order. The k-th one with these ranks is the same for all of them."""
        ranks = tuple(range(self.size) if ranks is None else ranks)
        self.counts[self.rank, ranks] += 1
        group = self.groups.setdefault((self.counts[self.rank, ranks], ranks), Group(self, ranks))
        return group if self.rank in ranks else None

    def new_subgroups_by_enumeration(self, lists, timeout=None, **options) -> tuple[Group | None, list]:
        groups = [self.new_group(ranks) for ranks in lists]
        return next((group for group in groups if group), None), groups

    # Messages

    def peer(self, what: str, peer: int | None, group: Group, group_peer: int | None) -> int:
        """The other side's global rank."""
        peer = group.ranks[group_peer] if peer is None and 0 <= (group_peer or 0) < group.size() else peer
        if peer not in group.ranks or peer == self.rank:
            raise Violation(f"rank {self.rank} wants to {what} rank {peer if peer is not None else group_peer} in the "
                            f"group of the ranks {[*group.ranks]}: choose another of these ranks. {place()}")
        return peer

    def isend(self, tensor: torch.Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0,
              group_dst: int | None = None) -> Handle:
        group, rank = group or self.everyone, self.rank
        peer = self.peer("send to", dst, group, group_dst)
        if any(receive.tensor.data_ptr() == tensor.data_ptr() for (_, _, receiver), receives in self.receives.items()
               for receive in receives if receiver == rank and receive.tensor.numel()):
            raise Violation(f"rank {rank} sends a tensor whose content has not arrived yet: wait for the receive first."
                            f" {place()}")
        self.sends_until[rank] = max(self.sends_until[rank], self.clocks[rank]) + 1
        self.events.append(Event(rank, "send", group.ranks, peer, tensor.nbytes, self.sends_until[rank]))
        message = Send(rank, tensor, self.sends_until[rank])

        def finish() -> None:
            message.handle.waited = False
            message.check_unchanged()
            message.handle.waited = True
            self.clocks[rank] = max(self.clocks[rank], message.arrival)

        message.handle = Handle(self, f"send to rank {peer}, shape {list(tensor.shape)}", lambda: [peer],
                                lambda: message.is_matched, finish)
        self.sends[group, rank, peer].append(message)
        self.match(group, rank, peer)
        return message.handle

    def irecv(self, tensor: torch.Tensor, src: int | None = None, group: Group | None = None, tag: int = 0,
              group_src: int | None = None) -> Handle:
        group, rank = group or self.everyone, self.rank
        peer = self.peer("receive from", src, group, group_src)
        receive = Receive(tensor)
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else INTEGER_POISON)

        def finish() -> None:
            message = receive.message
            message.check_unchanged()
            tensor.detach().copy_(message.content.view_as(tensor))
            self.receives_until[rank] = max(self.receives_until[rank] + 1, message.arrival)
            self.clocks[rank] = max(self.clocks[rank], self.receives_until[rank])
            self.events.append(Event(rank, "receive", group.ranks, peer, tensor.nbytes, self.receives_until[rank]))

        self.receives[group, peer, rank].append(receive)
        self.match(group, peer, rank)
        return Handle(self, f"receive from rank {peer}, shape {list(tensor.shape)}", lambda: [peer],
                      lambda: receive.message is not None, finish)

    def match(self, group: Group, sender: int, receiver: int) -> None:
        """Messages between two ranks of a group arrive in the order in which they were sent."""
        sends, receives = self.sends[group, sender, receiver], self.receives[group, sender, receiver]
        if sends and receives:
            message, receive = sends.pop(0), receives.pop(0)
            given, wanted = ((each.tensor.numel(), each.tensor.dtype) for each in (message, receive))
            if given != wanted:
                raise Violation(
                    f"rank {sender} sends {given[0]} numbers of {given[1]} to rank {receiver}, which expects "
                    f"{wanted[0]} of {wanted[1]}.\n  sent in      {message.place}\n  received in  {receive.place}")
            message.is_matched, receive.message = True, message

    # Collectives

    def meet(self, kind: str, group: Group | None, signature: tuple, given, num_bytes: int, rounds: int,
             take: Callable[[dict], None], async_op: bool = False) -> Handle | None:
        """This rank's next collective of the group. take(what all ranks gave) is called when all have come to it."""
        group, rank = group or self.everyone, self.rank
        self.counts[rank, group] += 1
        entries = self.collectives[group, self.counts[rank, group]]
        entries[rank] = (kind, *signature), given, place(), self.clocks[rank]
        (other, (first, *_)) = next(iter(entries.items()))
        if first != (kind, *signature):
            calls = "".join(f"\n  rank {each} calls {' '.join(map(str, entries[each][0]))}\n      {entries[each][2]}"
                            for each in (other, rank))
            raise Violation(f"collectives of the ranks {[*group.ranks]} do not match:{calls}")

        def finish() -> None:
            self.clocks[rank] = max(self.clocks[rank], max(entry[3] for entry in entries.values()) + rounds)
            self.events.append(Event(rank, kind, group.ranks, None, num_bytes, self.clocks[rank]))
            take({each: entries[each][1] for each in group.ranks})

        handle = Handle(self, f"{kind} of the ranks {[*group.ranks]}",
                        lambda: [each for each in group.ranks if each not in entries],
                        lambda: len(entries) == group.size(), finish)
        return handle if async_op else handle.wait() and None

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group: Group | None = None, async_op=False):
        size, content = (group or self.everyone).size(), tensor.detach().clone()
        combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}[op]
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

        others = (group or self.everyone).size() - 1
        return self.meet("all_gather", group, (list(tensor.shape), tensor.dtype), tensor.detach().clone(),
                         others * tensor.nbytes, others, take, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Group | None = None, async_op: bool = False):
        size = (group or self.everyone).size()
        return self.meet("broadcast", group, (src, list(tensor.shape), tensor.dtype), tensor.detach().clone(),
                         tensor.nbytes * (self.rank == src), math.ceil(math.log2(size)),
                         lambda given: tensor.detach().copy_(given[src]), async_op)

    def all_gather_object(self, objects: list, value: object, group: Group | None = None) -> None:
        self.meet("all_gather_object", group, (), value, 0, 0, lambda given: objects.__setitem__(
            slice(None), given.values()))

    def barrier(self, group: Group | None = None, *args, **kwargs) -> None:
        self.meet("barrier", group, (), None, 0, 0, lambda given: None)

    def all_to_all_single(self, output: torch.Tensor, rows: torch.Tensor, output_sizes=None, input_sizes=None,
                          group: Group | None = None, async_op: bool = False):
        group = group or self.everyone
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

    def check_end_of_rank(self, rank: int) -> None:
        for (_, sender, receiver), receives in self.receives.items():
            if receiver == rank and receives:
                raise Violation(f"rank {rank} ends, and what it was to receive from rank {sender} has not come: "
                                f"{receives[0].place}")

    def check_end(self) -> Violation | None:
        left = [(key, message) for key, messages in self.sends.items() for message in messages]
        if not left:
            return None
        (_, sender, receiver), message = left[0]
        return Violation(f"{len(left)} of the messages sent were not received. The first one is from rank {sender} to "
                         f"rank {receiver}, of shape {list(message.tensor.shape)}: {message.place}")
