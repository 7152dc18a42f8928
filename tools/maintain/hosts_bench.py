"""Trainings in turns on the three hosts of the test bed, which are unlike: what the measurements there share.

Each host has a copy of the folder of a case on its own disk; what a host leaves there is read. All trainings of a case
run one after the other, forked from the same processes: this file is also the script that these run.
"""

import tools_path  # noqa: F401  before launch

import concurrent.futures
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

from launch import ROOT, environment, modules_of

NODES = ("node0", "node1", "node2")
CLUSTER = ROOT / "cluster"
sys.path.append(str(CLUSTER))  # for the planner
BED = ROOT / "tools" / "testbed.sh"
PORT = 29500


def bed(*args) -> None:
    subprocess.run([BED, *map(str, args)], check=True, stdin=subprocess.DEVNULL)


def on_a_disk(path: pathlib.Path) -> pathlib.Path:
    """Where this machine sees `path` of the first host that has it."""
    shown = subprocess.run([BED, "show"], check=True, text=True, stdout=subprocess.PIPE).stdout
    disks = dict(line.split("=", 1) for line in shown.splitlines())["disks"]
    return next(found for node in NODES if (found := pathlib.Path(disks, node, *path.parts[1:])).exists())


def on_all_hosts(script, *args, timeout: float, ranks: tuple[int, ...] = (1, 1, 1)) -> str:
    """torchrun of `script` over the three hosts, so many ranks on each; what the first one printed."""
    processes = []
    for k, node in enumerate(NODES):
        # A host of one rank stays on a core, because a quota is partly lost whenever a process moves to another one:
        # the first one has a core for itself, if it does not need all of them.
        last = os.cpu_count() - 1
        cores = f"0-{last}" if ranks[k] > 1 else str(min(k - (ranks[0] > 1), last))
        command = [BED, "exec", node, "taskset", "-c", cores, sys.executable, "-m", "torch.distributed.run",
                   "--nnodes=3", f"--nproc-per-node={ranks[k]}", f"--node-rank={k}", "--master-addr=node0",
                   f"--master-port={PORT}", script, *map(str, args)]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(subprocess.Popen(command, env=environment(), **pipes))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outputs = [pool.submit(process.communicate) for process in processes]
        done, _ = concurrent.futures.wait(outputs, timeout, concurrent.futures.FIRST_COMPLETED)
        for output in done:  # the first host to end
            if processes[outputs.index(output)].returncode:
                time.sleep(5)  # the others' own reports
                for process in processes:
                    process.kill()
        outputs = [output.result()[0] for output in outputs]
    assert not any(process.returncode for process in processes), "\n".join(output[-3000:] for output in outputs)
    return outputs[0]


def note_ends() -> None:
    """From now on each training of this process notes in ends.txt of its run's folder when a step has ended."""
    from run.record import Record

    complete = Record.complete

    def complete_and_note(self, step) -> None:
        complete(self, step)
        with open(pathlib.Path(self.folder, "ends.txt"), "a") as file:
            file.write(f"{time.monotonic()}\n")

    Record.complete = complete_and_note


def rank_side(folder: pathlib.Path) -> None:
    """On each host: the trainings of jobs.json one after the other, each in a process of its own. It is forked when the
    slow libraries are imported. (In one process for all, each training leaves threads and memory in pieces behind:
    after twenty of them, a step took up to a quarter longer.)"""
    sys.path[0] = str(CLUSTER)
    note_ends()
    for name in "datasets", "transformers.models.auto":
        importlib.import_module(name)
    for job in json.loads((folder / "jobs.json").read_text()):
        if not (child := os.fork()):
            return train(job)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # this host's own; an idle rank has none


def train(job: dict) -> None:
    """One of them, with a rendezvous of its own."""
    flags, *others = job["flags"]
    os.environ.update(MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    if others:
        flags = job["flags"][int(os.environ["RANK"])]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    sys.argv = [str(CLUSTER / "train_distributed.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def predict(data: dict, size: int, pipelines, setting: dict) -> dict:
    """The plan of (ranks, layers, num_microbatches, perhaps tp_size) each, on the machines of cluster.json `data`."""
    with modules_of(9):
        from planning.machines import Candidate, Cluster, Pipeline, Setting
        from planning.report import as_plan
        from planning.search import Scored
        from planning.simulate import simulate
        from planning.units import of_ranks, of_units, with_parts

        cluster, setting, units, placed = Cluster(data), Setting(**setting), [], []
        for ranks, layers, number, *tp_size in pipelines:
            [tp_size] = tp_size or [1]
            groups = [tuple(ranks[k : k + tp_size]) for k in range(0, len(ranks), tp_size)]
            placed.append(Pipeline(tuple(range(len(units), len(units) + len(groups))), tuple(layers), number))
            units += groups
        candidate = Candidate(tuple(placed), size)
        scored = Scored(candidate, simulate(of_units(with_parts(cluster), units), candidate, setting))
        return as_plan(cluster, of_ranks(scored, units), setting)


class Bench:
    """One case: its model, measured machines, candidates, and what was measured of them."""

    def __init__(self, case: dict, folder: pathlib.Path):
        self.case, self.folder, self.ranks = case, folder / "case", case.get("ranks", (1, 1, 1))
        self.model = self.folder / "model"
        shutil.copytree(ROOT / "assets" / "tiny_llama", self.model)
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, **self.case["model"]}))
        self.ports = iter(random.sample(range(20000, 29000), 500))

    def prepare(self) -> None:
        for node, speed in zip(NODES, self.case["speeds"]):
            bed("rate", node, self.case["rate"])
            bed("slow", node, speed)
        bed("own", self.folder)
        print(on_all_hosts(CLUSTER / "plan.py", "--measure", self.folder / "cluster.json", "--model_name", self.model,
                           "--micro_batch_size", self.case["sizes"], *self.case.get("flags", ()), timeout=300,
                           ranks=self.ranks), flush=True)
        shutil.copy(on_a_disk(self.folder / "cluster.json"), self.folder)
        self.cluster = json.loads((self.folder / "cluster.json").read_text())

    def plan(self, *flags) -> dict:
        """What plan.py finds best."""
        out = self.folder / "plan.json"
        done = subprocess.run([sys.executable, CLUSTER / "plan.py", self.folder / "cluster.json", "--out", out,
                               "--global_batch", str(self.case["batch"]), *flags], check=True, text=True,
                              stdout=subprocess.PIPE)
        print(done.stdout, flush=True)
        return json.loads(out.read_text())

    def predict(self, size: int, *pipelines: tuple, **setting) -> dict:
        return predict(self.cluster, size, pipelines, setting)

    def by_plan(self, name: str, plan: dict) -> list:
        """The flags of a training by this plan."""
        (self.folder / f"{name}.json").write_text(json.dumps(plan))
        return ["--plan", self.folder / f"{name}.json"]

    def train(self, runs: list[tuple[str, list]]) -> str:
        """Trains each of (name, flags) in turn; what the first host printed.

        Where there are flags for each host, all of them train at the same time, each by itself; their runs are name_0,
        name_1 and name_2.
        """
        folders = ["--log_dir", self.folder / "runs", "--checkpoint_dir", self.folder / "checkpoints"]
        common = ["--model_name", self.model, *folders, *self.case.get("flags", ())]
        jobs = []
        for name, flags in runs:
            at_once = {f"{name}_{k}": own for k, own in enumerate(flags)} if type(flags[0]) is list else {name: flags}
            jobs.append({"port": next(self.ports), "flags": [[*map(str, (*common, *own, "--run_name", run))]
                                                             for run, own in at_once.items()]})
        (self.folder / "jobs.json").write_text(json.dumps(jobs))
        bed("own", self.folder)
        return on_all_hosts(__file__, self.folder, timeout=3000, ranks=self.ranks)


if __name__ == "__main__":
    rank_side(pathlib.Path(sys.argv[1]))
