"""How long does a run stand still when a host is lost, or layers move? On the three hosts of the test bed; needs root.

    tools/testbed.sh up
    python tools/maintain/speed_of_recovery.py --rounds 10
    python tools/maintain/speed_of_recovery.py --watch            what the watch costs, while nothing happens
    python tools/maintain/speed_of_recovery.py --moves --rounds 6 layers move between machines, over two kinds of links

A round takes a host away, waits until the others have made three steps, gives it back, and waits until it takes part
again. The figure is the time from the loss to the next finished step, less the median step after it: by the clock of
this machine, as the lines of the steps arrive. Which host it is changes from round to round, so the first is among
them.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import os
import pathlib
import re
import shutil
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

    def __init__(self, folder: pathlib.Path, *words: str, launcher: tuple[str, ...] = ("--elastic", "2:3"),
                 script: str = "cluster/train_distributed.py"):
        hosts = write_hosts(folder, *(f"{node} python={sys.executable}" for node in NODES))
        environment = {**os.environ, "SSH_OPTIONS": f"-F {SSH_CONFIG}", "OMP_NUM_THREADS": "1"}
        self.steps, self.ranks, self.lines, self.moments = [], 0, [], {}  # by step, also of generations before
        self.process = subprocess.Popen(
            [ROOT / "cluster" / "launch_cluster.sh", hosts, *launcher, "--", script, *words], cwd=ROOT,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"(\d) ranks over", line):
                self.ranks, self.steps = int(found[1]), []
            elif found := re.search(r"\| step (\d+)/", line):
                self.steps.append((time.perf_counter(), int(found[1])))
                self.moments[int(found[1])] = time.perf_counter()

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
        run_name = name.replace(" ", "-").replace(",", "")
        run, seconds = Training(pathlib.Path(folder), *FLAGS, *words, "--run_name", run_name), []
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
                run = Training(pathlib.Path(folder), *FLAGS, "--num_microbatches", "2,2,2", "--run_name",
                               f"{how}{number}", launcher=launcher)
                run.trains(3, 150)
                found[how].append(run.median_step())
                run.stop()
    ratios = [a / b for a, b in zip(found["elastic"], found["plain"])]
    print(f"a step of an elastic run takes {statistics.median(ratios):.3f} of a plain one's "
          f"({min(ratios):.3f} to {max(ratios):.3f}; {1e3 * statistics.median(found['plain']):.1f} ms)")


def pause_of_moves(rounds: int) -> None:
    """Three stages, of which the first gives a layer to the second, and this one to the third, or back: after every
    sixth step. Both layers travel at the same time, each with its weights and AdamW's averages."""
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder, "model")
        shutil.copytree(ROOT / "assets" / "tiny_llama", model)
        config = {**json.loads((model / "config.json").read_text()), "hidden_size": 512, "intermediate_size": 1408,
                  "head_dim": 64, "num_hidden_layers": 8}
        (model / "config.json").write_text(json.dumps(config))
        num_bytes = 12 * 512 * (2 * 512 + 2 * 256 + 3 * 1408 + 2)  # of a layer
        for rate, a_second in ("off", None), ("100mbit", 12.5e6):
            testbed("rate", "all", rate)
            run = Training(pathlib.Path(folder), "--model_name", str(model), "--seq_len", "16", "--batch_size", "1",
                           "--device", "cpu", "--max_steps", "1000", "--log_dir", "runs", "--pipelines", "3,3,2",
                           "--num_microbatches", "4", "--replan", "auto", "--run_name", f"moves-{rate}",
                           launcher=(), script="tests/support/replan_always.py")
            run.trains(3, 1)
            while len(run.moments) < 6 * rounds + 4 and run.process.poll() is None:
                time.sleep(0.1)
            run.stop()
            times = [run.moments[step + 1] - run.moments[step] for step in sorted(run.moments)[:-1]]
            moves, step = times[5 : 6 * rounds : 6], statistics.median(times)
            link = f", {num_bytes / a_second:.2f} s by the link" if a_second else ""
            pauses = sorted(move - step for move in moves)
            print(f"layers of {num_bytes / 1e6:.1f} MB move, links {rate}{link}: median "
                  f"{statistics.median(pauses):.2f} s, {pauses[0]:.2f} to {pauses[-1]:.2f} s, of {len(pauses)}; a step "
                  f"takes {step:.2f} s", flush=True)
    testbed("rate", "all", "off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--only", default="", help="cases whose names begin with this")
    parser.add_argument("--watch", action="store_true", help="measure what the watch costs instead")
    parser.add_argument("--moves", action="store_true", help="measure the pauses of moves of layers instead")
    args = parser.parse_args()
    if args.watch or args.moves:
        return (cost_of_watch if args.watch else pause_of_moves)(args.rounds)
    for name in CASES:
        if name.startswith(args.only):
            recover(name, args.rounds)


if __name__ == "__main__":
    main()
