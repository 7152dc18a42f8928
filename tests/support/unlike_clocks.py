"""Runs a script unchanged on ranks whose clocks disagree: `unlike_clocks.py SCRIPT FLAGS`, as three ranks.

Rank 1's clock was started 5 s before rank 0's and runs 100 ppm fast, as a machine's may. Rank 2's was started eleven
days after and runs 10 % slow, more than any does: the step is short, and an error of its rate has to show within it.
"""

import os
import runpy
import sys
import time

AHEAD, RATE = {1: (5.0, 1.0001), 2: (-1e6, 0.9)}.get(int(os.environ["RANK"]), (0.0, 1.0))  # seconds; of the true rate
true_clock, start = time.perf_counter_ns, time.perf_counter_ns()


def unlike_clock() -> int:
    return start + int(AHEAD * 1e9) + int((true_clock() - start) * RATE)


if __name__ == "__main__":
    time.perf_counter_ns = unlike_clock
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
