"""How long do processes take to join and to make the grid: step 8 as it is here beside that of other commits.

    python tools/maintain/measure_start.py COMMIT [COMMIT ...]     ten minutes on two cores

8, 16, 32 and 64 processes (tp 2, pp 2) over gloo; the candidates take turns. In medians over the rounds: the slowest
rank's seconds, a rank's seconds of the processor, and what the ranks ask of the store, and how many groups they are
asked to make. Last, one rank of 16,384 makes its grid (tp 8, pp 16) over torch's "fake" group, without other ranks.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import mean, median

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

import torch.distributed as dist

from lab.launch import ROOT, STEPS
from lab.program import Program
from lab.rank_alone import alone
from maintain.turns import table

asked = []  # of the store and of new_group()
stores = []  # torch itself does not keep what is Python's of a store


def noting(name: str, call: Callable) -> Callable:
    return lambda *args, **more: asked.append(name) or call(*args, **more)


class NotingStore(dist.Store):
    def __init__(self, store: dist.Store):
        super().__init__()
        stores.append(self)
        for name in ("set", "get", "add", "wait"):
            setattr(self, name, noting(name, getattr(store, name)))


def fork(program: Callable, *args) -> int:
    if (child := os.fork()) == 0:
        program(*args)
        os._exit(0)
    return child


def serve(writing: int) -> None:
    """The store, in a process of its own as torchrun has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, f"{store.port}\n".encode())
    signal.pause()


def start_rank(writing: int, rank: int, folder: pathlib.Path, begin: float) -> None:
    os.environ["RANK"], rendezvous = str(rank), dist.rendezvous
    dist.rendezvous = lambda *args, **more: ((NotingStore(store), *it) for store, *it in rendezvous(*args, **more))
    manager = Program("", folders=(folder,)).load().process_group_manager
    time.sleep(max(begin - time.time(), 0))
    start, busy = time.perf_counter(), time.process_time()
    manager.init_process_group("gloo", 300, {"flag": 1})
    manager.ProcessGroupManager(int(os.environ["WORLD_SIZE"]) // 4, 2, 2)
    groups = asked.count("group")
    found = time.perf_counter() - start, time.process_time() - busy, len(asked) - groups, groups
    os.write(writing, (" ".join(map(str, found)) + "\n").encode())
    dist.barrier()


def run(folder: pathlib.Path, size: int) -> tuple[float, ...]:
    """A row's figures, of `size` processes that begin together."""
    reading, writing = os.pipe()
    server = fork(serve, writing)
    with os.fdopen(reading) as file:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=file.readline().strip(), WORLD_SIZE=str(size),
                          TORCHELASTIC_USE_AGENT_STORE="True")
        begin = time.time() + 0.5 + size / 50
        children = [fork(start_rank, writing, rank, folder, begin) for rank in range(size)]
        assert not any(os.waitpid(child, 0)[1] for child in children), "a rank has failed"
        seconds, busy, *counts = zip(*(map(float, file.readline().split()) for _ in children))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    os.close(writing)
    return max(seconds), mean(busy), *map(max, counts)


def main():
    dist.new_group = dist.distributed_c10d.new_group = noting("group", dist.new_group)
    rows = []
    with tempfile.TemporaryDirectory() as base:
        folders = {commit: pathlib.Path(base, commit) for commit in sys.argv[1:]}
        for commit, folder in folders.items():
            folder.mkdir()
            for name in ("process_group_manager.py", "utils.py"):
                path = f"{commit}:{STEPS['8'].name}/{name}"
                (folder / name).write_bytes(subprocess.check_output(["git", "show", path], cwd=ROOT))
        folders["here"] = STEPS["8"]
        for size, rounds in ((8, 15), (16, 11), (32, 9), (64, 7)):
            turns = [[run(folder, size) for folder in folders.values()] for _ in range(rounds)]
            for name, found in zip(folders, zip(*turns)):
                seconds, busy, *counts = map(median, zip(*found))
                rows.append([size, name, f"{seconds:.2f}", f"{busy:.3f}", *map(int, counts)])
        for name, folder in folders.items():
            with alone(8191, 16384).joined():
                dist.init_process_group("gloo")
                asked.clear()
                busy = time.process_time()
                Program("", folders=(folder,)).load().process_group_manager.ProcessGroupManager(128, 16, 8)
                rows.append(["16,384", name, "", f"{time.process_time() - busy:.3f}", "", len(asked)])
    print(table(["ranks", "step 8", "seconds", "of the processor", "asked of the store", "groups"], rows))


if __name__ == "__main__":
    main()
