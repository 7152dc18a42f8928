"""Which ranks see the same folder, and files that travel between hosts that share no disk.

Three machines that mount one network disk are one Disk. Three with a disk each are three, and what is on one of them
has to be sent to be seen on another. Which it is, is found out by writing: each rank leaves a small file in the folder
and looks whose files are there. What an earlier start has left there has other names.
"""

import contextlib
import copy
import os
import uuid
from typing import NamedTuple

import torch
import torch.distributed as dist

from checkpoints.files import CHUNK
from machine_facts import home_rank
from utils import UserError


class Disk(NamedTuple):
    """`ranks` see one folder; the first of them does what is done once a disk."""

    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.ranks[0]


class Disks:
    """All disks of a run. `mine` is that of this rank, `home` that of home_rank(). All ranks make one together.

    `group`: a gloo group of all ranks, in which nobody else communicates. Raises UserError, on every rank, where a rank
    can't write to the folder.
    """

    def __init__(self, folder: str):
        self.folder, self.rank = folder, dist.get_rank()
        self.group = dist.new_group(backend="gloo")
        stem, error = os.path.join(folder, f".seen-{self.gather(uuid.uuid4().hex)[0]}-by-"), None
        try:
            try:
                os.makedirs(folder, exist_ok=True)
                with open(f"{stem}{self.rank}", "w") as file:
                    file.write(str(self.rank))
            except OSError as problem:
                error = f"{folder} can't be written on rank {self.rank} ({problem.strerror})"
            if errors := [error for error in self.gather(error) if error]:
                raise UserError(f"{errors[0]}: choose another --checkpoint_dir")
            seen = tuple(rank for rank in range(dist.get_world_size()) if os.path.exists(f"{stem}{rank}"))
            self.all = sorted({Disk(ranks) for ranks in self.gather(seen)})
        finally:
            with contextlib.suppress(OSError):
                os.remove(f"{stem}{self.rank}")
        self.mine = next(disk for disk in self.all if self.rank in disk.ranks)
        self.home = next(disk for disk in self.all if home_rank() in disk.ranks)
        self.leads = self.mine.leader == self.rank

    def for_a_thread(self) -> "Disks":
        """The same disks with another group, for a thread that communicates while others do. Collective."""
        same = copy.copy(self)
        same.group = dist.new_group(backend="gloo")
        return same

    def gather(self, value) -> list:
        """Every rank's value, on every rank. Collective."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def send(self, path: str, to: Disk) -> None:
        """Sends a file that is on this rank's disk. The other disk's leader calls receive()."""
        dist.send(torch.tensor(os.path.getsize(path)), to.leader, group=self.group)
        with open(path, "rb", buffering=0) as file:
            while part := file.read(CHUNK):
                dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), to.leader, group=self.group)

    def receive(self, path: str, source: Disk) -> str | None:
        """Writes the file that `source`'s leader sends. Returns what went wrong, if the disk did not take it."""
        left, error = torch.zeros((), dtype=torch.int64), None
        dist.recv(left, source.leader, group=self.group)
        left = left.item()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "wb", buffering=0)
        except OSError as problem:
            file, error = None, f"{path}: {problem.strerror}"
        while left:  # also after an error, because the sender does not know of it
            part = torch.empty(min(CHUNK, left), dtype=torch.uint8)
            dist.recv(part, source.leader, group=self.group)
            left -= len(part)
            try:
                view = memoryview(part.numpy())
                while error is None and len(view):
                    view = view[file.write(view):]
            except OSError as problem:
                error = f"{path}: {problem.strerror}"
        if file:
            if error is None:
                os.fsync(file.fileno())
            file.close()
        return error

    def transfer(self, name: str, folder: str, source: Disk, to: Disk) -> str | None:
        """Copies folder/name from one disk to another. All leaders call it, in one order; it concerns two of them."""
        path = os.path.join(folder, name)
        if self.rank == source.leader:
            self.send(path, to)
        elif self.rank == to.leader:
            return self.receive(path, source)
        return None
