"""The folder of a run: one run at a time has it, and what it does not go on from gets another name."""

import contextlib
import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable

from checkpoints.files import set_latest, step_of
from ranks.disks import CANT_WRITE, Disks
from ranks.lost import is_elastic
from utils import UserError


class Lock:
    """The file .lock on each disk of a folder, which one run at a time has open until its process ends.

    `before`: run_id and launch of the last run that had this disk's, as write() has left them; {} of none. All ranks
    make one together. Raises UserError, on every rank, where another run has it. After a loss, the processes before
    may take a moment.
    """

    def __init__(self, disks: Disks):
        self.disks, self.file, self.before = disks, None, {}
        with disks.together(CANT_WRITE):
            if disks.leads:
                self.file = open(os.path.join(disks.folder, ".lock"), "a+", encoding="utf-8")
                if not self.is_free():
                    raise UserError(f"a run in progress keeps its checkpoints in {disks.folder}: choose another "
                                    "--run_name")
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self.file.seek(0)
                    record = json.load(self.file)
                    self.before = {name: str(record[name]) for name in ("run_id", "launch")}

    def is_free(self) -> bool:
        """Whether this process has it now, or within a while."""
        until = time.monotonic() + (30 if is_elastic() else 1)
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > until:
                    return False
            time.sleep(0.2)

    def close(self) -> None:
        """Another run may have the folder."""
        if self.file:
            self.file.close()

    def write(self, run_id: str, launch: str | None) -> None:
        """Leaves on each disk which run has it. Collective. Raises UserError, on every rank, where one is full."""
        record = {"run_id": run_id, "launch": launch}
        with self.disks.together(CANT_WRITE):
            if self.file and self.before != record:
                self.file.truncate(0)
                self.file.write(json.dumps(record))
                self.file.flush()


def move_aside(disks: Disks, is_old: Callable[[str], bool], newest: str | None) -> None:
    """Checkpoints that this run does not go on from are kept under another name. `newest`: what `latest` names then.

    Collective. Raises UserError.
    """
    folder = disks.folder
    with disks.together(CANT_WRITE):
        names = sorted(os.listdir(folder)) if disks.leads else []
        if old := [name for name in names if step_of(name) >= 0 and is_old(name)]:
            os.makedirs(other := next(each for i in itertools.count(1) if not os.path.exists(each := f"{folder}.{i}")))
            for name in {*old, "latest"} & {*names}:
                os.rename(os.path.join(folder, name), os.path.join(other, name))
            if newest in names:
                set_latest(folder, newest)
            print(f"checkpoints of an older run of the same name are now in {other}", flush=True)
