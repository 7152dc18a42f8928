"""Other launchers than torchrun: the same losses to the last digit, and Ray's lost workers and nodes.

Each test is skipped where its launcher is not installed: pip install -c constraints.txt -e '.[engines]', and
apt-get install openmpi-bin mpich.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from launch import ROOT, environment, fork, losses, metrics, torchrun
from processes import Command, eventually

BIN = pathlib.Path(sys.executable).parent
COMMON = "--dtype float64 --device cpu --num_hidden_layers 2 --seq_len 16".split()
TRAIN = ["cluster/train_distributed.py", *COMMON, "--batch_size", "1", "--equal_shares"]
RUNS = {  # name -> number of ranks, of which so many have to stay together, and scripts that run one after the other
    "step 8": (8, 2, [["step8_pipeline_parallel_1f1b/train.py", *COMMON, *"--tp_size 2 --pp_size 2 --dp_size 2".split(),
                       *"--micro_batch_size 1 --gradient_accumulation_steps 2 --max_tokens 192".split()]]),
    "step 9": (3, 1, [["step9_heterogeneous_pp/train.py", *COMMON, "--pipelines", "2;1,1",
                       *"--num_microbatches 2,2 --micro_batch_size 1 --max_tokens 192".split()]]),
    "resume": (3, 1, [[*TRAIN, "--gradient_accumulation", "2", "--max_steps", steps, "--resume", "auto"]
                      for steps in ("2", "4")]),
}


def on_ray(num_ranks: int, neighbours: int, script: list, cpus: float, *more) -> list:
    pytest.importorskip("ray", reason="no Ray here: pip install -c constraints.txt -e '.[engines]'")
    return [sys.executable, "cluster/engines/launch_on_ray.py", "--num_workers", num_ranks, "--tp_size", neighbours,
            "--cpus_per_worker", cpus, *more, "--", *script]


def command_line(launcher: str, num_ranks: int, neighbours: int, script: list) -> list:
    """What one types. Skips the test where the launcher is missing."""
    if launcher == "torchrun":
        return torchrun(num_ranks, *script)
    if launcher == "TorchX":
        pytest.importorskip("torchx", reason="no TorchX here: pip install -c constraints.txt -e '.[engines]'")
        return ["torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", f"1x{num_ranks}", "--script", script[0], "--",
                *script[1:]]
    if launcher == "Ray":
        return on_ray(num_ranks, neighbours, script, 0.25 if num_ranks > 4 else 0.5)
    root = ["--allow-run-as-root", "--oversubscribe"] if launcher == "Open MPI" else []
    for program in filter(shutil.which, (f"mpirun.{launcher.lower().replace(' ', '')}", "mpirun")):
        said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        if {"Open MPI": "Open MPI", "MPICH": "HYDRA"}[launcher] in said:
            return [program, *root, "-n", num_ranks, "cluster/engines/mpi_rank.sh", *script]
    pytest.skip(f"no {launcher} here: apt-get install openmpi-bin mpich")


def train(folder: pathlib.Path, launcher: str, name: str, **env: str) -> list[float]:
    """The losses of RUNS[name], run by the launcher."""
    num_ranks, neighbours, scripts = RUNS[name]
    for script in scripts:
        own = ["--log_dir", folder / "logs", "--run_name", "run"]
        own += ["--checkpoint_dir", folder / "checkpoints"] * (name == "resume")
        words = list(map(str, command_line(launcher, num_ranks, neighbours, [*script, *own])))
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL,
                              env=environment(PATH=f"{BIN}:{os.environ['PATH']}", PYTHON=sys.executable,
                                              MASTER_PORT=str(20000 + os.getpid() % 10000), **env))
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return losses(folder / "logs", "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """expected(name): torchrun's losses of this run, which is made once."""
    found = {}

    def expected(name: str) -> list[float]:
        if name not in found:
            found[name] = train(tmp_path_factory.mktemp("torchrun"), "torchrun", name)
        return found[name]

    return expected


@pytest.fixture(scope="module")
def nodes():
    """Three nodes of Ray on this machine, with 2, 1 and 1 cores: (the cluster, those of 1 core)."""
    pytest.importorskip("ray", reason="no Ray here: pip install -e '.[engines]'")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # paths of sockets are short
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "temp_dir": folder})
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("launcher, name", [
    ("TorchX", "resume"), ("Open MPI", "step 8"), ("MPICH", "step 9"), ("Ray", "step 9")])
def test_the_same_losses(launcher, name, expected, tmp_path):
    assert train(tmp_path, launcher, name, RAY_ADDRESS="local") == expected(name)


class Ray(Command):
    """train_distributed.py on three workers, which Ray places on two nodes at least. Its steps take some 0.3 s."""

    FLAGS = ["--dtype", "float64", "--device", "cpu", "--batch_size", "1", "--equal_shares", "--max_steps", "30"]

    def __init__(self, cluster, folder: pathlib.Path, max_restarts: int):
        self.logs, self.rows = folder / "logs", folder / "logs" / "run" / "metrics.jsonl"
        script = [TRAIN[0], *self.FLAGS, "--gradient_accumulation", "4", "--save_every", "2", "--resume", "auto",
                  "--log_dir", self.logs, "--run_name", "run", "--checkpoint_dir", folder / "checkpoints"]
        super().__init__(on_ray(3, 1, script, 1, "--max_restarts", max_restarts), folder, RAY_ADDRESS=cluster.address)

    def pids(self) -> list[int]:
        """Of the ranks, which are children of Ray's actors."""
        pattern = f"^[^ ]*python[^ ]* {TRAIN[0]} .*{self.logs}"
        return list(map(int, subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()))

    def loses(self, step: int, lose) -> str:
        """The line that says so, within 20 s of lose(), after which no process of the attempt is left."""
        self.wait_for_step(self.rows, step)
        before, pids = self.output().count("launch_on_ray:"), self.pids()
        lose()
        assert eventually(lambda: self.output().count("launch_on_ray:") > before, 20), self.output()
        assert len(pids) > 1 and eventually(lambda: not set(pids) & set(self.pids()), 5)
        return re.findall("launch_on_ray: (.*)", self.output())[before]


@pytest.mark.slow
def test_a_lost_worker_ends_all_and_the_rest_goes_on(nodes, tmp_path):
    """A rank is killed; then two of three nodes are lost: the losses are those of a run that loses nothing; then a rank
    again, of a run without restarts.
    """
    (cluster, small), runs = nodes, []
    try:
        for folder, restarts in (("first", 2), ("second", 0)):
            (tmp_path / folder).mkdir()
            runs.append(run := Ray(cluster, tmp_path / folder, restarts))
            said = run.loses(4, lambda: os.kill(run.pids()[-1], signal.SIGKILL))
            assert re.fullmatch(rf"rank \d on \S+ was killed by SIGKILL: all .*, {restarts} restarts are left", said)
            if restarts:
                said = run.loses(8, lambda: [cluster.remove_node(node, allow_graceful=False) for node in small])
                assert re.fullmatch(r"rank \d on \S+ is lost: all ranks have been ended, 1 restarts are left", said)
            assert eventually(lambda: run.process.poll() is not None, 150) and not run.pids(), run.output()
            assert run.process.returncode == (0 if restarts else 1), run.output()
            small[:] = [cluster.add_node(num_cpus=1) for _ in small] if restarts else small
    finally:
        for run in runs:
            run.kill()
    fork(9, 1, *Ray.FLAGS, "--gradient_accumulation", "12", "--log_dir", tmp_path / "one", "--run_name", "run",
         "--checkpoint_dir", tmp_path / "c", script=ROOT / TRAIN[0])
    rows, expected = metrics(runs[0].logs, "run"), metrics(tmp_path / "one", "run")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, expected)) <= 1e-9


@pytest.mark.parametrize("flags, message", [
    ("--num_workers 9 -- train.py", "room for 8 of 9 groups of --tp_size neighbours"),
    ("--num_workers 4 --tp_size 3 -- train.py", "--num_workers 4 must be a multiple of --tp_size 3"),
    ("--num_workers 2 -- cluster/train_distributed.py --device cpu --seq_len 99999", "--seq_len 99999 is more than the"),
    ("--num_workers 2 -- step8_pipeline_parallel_1f1b/train.py --pp_size 3", "needs 3 processes, but 2 run"),
])
@pytest.mark.slow
def test_mistakes_on_ray(flags, message, nodes):
    words = f"{sys.executable} cluster/engines/launch_on_ray.py --cpus_per_worker 0.5 --max_restarts 3 {flags}"
    done = subprocess.run(words.split(), cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env=environment(RAY_ADDRESS=nodes[0].address))
    said = done.stdout + done.stderr
    assert done.returncode and message in said and "Traceback" not in said and "restarts are" not in said, said


@pytest.mark.parametrize("variables, message", [
    ({}, "neither Open MPI nor MPICH has numbered this process"),
    (dict(PMI_RANK="0", PMI_SIZE="2", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1"), "give them MASTER_ADDR"),
])
def test_mistakes_with_mpirun(variables, message):
    done = subprocess.run(["cluster/engines/mpi_rank.sh", "train.py"], cwd=ROOT, capture_output=True, text=True,
                          env=environment(**variables))
    assert done.returncode == 2 and message in done.stderr
