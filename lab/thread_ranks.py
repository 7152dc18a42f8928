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

from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from lab.baton import Handle, Violation, place
from lab.rank_collectives import Collectives, Event, Group, described, same_bits

INTEGER_POISON = 99  # what a tensor of integers holds until its message is there


NOT_HERE = ("reduce", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor",
            "all_to_all", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list")


class Send:
    """A message from its sender's side."""

    def __init__(self, rank: int, tensor: torch.Tensor, arrival: int):
        self.rank, self.tensor, self.arrival, self.place = rank, tensor, arrival, place()
        self.content, self.handle, self.is_matched, self.is_taken = tensor.detach().clone(), None, False, False

    def check_unchanged(self) -> None:
        if not self.handle.waited and not same_bits(self.tensor, self.content):
            raise Violation(f"rank {self.rank} changed a tensor while it was being sent: {self.place}. Wait for the "
                            "send first, or send a copy.")

    def let_go(self) -> None:
        """A run of many steps does not keep what both sides are done with."""
        if self.is_taken and self.handle.waited:
            self.content = None


class SendHandle(Handle):
    """Nothing says earlier than wait() that a send is completed, as over gloo: it may always take that long."""

    def is_completed(self) -> bool:
        return self.waited


class Receive:
    """A message from its receiver's side."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.place, self.message = tensor, place(), None


class P2POp:
    """Stands for torch.distributed.P2POp: a send or a receive for batch_isend_irecv."""

    def __init__(self, op: Callable, tensor: torch.Tensor, peer: int | None = None, group=None, tag: int = 0,
                 group_peer: int | None = None):
        self.post = lambda: op(tensor, peer, group, tag, group_peer)


class World(Collectives):
    """`size` ranks that communicate. After run(), `events` is the log and `rounds` says when the last message ended."""

    def __init__(self, size: int):
        super().__init__(size)
        self.sends_until, self.receives_until = [0] * size, [0] * size  # in rounds
        self.groups: list[Group] = []
        self.num_groups, self.num_own = [0] * size, [0] * size  # that each rank has made, and that it is in
        self.local_groups: dict[tuple, Group] = {}  # (ranks, number) -> a group that its members alone make
        self.sent: list[Send] = []  # and not waited for
        self.sends: dict[tuple, list[Send]] = defaultdict(list)  # (group, sender, receiver) -> not matched yet
        self.receives: dict[tuple, list[Receive]] = defaultdict(list)

    @property
    def rounds(self) -> int:
        return max((event.end for event in self.events), default=0)

    def num_bytes(self, rank: int | None = None) -> int:
        """What this rank, or all of them, have sent."""
        return sum(event.num_bytes for event in self.events if event.kind != "receive" and rank in (None, event.rank))

    def run(self, program: Callable[[int], object], timeout: float = 60) -> list:
        with mock.patch.multiple(
                dist, **{name: self.refuse(name) for name in NOT_HERE}), mock.patch.multiple(
                dist, P2POp=P2POp, init_process_group=mock.Mock(), destroy_process_group=mock.Mock(),
                get_rank=lambda group=None: self.group(group).rank(),
                get_world_size=lambda group=None: self.group(group).size(),
                get_global_rank=lambda group, rank: group.ranks[rank],
                get_process_group_ranks=lambda group: [*self.group(group).ranks],
                get_backend=lambda group=None: "gloo", is_initialized=lambda: True,
                send=lambda *args, **kwargs: self.isend(*args, **kwargs).wait() and None,
                recv=lambda *args, **kwargs: self.irecv(*args, **kwargs).wait() and None,
                batch_isend_irecv=lambda operations: [operation.post() for operation in operations],
                monitored_barrier=lambda group=None, *args, **kwargs: self.barrier(group),
                **{name: getattr(self, name) for name in (
                    "new_group", "new_subgroups_by_enumeration", "isend", "irecv", "barrier", "all_reduce",
                    "all_gather", "all_gather_object", "all_to_all_single", "broadcast")}):
            return super().run(program, timeout)

    def refuse(self, name: str) -> Callable:
        def call(*args, **kwargs):
            raise Violation(f"rank {self.rank} calls {name}, which these ranks in one process do not have: use another "
                            f"collective, or messages. {place()}")

        return call

    def new_group(self, ranks=None, timeout=None, backend=None, use_local_synchronization=False, **options):
        """All ranks make all groups in the same order, also those without themselves. With use_local_synchronization
        the members alone make a group: they wait for one that has their ranks, and as many groups before it.
        """
        ranks, rank = tuple(range(self.size) if ranks is None else ranks), self.rank
        if use_local_synchronization and rank not in ranks:
            return None
        if use_local_synchronization:
            group = self.local_groups.setdefault((ranks, self.num_own[rank]), Group(self, ranks))
            self.meet("new_group", group, (), None, 0, 0, lambda given: None)
        else:
            number = self.num_groups[rank]
            self.num_groups[rank] += 1
            if number == len(self.groups):
                self.groups.append(Group(self, ranks))
            if (group := self.groups[number]).ranks != ranks:
                raise Violation(f"rank {rank} makes a group of the ranks {[*ranks]}, where another rank has made one "
                                f"of {[*group.ranks]}: all ranks have to make all groups, in the same order. {place()}")
        self.num_own[rank] += rank in ranks
        return group if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def new_subgroups_by_enumeration(self, lists, timeout=None, **options) -> tuple[Group | None, list]:
        groups = [self.new_group(ranks) for ranks in lists]
        return next((group for group in groups if isinstance(group, Group)), None), groups

    # Messages

    def peer(self, what: str, peer: int | None, group: Group, group_peer: int | None, tensor, tag: int) -> int:
        """The other side's global rank."""
        self.check_tensor(tensor)
        if tag:
            raise Violation(f"rank {self.rank} uses the tag {tag}: messages between two ranks arrive in the order in "
                            f"which they are sent, so leave it out. {place()}")
        if peer is None and group_peer in range(group.size()):
            peer = group.ranks[group_peer]
        if peer not in group.ranks or peer == self.rank:
            raise Violation(f"rank {self.rank} wants to {what} rank {peer if peer is not None else group_peer} in the "
                            f"group of the ranks {[*group.ranks]}: choose another of these ranks. {place()}")
        return peer

    def isend(self, tensor: torch.Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0,
              group_dst: int | None = None) -> Handle:
        group, rank = self.group(group), self.rank
        peer = self.peer("send to", dst, group, group_dst, tensor, tag)
        if any(receive.tensor.data_ptr() == tensor.data_ptr() for (_, _, receiver), receives in self.receives.items()
               for receive in receives if receiver == rank and receive.tensor.numel()):
            raise Violation(f"rank {rank} sends a tensor whose content has not arrived yet: wait for the receive first."
                            f" {place()}")
        self.sends_until[rank] = max(self.sends_until[rank], self.clocks[rank]) + 1
        message = Send(rank, tensor, self.sends_until[rank])
        message.details = *described((tensor.shape, tensor.dtype)), next(self.numbers)
        self.log(Event(rank, "send", group.ranks, peer, tensor.nbytes, self.sends_until[rank], *message.details,
                       *[next(self.moments)] * 2))
        self.sent.append(message)

        def finish() -> None:
            message.handle.waited = False
            message.check_unchanged()
            message.handle.waited, message.tensor = True, None  # whoever has sent it may let go of it
            self.sent.remove(message)
            message.let_go()
            self.clocks[rank] = max(self.clocks[rank], message.arrival)

        message.handle = SendHandle(self, f"send to rank {peer}, shape {list(tensor.shape)}", lambda: [peer],
                                    lambda: message.is_matched, finish)
        self.sends[group, rank, peer].append(message)
        self.match(group, rank, peer)
        return message.handle

    def irecv(self, tensor: torch.Tensor, src: int | None = None, group: Group | None = None, tag: int = 0,
              group_src: int | None = None) -> Handle:
        group, rank = self.group(group), self.rank
        peer = self.peer("receive from", src, group, group_src, tensor, tag)
        receive, posted = Receive(tensor), next(self.moments)
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else INTEGER_POISON)

        def finish() -> None:
            message = receive.message
            message.check_unchanged()
            self.receives_until[rank] = max(self.receives_until[rank] + 1, message.arrival)
            self.clocks[rank] = max(self.clocks[rank], self.receives_until[rank])
            self.log(Event(rank, "receive", group.ranks, peer, tensor.nbytes, self.receives_until[rank],
                           *message.details, posted, next(self.moments)))
            tensor.detach().copy_(message.content.view_as(tensor))
            message.is_taken = True
            message.let_go()

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

    def check_end_of_rank(self, rank: int) -> None:
        for (_, sender, receiver), receives in self.receives.items():
            if receiver == rank and receives:
                raise Violation(f"rank {rank} ends, and what it was to receive from rank {sender} has not come: "
                                f"{receives[0].place}")
        for message in self.sent:
            if message.rank == rank:  # what was waited for is not kept
                raise Violation(f"rank {rank} ends, and has not waited for what it sends: call wait() of the handle. "
                                f"{message.place}")

    def check_end(self) -> Violation | None:
        if len(set(self.num_groups)) > 1:
            return Violation(f"the ranks have made unlike numbers of groups, by rank: {self.num_groups}")
        for (group, _), entries in self.collectives.items():
            if missing := [rank for rank in group.ranks if rank not in entries]:
                (kind, *_), _, where, _ = next(iter(entries.values()))
                return Violation(f"ranks {missing} have left out the {kind} of the ranks {[*group.ranks]}: {where}")
        return None
