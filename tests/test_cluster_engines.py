"""Other launchers than torchrun, as docs/LAUNCHERS.md shows them: the same losses to the last digit.

Each test is skipped where its launcher is not installed: pip install -c constraints.txt -e '.[engines]', and
apt-get install openmpi-bin mpich.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from lab.launch import ROOT, environment, losses, torchrun

BIN = pathlib.Path(sys.executable).parent
COMMON = "--dtype float64 --device cpu --num_hidden_layers 2 --seq_len 16".split()
TRAIN = ["cluster/train_distributed.py", *COMMON, "--batch_size", "1", "--equal_shares"]
RUNS = {  # name -> number of ranks, and scripts that run one after the other
    "step 8": (8, [["step8_pipeline_parallel_1f1b/train.py", *COMMON, *"--tp_size 2 --pp_size 2 --dp_size 2".split(),
                       *"--micro_batch_size 1 --gradient_accumulation_steps 2 --max_tokens 192".split()]]),
    "step 9": (3, [["step9_heterogeneous_pp/train.py", *COMMON, "--pipelines", "2;1,1",
                       *"--num_microbatches 2,2 --micro_batch_size 1 --max_tokens 192".split()]]),
    "resume": (3, [[*TRAIN, "--gradient_accumulation", "2", "--max_steps", steps, "--resume", "auto"]
                      for steps in ("2", "4")]),
}


def block_of_page(start: str, end: str) -> str:
    """What docs/LAUNCHERS.md has from `start` to `end`."""
    return re.search(rf"{start}.*?(?={end})", (ROOT / "docs" / "LAUNCHERS.md").read_text(), re.S)[0]


def command_line(launcher: str, folder: pathlib.Path, num_ranks: int, script: list) -> list:
    """What one types. Skips the test where the launcher is missing."""
    if launcher == "torchrun":
        return torchrun(num_ranks, *script)
    if launcher == "TorchX":
        pytest.importorskip("torchx", reason="no TorchX here: pip install -c constraints.txt -e '.[engines]'")
        return ["torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", f"1x{num_ranks}", "--script", script[0], "--",
                *script[1:]]
    if launcher == "Ray":
        pytest.importorskip("ray", reason="no Ray here: pip install -c constraints.txt -e '.[engines]'")
        (folder / "on_ray.py").write_text(block_of_page('"""Starts torchrun', "END\n"))
        return [sys.executable, folder / "on_ray.py", "--nproc_per_node", num_ranks, *script]
    root = ["--allow-run-as-root", "--oversubscribe"] if launcher == "Open MPI" else []
    for program in filter(shutil.which, (f"mpirun.{launcher.lower().replace(' ', '')}", "mpirun")):
        said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        if {"Open MPI": "Open MPI", "MPICH": "HYDRA"}[launcher] in said:
            as_rank = block_of_page("as_rank='", "\n").removeprefix("as_rank='").removesuffix("'")
            return [program, *root, "-n", num_ranks, "bash", "-c", as_rank, "bash", *script]
    pytest.skip(f"no {launcher} here: apt-get install openmpi-bin mpich")


def train(folder: pathlib.Path, launcher: str, name: str, **env: str) -> list[float]:
    """The losses of RUNS[name], run by the launcher."""
    num_ranks, scripts = RUNS[name]
    for script in scripts:
        own = ["--log_dir", folder / "logs", "--run_name", "run"]
        own += ["--checkpoint_dir", folder / "checkpoints"] * (name == "resume")
        words = list(map(str, command_line(launcher, folder, num_ranks, [*script, *own])))
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL,
                              env=environment(PATH=f"{BIN}:{os.environ['PATH']}", MASTER_ADDR="127.0.0.1",
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


@pytest.mark.slow(drawn=2)
@pytest.mark.parametrize("launcher, name", [
    ("TorchX", "resume"), ("Open MPI", "step 8"), ("MPICH", "step 9"), ("Ray", "step 9")])
def test_the_same_losses(launcher, name, expected, tmp_path):
    assert train(tmp_path, launcher, name, RAY_ADDRESS="local") == expected(name)
