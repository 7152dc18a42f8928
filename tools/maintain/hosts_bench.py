"""Trainings in turns on the three hosts of the test bed, which are unlike.

Each host has a copy of the folder of a case on its own disk; what a host leaves there is read. All trainings of a case
run one after the other, forked from the same processes: this file is also the script that these run.

A step is timed from the end of the one before to its own, by the clock of a host that takes part: all that happens
between two steps is in it, but for evaluations. The steps before work has settled do not count, nor does the last one
of a run, behind which a checkpoint is saved.
"""

import importlib
import json
import os
import pathlib
import random
import runpy
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from typing import NamedTuple

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.launch import ROOT, metrics, modules_of
from maintain.bed import NODES, SSH_CONFIG, on_disk, testbed
from maintain.launcher import Launch, write_hosts
from maintain.make_tiny_llama import resized

CLUSTER = ROOT / "cluster"
sys.path.append(str(CLUSTER))  # for the planner
COUNTED = 3  # steps of a training


class Candidate(NamedTuple):
    """A training by its flags; or, with a list of flags for each host, three at the same time, each host by itself."""

    flags: list
    settled: int = 1  # steps, or rounds of local steps, until work has settled
    counted: int = COUNTED
    local_steps: int = 1

    @property
    def is_apart(self) -> bool:
        return isinstance(self.flags[0], list)


def note_ends() -> None:
    """From now on each training of this process notes in ends.txt of its run's folder when a step has ended."""
    from run.evaluation import Evaluator
    from run.record import Record

    log, evaluate, evaluated = Record.log, Evaluator.evaluate, [0.0]

    def log_and_note(self, *step) -> None:
        log(self, *step)
        with open(pathlib.Path(self.folder, "ends.txt"), "a") as file:
            file.write(f"{time.monotonic() - sum(evaluated)}\n")

    def evaluate_and_time(self) -> float:
        start = time.monotonic()
        loss = evaluate(self)
        evaluated.append(time.monotonic() - start)
        return loss

    Record.log, Evaluator.evaluate = log_and_note, evaluate_and_time


def rank_side(folder: pathlib.Path) -> None:
    """On each host: the jobs of jobs.json one after the other, each in a process of its own. It is forked when the slow
    libraries are imported. (In one process for all, each training leaves threads and memory in pieces behind: after
    twenty of them, a step took up to a quarter longer.) A host stays on a core, because a quota is partly lost whenever
    a process moves to another one."""
    sys.path[0] = str(CLUSTER)
    os.sched_setaffinity(0, {min(int(os.environ["RANK"]), os.cpu_count() - 1)})
    note_ends()
    for name in "datasets", "transformers.models.auto":
        importlib.import_module(name)
    for job in json.loads((folder / "jobs.json").read_text()):
        if not (child := os.fork()):
            return run_job(job)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # this host's own; an idle rank has none


def run_job(job: dict) -> None:
    """One of them, with a rendezvous of its own."""
    flags, *others = job["flags"]
    os.environ.update(MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    if others:
        flags = job["flags"][int(os.environ["RANK"])]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    sys.argv = [str(CLUSTER / job["script"]), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Bench:
    """One case: `speeds` (percent of a core), `rate` (of the network), `model` (changes of the tiny Llama), `sizes` (of
    micro-batches, to choose from) and perhaps `flags`; its measured machines as `cluster`."""

    def __init__(self, case: dict, folder: pathlib.Path):
        self.case, self.folder, self.model = case, folder / "case", resized(folder / "case", **case["model"])

    def run(self, script: str, jobs: list[list[list]], timeout: float) -> str:
        """Runs the script once for each of `jobs`: the flags of all hosts, or of each. What the hosts printed."""
        ports = random.sample(range(20000, 29000), len(jobs))
        (self.folder / "jobs.json").write_text(json.dumps([
            {"script": script, "port": port, "flags": [[*map(str, words)] for words in flags]}
            for port, flags in zip(ports, jobs)]))
        testbed("own", self.folder)
        hosts = write_hosts(self.folder, *(f"{node} python={sys.executable}" for node in NODES))
        code, text = Launch(hosts, "--env", "OMP_NUM_THREADS=1", "--", "tools/maintain/hosts_bench.py", self.folder,
                            options=f"-F {SSH_CONFIG}").end(timeout)
        assert code == 0, text[-9000:]
        return text

    def slow_down(self) -> None:
        for node, speed in zip(NODES, self.case["speeds"]):
            testbed("rate", node, self.case["rate"])
            testbed("slow", node, speed)

    def prepare(self) -> None:
        self.slow_down()
        print(self.run("plan.py", [[["--measure", self.folder / "cluster.json", "--model_name", self.model,
                                     "--micro_batch_size", self.case["sizes"], *self.case.get("flags", ())]]], 300))
        self.cluster = json.loads(self.find("cluster.json").read_text())

    def find(self, name: str) -> pathlib.Path:
        """Where this machine sees a file of the first host that has it."""
        return next(path for node in NODES if (path := on_disk(node, self.folder / name)).exists())

    def plan(self, batch: int, *flags) -> dict:
        """What plan.py finds best for so many samples a step."""
        measured, out = self.folder / "cluster.json", self.folder / "plan.json"
        measured.write_text(json.dumps(self.cluster))
        done = subprocess.run([sys.executable, CLUSTER / "plan.py", measured, "--out", out, "--global_batch",
                               str(batch), *flags], check=True, text=True, stdout=subprocess.PIPE)
        print(done.stdout, flush=True)
        return json.loads(out.read_text())

    def predict(self, size: int, *pipelines: tuple, **setting) -> dict:
        """The plan of (ranks, layers, num_microbatches) each, in micro-batches of `size` samples."""
        with modules_of(9):
            from planning.machines import Candidate as Planned
            from planning.machines import Cluster, Pipeline, Setting
            from planning.plan_file import as_plan
            from planning.simulate import simulate

            cluster, setting = Cluster(self.cluster), Setting(**setting)
            planned = Planned(tuple(Pipeline(*each) for each in pipelines), size)
            return as_plan(cluster, simulate(cluster, planned, setting))

    def by_plan(self, name: str, plan: dict) -> list:
        """The flags of a training by this plan."""
        (self.folder / f"{name}.json").write_text(json.dumps(plan))
        return ["--plan", self.folder / f"{name}.json"]

    def train(self, candidates: dict[str, Candidate], rounds: int) -> dict[str, list[float]]:
        """Trains all in turns, round by round. The seconds of the steps that count, of each host where it is apart."""
        common = ["--model_name", self.model, "--log_dir", self.folder / "runs", "--checkpoint_dir",
                  self.folder / "checkpoints", *self.case.get("flags", ())]
        jobs = []
        for k in range(rounds):
            for name, each in candidates.items():
                runs = [(f"{name} {host}", own) for host, own in enumerate(each.flags)] if each.is_apart else [
                    (name, each.flags)]
                steps = (each.settled + each.counted + 1) * each.local_steps
                jobs.append([[*common, *own, "--max_steps", steps, "--run_name", f"{run}_{k}"] for run, own in runs])
        said = self.run("train_distributed.py", jobs, 3000)
        print(*(line for line in said.splitlines() if "s of a " in line or "work moves" in line), sep="\n")
        return self.read_seconds(candidates, rounds)

    def read_seconds(self, candidates: dict[str, Candidate], rounds: int) -> dict[str, list[float]]:
        """All but those that train apart, or take local steps, have to have the loss of the same samples."""
        seconds, losses = {}, {}
        for name, candidate in candidates.items():
            for run in [f"{name} {host}" for host in range(3)] if candidate.is_apart else [name]:
                for k in range(rounds):
                    path = self.find(f"runs/{run}_{k}/ends.txt")
                    ends = [float(line) for line in path.read_text().split()][candidate.settled - 1 : -1]
                    seconds.setdefault(run, []).extend(end - start for start, end in pairwise(ends))
                if not candidate.is_apart and candidate.local_steps == 1:
                    losses[run] = metrics(path.parent.parent, path.parent.name)[0]["loss"]
        assert not losses or max(losses.values()) - min(losses.values()) < 0.05, f"not the same step: {losses}"
        return seconds


if __name__ == "__main__":
    rank_side(pathlib.Path(sys.argv[1]))
