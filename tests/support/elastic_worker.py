"""A worker of an elastic run: counts all-reduces with the other ranks, and says each second how many they are.

    elastic_worker.py [--seconds S] [--save S] [--fail]

It ends with an error as soon as a rank is gone: at once where its connections are closed, and after PATIENCE seconds
where its cable is cut, by counters in a store. --seconds: it ends well by then. --save: seconds from SIGTERM until it
has "saved". --fail: rank 0 has a message for the user, and ends its torchrun.
"""

import argparse
import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

BEAT, PATIENCE = 0.5, 6.0  # seconds


def fail(reason: str) -> None:
    print(f"rank {dist.get_rank()}: {reason}", flush=True)
    os._exit(1)


def watch(rank: int, world_size: int) -> None:
    """Counts aloud, and listens to the others."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=datetime.timedelta(seconds=PATIENCE), wait_for_workers=False)
    heard = {}
    while True:
        try:
            store.add(f"beat/{rank}", 1)
            counts = {other: store.add(f"beat/{other}", 0) for other in range(world_size)}
        except RuntimeError as error:
            fail(f"rank 0 does not answer ({str(error).splitlines()[0]})")
        now = time.monotonic()
        for other, count in counts.items():
            if heard.setdefault(other, (count, now))[0] != count:
                heard[other] = count, now
            if now - heard[other][1] > PATIENCE:
                fail(f"rank {other} is silent")
        time.sleep(BEAT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--save", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    print("pids", os.getpid(), os.getppid(), flush=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    threading.Thread(target=watch, args=[rank, world_size], daemon=True).start()
    if args.fail:
        time.sleep(0 if rank == 0 else 8)
        print("error: --fail was given: leave it out", file=sys.stderr, flush=True)
        threading.Timer(1.0, os.kill, [os.getppid(), signal.SIGTERM]).start()
        sys.exit(2)
    start = said = time.monotonic()
    count = 0
    while True:
        total = torch.tensor([time.monotonic() < start + args.seconds], dtype=torch.float64)
        try:
            work = None if asked else dist.all_reduce(total, async_op=True)
            while not asked and not work.is_completed():  # Python's signal handlers run in between
                time.sleep(0.01)
            asked or work.wait()
        except RuntimeError as error:
            fail(f"a rank is gone ({str(error).splitlines()[0][-60:]})")
        if asked:
            time.sleep(args.save)
            print(f"rank {rank} saved after {time.monotonic() - asked[0]:.1f} s", flush=True)
            os._exit(0)
        if total.item() < world_size:  # somebody's time is over
            print("done", flush=True)
            os._exit(0)
        count += 1
        if time.monotonic() > said + 1:
            said = time.monotonic()
            print(f"world {world_size} after {count} sums", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
