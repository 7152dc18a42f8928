"""The same check on real processes, which torchrun starts: try.py check NAME --torchrun.

    torchrun --nproc_per_node 4 exercises/on_processes.py exercises/mine/NAME.py

What the check runs on as many ranks as there are processes, these processes do over gloo. What it runs on other numbers
of ranks stays in one process.
"""

import datetime
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "exercises"), str(ROOT / "tools")]

import torch.distributed as dist  # noqa: E402

from attempt import Attempt  # noqa: E402
from catalogue import judge, load  # noqa: E402
from ranks import World  # noqa: E402

TIMEOUT = datetime.timedelta(seconds=15)  # for ranks that wait for each other


class AttemptOnProcesses(Attempt):
    def run(self, size, program, ours=False):
        if size != dist.get_world_size() or dist.get_backend() != "gloo":
            return super().run(size, program, ours)
        rank, results = dist.get_rank(), [None] * size
        dist.all_gather_object(results, program((self.ours if ours else self.theirs).load(), rank))
        return results, World(size)  # without a log: messages are counted in one process


def main(path: pathlib.Path) -> int:
    one = load()[path.stem]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    verdict = judge(one, path, AttemptOnProcesses)
    if not verdict.is_right:
        print(f"rank {dist.get_rank()} of the processes: {verdict.message}", file=sys.stderr, flush=True)
    return int(not verdict.is_right)


if __name__ == "__main__":
    code = main(pathlib.Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # without waiting for ranks that have failed
