"""The same check on real processes, which torchrun starts: try.py check NAME --torchrun.

    torchrun --nproc_per_node 4 exercises/on_processes.py exercises/mine/NAME.py

What the check runs on as many ranks as there are processes, these processes do over gloo. What it runs on other numbers
of ranks stays in one process.
"""

import datetime
import os
import pathlib
import sys
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "exercises"), str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from attempt import Attempt  # noqa: E402
from catalogue import judge, load  # noqa: E402
from lab import baton  # noqa: E402
from lab.thread_ranks import World  # noqa: E402

TIMEOUT = datetime.timedelta(seconds=15)  # for ranks that wait for each other


class Processes(World):
    """Stands for a World: this process is one of the ranks. It has no log, so messages are not counted."""

    def run(self, program, timeout=60):
        results = [None] * self.size
        with mock.patch.multiple(dist, destroy_process_group=mock.Mock()):  # train.py leaves; the check goes on
            dist.all_gather_object(results, program(dist.get_rank()))
        return results


class AttemptOnProcesses(Attempt):
    in_one_process = False

    def world(self, size: int) -> World:
        return Processes(size) if size == dist.get_world_size() else World(size)

    def score(self, what, value, best):
        """Nothing is counted here."""

    def train(self, size, flags, ours=False, prepare=None):
        def before(modules, rank):
            if size == dist.get_world_size():
                modules.process_group_manager.init_process_group = mock.Mock()  # it has joined already
            if prepare:
                prepare(modules, rank)

        trained = super().train(size, flags, ours, before)
        if size == dist.get_world_size():  # a process has watched its own rank
            found = [None] * size
            dist.all_gather_object(found, [each[dist.get_rank()] for each in (trained.gradients, trained.weights)])
            for rank, (gradients, weights) in enumerate(found):
                trained.gradients[rank], trained.weights[rank] = gradients, weights
        return trained


def main(path: pathlib.Path) -> int:
    one, baton.READER = load()[path.stem], path.resolve().parent
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)  # what a check draws is the same in all processes
    verdict = judge(one, path, AttemptOnProcesses)
    if not verdict.is_right:
        print(f"rank {dist.get_rank()} of the processes: {verdict.message}", file=sys.stderr, flush=True)
    return int(not verdict.is_right)


if __name__ == "__main__":
    code = main(pathlib.Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # without waiting for ranks that have failed
