"""Trainings in turns on the three hosts of the test bed, which are unlike: what the measurements there share.

Each host has a copy of the folder of a case on its own disk; what a host leaves there is read. All trainings of a case
run in the same processes, one after the other: this file is also the script that these run.
"""

import tools_path  # noqa: F401  before launch

import atexit
import concurrent.futures
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


def on_all_hosts(script, *args, timeout: float) -> str:
    """torchrun of `script` over the three hosts; what the first one printed."""
    processes = []
    for rank, node in enumerate(NODES):
        # Each host stays on a core, because a quota is partly lost whenever the process moves to another one.
        core = str(min(rank, os.cpu_count() - 1))
        command = [BED, "exec", node, "taskset", "-c", core, sys.executable, "-m", "torch.distributed.run",
                   "--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=node0",
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
    from training.record import Record

    complete = Record.complete

    def complete_and_note(self, step) -> None:
        complete(self, step)
        with open(pathlib.Path(self.folder, "ends.txt"), "a") as file:
            file.write(f"{time.monotonic()}\n")

    Record.complete = complete_and_note


def rank_side(folder: pathlib.Path) -> None:
    """On each host: the trainings of jobs.json one after the other, each with a rendezvous of its own."""
    world = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    at_exit, register = [], atexit.register
    sys.path[0] = str(CLUSTER)
    note_ends()

    def register_or_keep(function, *args, **kwargs):
        """Keeps what the training would do at the end of its process, which here goes on with the next job."""
        is_kept = function.__name__ == "tell_idle"
        return at_exit.append(function) if is_kept else register(function, *args, **kwargs)

    atexit.register = register_or_keep
    for job in json.loads((folder / "jobs.json").read_text()):
        flags, *others = job["flags"]
        os.environ.update(world, MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
        if others:
            flags = job["flags"][int(world["RANK"])]
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
        sys.argv = [str(CLUSTER / "train_distributed.py"), *flags]
        try:
            runpy.run_path(sys.argv[0])["main"]()
        except SystemExit as ended:  # an idle rank
            assert not ended.code, ended.code
        while at_exit:  # tells idle ranks that the training has ended
            at_exit.pop()()
        facts = sys.modules["machine_facts"]
        facts.forget_ranks()  # the next job numbers them in another way
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # this host's own; an idle rank has none


class Bench:
    """One case: its model, measured machines, candidates, and what was measured of them."""

    def __init__(self, case: dict, folder: pathlib.Path):
        self.case, self.folder = case, folder / "case"
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
                           "--micro_batch_size", self.case["sizes"], *self.case.get("flags", ()), timeout=300),
              flush=True)
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
        """The plan of (machines, layers, num_microbatches) each."""
        with modules_of(9):
            from planning.machines import Candidate, Cluster, Pipeline, Setting
            from planning.report import as_plan
            from planning.search import Scored
            from planning.simulate import simulate

            cluster, candidate = Cluster(self.cluster), Candidate(tuple(Pipeline(*p) for p in pipelines), size)
            setting = Setting(**setting)
            return as_plan(cluster, Scored(candidate, simulate(cluster, candidate, setting)), setting)

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
        return on_all_hosts(__file__, self.folder, timeout=3000)


if __name__ == "__main__":
    rank_side(pathlib.Path(sys.argv[1]))
