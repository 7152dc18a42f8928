"""How much of the gradients' all-reduce hides behind backward? `torchrun ... tools/overlap.py STEP/train.py ARGS`

Runs a step's train.py unchanged, notes when each all-reduce of gradients starts and ends and when backward ends, and
prints for rank 0, as medians over the optimizer steps after the first: how many all-reduces, how long they were under
way while backward still ran, how long after it, and for how long backward itself stood still in them.
"""

import argparse
import os
import runpy
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

all_reduce, backward = dist.all_reduce, torch.Tensor.backward
current: dict = {"spans": [], "blocked": 0.0, "backward_end": 0.0}
finished: list[dict] = []


def timed_all_reduce(tensor, *args, async_op=False, **kwargs):
    start = time.perf_counter()
    handle = all_reduce(tensor, *args, async_op=True, **kwargs)
    if tensor.numel() <= 2:  # the loss, the gradient norm; the largest memory and time
        handle.wait()
        return None
    span = [start, None]
    current["spans"].append(span)
    handle.get_future().then(lambda _: span.__setitem__(1, time.perf_counter()))
    if async_op:
        return handle
    handle.wait()
    current["blocked"] += time.perf_counter() - start
    return None


def timed_backward(tensor, *args, **kwargs):
    start = time.perf_counter()
    backward(tensor, *args, **kwargs)
    current["backward_start"], current["backward_end"] = start, time.perf_counter()


def step_ended(_optimizer, _args, _kwargs) -> None:
    finished.append({**current})
    current.update(spans=[], blocked=0.0)


def report() -> None:
    rows = []
    for step in finished[1:]:
        end = step["backward_end"]
        hidden = sum(min(done, end) - min(start, end) for start, done in step["spans"])
        exposed = max([done - end for _, done in step["spans"]] + [0.0])
        rows.append((len(step["spans"]), hidden, exposed, step["blocked"], end - step["backward_start"]))
    count, hidden, exposed, blocked, length = (statistics.median(column) for column in zip(*rows))
    print(f"{count:.0f} all-reduces a step")
    print(f"{length * 1e3:.1f} ms: the last micro-batch's backward, of which it stood still for {blocked * 1e3:.1f} ms")
    print(f"{hidden * 1e3:.1f} ms of all-reduces during it, {exposed * 1e3:.1f} ms after it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", metavar="STEP/train.py", help="the script to run, followed by its own arguments")
    args, arguments = parser.parse_known_args()
    sys.argv = [args.train, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    dist.all_reduce, torch.Tensor.backward = timed_all_reduce, timed_backward
    register_optimizer_step_pre_hook(step_ended)
    runpy.run_path(sys.argv[0])["main"]()
    if int(os.environ["RANK"]) == 0:
        report()
