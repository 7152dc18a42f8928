"""NCCL without a GPU: a model of its streams, in which what all ranks issue is carried out, or found to be a deadlock.

Each rank has a host, which runs the program, and streams, which carry out in order what the host has issued on them:

    compute           forward, backward, and each "wait", which holds up this stream until a transfer is done
    a communicator's  its transfers. A message is done when its send is at the head of the sender's stream and its
                      receive at the head of the receiver's, an all-reduce when it is at the head on all ranks.

A transfer starts after all that was issued before it on the compute stream, whose results it may send. The host waits
in .item() for the compute stream, in torch.cuda.synchronize() for all that its rank has issued, and where a
communicator is first used for the same, and then for the other ranks. It does not wait in handle.wait().

Recorder notes the operations of one rank; replay() carries out those of all ranks, or raises Deadlock.
"""

import contextlib
from collections import deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple
from unittest import mock

import torch


class Deadlock(AssertionError):
    """No rank can go on. The message says what each waits for."""


class Operation(NamedTuple):
    label: str
    stream: Hashable | None  # None: the host waits here
    needs: tuple[int, ...]  # numbers of the rank's operations that have to be done before
    meeting: tuple = ()  # equal on all ranks whose operations meet
    ranks: tuple[int, ...] = ()  # which these are


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)


class Handle:
    """Of a transfer, the operation `number`. The host is far ahead of it."""

    def __init__(self, recorder: "Recorder", number: int):
        self.recorder, self.number = recorder, number

    def wait(self) -> None:
        self.recorder.issue("wait", needs=[self.number])

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> "Handle":
        return self

    def then(self, callback) -> None:
        self.recorder.call_behind(self.number, callback)


class Event:
    """Is done as soon as all is done that the current stream was given before record()."""

    def __init__(self, recorder: "Recorder"):
        self.recorder, self.number = recorder, None

    def record(self) -> None:
        self.number = self.recorder.issue("event", self.recorder.current)

    def synchronize(self) -> None:
        self.recorder.block("synchronize an event", [self.number])


class Recorder:
    """Stands for torch.distributed on one rank, over NCCL, and notes what is issued.

    By default each pair of ranks of a group has a communicator for its messages, as torch makes them when they are
    first used. With `one_stream` the group has one for all that it does, as after init_process_group(device_id=...).
    """

    ReduceOp, ProcessGroup = torch.distributed.ReduceOp, Group

    def __init__(self, rank: int, world: Group, one_stream: bool = False):
        self.rank, self.world, self.one_stream = rank, world, one_stream
        self.operations: list[Operation] = []
        self.last: dict[Hashable, int] = {}  # stream -> the number of its last operation
        self.connected, self.current, self.num_groups = set(), "compute", 0

    def issue(self, label: str, stream: Hashable = "compute", needs: Iterable[int] = (), **meeting) -> int:
        """Notes an operation on a stream and returns its number."""
        self.operations.append(Operation(label, stream, tuple(needs), **meeting))
        self.last[stream] = len(self.operations) - 1
        return self.last[stream]

    def block(self, label: str, needs: Iterable[int]) -> None:
        """Notes that the host waits until these operations are done."""
        self.operations.append(Operation(label, None, tuple(needs)))

    def issued_on(self, stream: Hashable) -> list[int]:
        return [self.last[stream]] if stream in self.last else []

    def transfer(self, label: str, group: Group, ranks: tuple[int, ...], meeting: tuple) -> Handle:
        """Notes a transfer and returns its handle."""
        communicator = group if self.one_stream else (group, meeting[0], ranks)
        if not self.one_stream and communicator not in self.connected:
            self.connected.add(communicator)
            self.block(step := f"connect before {label}", self.last.values())  # to allocate buffers
            self.block(step, [self.issue(step, communicator, meeting=("connect",), ranks=ranks)])
        needs = self.issued_on("compute")
        return Handle(self, self.issue(label, communicator, needs, meeting=meeting, ranks=ranks))

    def call_behind(self, number: int, callback) -> None:
        """As torch calls what is to follow a transfer: at once, on a stream of its own that waits for the transfer."""
        self.current = ("behind", number)
        self.issue("wait", self.current, needs=[number])
        callback(None)
        self.current = "compute"

    def isend(self, tensor: torch.Tensor, peer: int, group: Group) -> Handle:
        pair, meeting = tuple(sorted((self.rank, peer))), ("message", self.rank, peer, tensor.shape)
        return self.transfer(f"send to {peer} in {group.name}", group, pair, meeting)

    def irecv(self, tensor: torch.Tensor, peer: int, group: Group) -> Handle:
        pair, meeting = tuple(sorted((self.rank, peer))), ("message", peer, self.rank, tensor.shape)
        return self.transfer(f"receive from {peer} in {group.name}", group, pair, meeting)

    def send(self, *args, **kwargs) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args, **kwargs) -> None:
        self.irecv(*args, **kwargs).wait()

    def all_reduce(self, tensor: torch.Tensor, op=None, group: Group | None = None, async_op: bool = False):
        group = group or self.world
        handle = self.transfer(f"all-reduce in {group.name}", group, group.ranks, ("all-reduce", tensor.shape))
        return handle if async_op else handle.wait()

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
        self.transfer(f"all-to-all in {group.name}", group, group.ranks, ("all-to-all", sent.shape)).wait()

    def get_backend(self) -> str:
        return "nccl"

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world.size()

    def new_group(self, ranks: Iterable[int], *_, **__) -> Group:
        """All ranks make equally many, so that a group has one number on all of its ranks."""
        self.num_groups += 1
        return Group(f"group {self.num_groups}", tuple(ranks))

    @contextlib.contextmanager
    def as_cuda(self):
        """Inside the block, torch.cuda and Tensor.item are this rank's, and torch.zeros makes CPU tensors."""
        fakes = {
            "is_initialized": lambda: True, "is_available": lambda: True,
            "synchronize": lambda device=None: self.block("synchronize the device", self.last.values()),
            "Event": lambda *args, **kwargs: Event(self)}
        zeros, to_list = torch.zeros, torch.Tensor.tolist

        def item(tensor):
            self.block("item", self.issued_on("compute"))
            return to_list(tensor)

        with (mock.patch.multiple(torch.cuda, **fakes), mock.patch.object(torch.Tensor, "item", item),
              mock.patch.object(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))):
            yield


class Rank:
    """One rank during the replay: what its host has still to do, its streams' queues, and what is done."""

    def __init__(self, operations: list[Operation]):
        self.todo, self.streams, self.done = deque(enumerate(operations)), {}, set()

    def run_host(self) -> None:
        """Issues operations up to one where the host has to wait."""
        while self.todo:
            number, operation = self.todo[0]
            if operation.stream is not None:
                self.streams.setdefault(operation.stream, deque()).append((number, operation))
            elif not self.done.issuperset(operation.needs):
                return
            self.todo.popleft()

    def head(self, stream: Hashable) -> Operation | None:
        """The stream's first operation, if it may start."""
        queue = self.streams.get(stream)
        return queue[0][1] if queue and self.done.issuperset(queue[0][1].needs) else None

    def waits_for(self) -> list[str]:
        host = [f"host at {self.todo[0][1].label}"] if self.todo else []
        return host + [queue[0][1].label for queue in self.streams.values() if queue]


def replay(programs: list[list[Operation]]) -> None:
    """Carries out the operations of each rank. Raises Deadlock where that is impossible."""
    ranks, moved = [Rank(operations) for operations in programs], True
    while moved:
        moved = False
        for rank in ranks:
            rank.run_host()
            for stream in rank.streams:
                while operation := rank.head(stream):
                    partners = [ranks[r] for r in operation.ranks] or [rank]
                    heads = [partner.head(stream) for partner in partners]
                    if any(head is None or head.meeting != operation.meeting for head in heads):
                        break
                    for partner in partners:
                        partner.done.add(partner.streams[stream].popleft()[0])
                    moved = True
    waits = [f"rank {r}: {'; '.join(rank.waits_for())}" for r, rank in enumerate(ranks) if rank.waits_for()]
    if waits:
        raise Deadlock("\n".join(["deadlock", *waits]))
