"""Which ranks see the same folder, and files that travel between hosts that share no disk.

Three machines that mount one network disk are one Disk. Three with a disk each are three, and what is on one of them
has to be sent to be seen on another. Which it is, is found out by writing: each rank leaves a small file in the folder
and looks whose files are there. What an earlier start has left there has other names.
"""

import contextlib
import errno
import os
import traceback
import uuid
from collections.abc import Iterable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from ranks.collectives import gather
from ranks.files import CHUNK, File
from ranks.lost import FOREVER, is_lost_peer
from ranks.placement import home_rank
from ranks.progress import progress
from utils import UserError

CANT_WRITE = "can't write {}: make room, or choose another --checkpoint_dir or --log_dir"


class Disks:
    """All disks of a run, each as the ranks that see it, of which the first does what is done once a disk: it leads.

    `mine` is the disk of this rank, `home` that of home_rank(). All ranks make one together.
    Nobody else communicates in its gloo group. Raises UserError, on every rank, where a rank can't write to the folder.
    `needs_room`: of this rank. One that is in the middle of a training goes on also while its disk is full. `group`:
    of other Disks, which these communicate in as well.
    """

    def __init__(self, folder: str, message: str = CANT_WRITE, needs_room: bool = True, group=None):
        self.folder, self.rank = folder, dist.get_rank()
        self.group = group or dist.new_group(backend="gloo", timeout=FOREVER)
        stem = os.path.join(folder, f".seen-{self.gather(uuid.uuid4().hex)[0]}-by-")
        try:
            with self.together(message):
                os.makedirs(folder, exist_ok=True)
                with open(f"{stem}{self.rank}", "w") as file:
                    file.write(str(self.rank) * needs_room)
            seen = tuple(rank for rank in range(dist.get_world_size()) if os.path.exists(f"{stem}{rank}"))
            self.all = sorted({*self.gather(seen)})
        finally:
            with contextlib.suppress(OSError):
                os.remove(f"{stem}{self.rank}")
        self.mine = next(disk for disk in self.all if self.rank in disk)
        self.home = next(disk for disk in self.all if home_rank() in disk)
        self.leads = self.mine[0] == self.rank

    def gather(self, value) -> list:
        """As collectives.gather, in the group of the disks. Collective."""
        return gather(value, self.group)

    def share(self, value, source: int):
        """The value of rank `source`, on every rank. Collective."""
        values = [value]
        dist.broadcast_object_list(values, source, group=self.group)
        return values[0]

    @contextlib.contextmanager
    def together(self, message: str = "{}"):
        """As pgm.together: where it fails on one rank, this raises UserError on every rank. Collective.

        `message`: what it says of an OSError, with that in it. Of a rank that is lost the others hear by themselves.
        """
        with pgm.together(self.group):
            try:
                yield
            except OSError as problem:
                raise UserError(message.format(f"{problem.filename or self.folder}: {problem.strerror}")) from None
            except Exception as problem:
                if isinstance(problem, (UserError, torch.OutOfMemoryError)) or is_lost_peer(problem):
                    raise
                raise UserError(message.format(traceback.format_exc())) from None  # a fault of ours: the others wait

    def copy(self, folder: str, copies: Iterable[tuple[str, int, int]], message: str = "{}") -> None:
        """Copies files of `folder` between disks: (name, from, to), by the disks' leaders, the same list on all ranks.

        A file appears under its name when it is whole. Collective. Raises UserError where one can't be read, or
        a disk does not take it.
        """
        error = None
        for name, source, target in copies:
            path = os.path.join(folder, name)
            if self.rank == source:
                error = self.send(path, target) or error
            elif self.rank == target:
                error = self.receive(path, source) or error
        with self.together(message):
            if error:
                raise error

    def send(self, path: str, to: int) -> OSError | None:
        """Sends a file that is on this rank's disk. Rank `to` calls receive(). Returns what went wrong.

        The other rank hears of it as well, in place of the rest of the file.
        """
        end, left = None, 0
        try:
            with open(path, "rb", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size
                with progress(f"sending {os.path.basename(path)}", total=left, unit="B") as bar:
                    while part := file.read(CHUNK):
                        dist.send_object_list([part], to, group=self.group)
                        left -= len(part)
                        bar.update(len(part))
            if left:
                raise OSError(errno.EIO, "its size has changed while it was sent", path)
        except OSError as error:
            end = error
        dist.send_object_list([end], to, group=self.group)
        return end

    def receive(self, path: str, source: int) -> OSError | None:
        """Writes the file that rank `source` sends. Returns what went wrong, here or there."""
        file, received = File(f"{path}.unfinished"), [b""]
        with progress(f"receiving {os.path.basename(path)}", unit="B") as bar:
            while isinstance(received[0], bytes):  # also after an error, because the sender does not know of it
                file.put(received[0])
                bar.update(len(received[0]))
                dist.recv_object_list(received, source, group=self.group)
        try:
            file.close()
            if received[0] is None:
                os.replace(file.path, path)
                return None
            error = received[0]
        except OSError as problem:
            error = problem
        with contextlib.suppress(OSError):
            os.remove(file.path)
        return error
