"""How long does an elastic run stand still when a host is lost? On the three hosts of the test bed; needs root.

    tools/testbed.sh up
    python tools/maintain/speed_of_recovery.py --rounds 10
    python tools/maintain/speed_of_recovery.py --watch            what the watch costs, while nothing happens

A round takes a host away, waits until the others have made three steps, gives it back, and waits until it takes part
again. The figure is the time from the loss to the next finished step, less the median step after it: by the clock of
this machine, as the lines of the steps arrive. Which host it is changes from round to round, so the first is among
them.
"""

import tools_path  # noqa: F401  before launch

import argparse
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from launch import ROOT, Help
from bed import NODES, SSH_CONFIG, testbed
from elastic_bed import kill_all, switch_on
from launcher import write_hosts

FLAGS = ["--seq_len", "16", "--dtype", "float64", "--batch_size", "1", "--num_hidden_layers", "4", "--device", "cpu",
         "--equal_shares", "--save_every", "10", "--max_steps", "4000", "--log_dir", "runs"]
CASES = {  # name -> (how a host is lost, flags)
    "killed, copies live": (kill_all, ["--num_microbatches", "6"]),
    "killed, a checkpoint is read": (kill_all, ["--num_microbatches", "6", "--pipelines", "2,1,1|2,2"]),
    "cable cut, copies live": (lambda node: testbed("cut", node), ["--num_microbatches", "6"]),
}


class Training:
    """A run of which the moments are known at which its lines arrive: `steps` are (moment, number)."""

    def __init__(self, folder: pathlib.Path, *words: str, launcher: tuple[str, ...] = ("--elastic", "2:3")):
        hosts = write_hosts(folder, *(f"{node} python={sys.executable}" for node in NODES))
        environment = {**os.environ, "SSH_OPTIONS": f"-F {SSH_CONFIG}", "OMP_NUM_THREADS": "1"}
        self.steps, self.ranks, self.lines = [], 0, []
        self.process = subprocess.Popen(
            [ROOT / "cluster" / "launch_cluster.sh", hosts, *launcher, "--", "cluster/train_distributed.py", *FLAGS,
             *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"(\d) ranks over", line):
                self.ranks, self.steps = int(found[1]), []
            elif found := re.search(r"\| step (\d+)/", line):
                self.steps.append((time.perf_counter(), int(found[1])))

    def trains(self, ranks: int, steps: int, seconds: float = 90) -> None:
        """Waits until so many ranks have made so many steps."""
        end = time.monotonic() + seconds
        while self.ranks != ranks or len(self.steps) < steps:
            if time.monotonic() > end or self.process.poll() is not None:
                sys.exit("".join(self.lines[-30:]) + f"error: {ranks} ranks did not train within {seconds} s")
            time.sleep(0.01)

    def median_step(self) -> float:
        moments = [moment for moment, _ in self.steps]
        return statistics.median(b - a for a, b in zip(moments, moments[1:]))

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(60)


def recover(name: str, rounds: int) -> None:
    lose, words = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        run, seconds = Training(pathlib.Path(folder), *words, "--run_name", name.replace(" ", "-").replace(",", "")), []
        for number in range(rounds):
            run.trains(3, 12)
            node, lost_at = NODES[number % 3], time.perf_counter()
            lose(node)
            run.trains(2, 6)
            seconds.append(run.steps[0][0] - lost_at - run.median_step())
            switch_on(node)
        run.stop()
    print(f"{name}: median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s, of "
          f"{len(seconds)}", flush=True)


def cost_of_watch(rounds: int) -> None:
    """Elastic and plain runs take turns; the ratio of their median steps."""
    found = {"elastic": [], "plain": []}
    for number in range(rounds):
        for how, launcher in ("elastic", ("--elastic", "2:3")), ("plain", ()):
            with tempfile.TemporaryDirectory() as folder:
                run = Training(pathlib.Path(folder), "--num_microbatches", "2,2,2", "--run_name", f"{how}{number}",
                               launcher=launcher)
                run.trains(3, 150)
                found[how].append(run.median_step())
                run.stop()
    ratios = [a / b for a, b in zip(found["elastic"], found["plain"])]
    print(f"a step of an elastic run takes {statistics.median(ratios):.3f} of a plain one's "
          f"({min(ratios):.3f} to {max(ratios):.3f}; {1e3 * statistics.median(found['plain']):.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--only", default="", help="cases whose names begin with this")
    parser.add_argument("--watch", action="store_true", help="measure what the watch costs instead")
    args = parser.parse_args()
    if args.watch:
        return cost_of_watch(args.rounds)
    for name in CASES:
        if name.startswith(args.only):
            recover(name, args.rounds)


if __name__ == "__main__":
    main()
