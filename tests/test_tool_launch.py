"""launch.py: what forked jobs are given, that they run at the same time, and that none of them can hang a test."""

import os
import subprocess
import sys
import uuid

import pytest
from launch import ROOT, environment, fork, start_fork
from processes import processes


@pytest.fixture
def script(tmp_path):
    def script(text: str):
        path = tmp_path / f"{uuid.uuid4().hex}.py"
        path.write_text(f"import os, pathlib, sys, time\nrank = int(os.environ['RANK'])\n{text}")
        return path

    return script


def test_the_environment_has_no_way_out(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    found = environment(A="b")
    assert found["HF_HUB_OFFLINE"] == found["OMP_NUM_THREADS"] == "1" and found["A"] == "b" and "PATH" in found
    assert not [name for name in found if name.lower().endswith("_proxy")]


def test_without_affinity():
    """As on macOS: what the tests and the tools import counts processors in another way there."""
    script = ("import os\nif hasattr(os, 'sched_getaffinity'):\n    del os.sched_getaffinity\n"
              "import launch, measure_course\nassert launch.SLOTS >= 4")
    subprocess.run([sys.executable, "-c", script], check=True, env=environment(PYTHONPATH=f"{ROOT}/tools{os.pathsep}{ROOT}/tools/maintain"))


def test_jobs_run_at_the_same_time(script, tmp_path):
    """Two jobs that wait for each other, in groups of their own: each sums up its own ranks alone."""
    path = script("""
import torch, torch.distributed as dist
mine, other, folder, value = *sys.argv[1:4], float(sys.argv[4])
dist.init_process_group("gloo")
pathlib.Path(folder, f"{mine}{rank}").touch()
while not all(pathlib.Path(folder, f"{other}{r}").exists() for r in (0, 1)):
    time.sleep(0.01)
total = torch.tensor(value)
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
""")
    jobs = [start_fork(1, 2, *words, script=path) for words in (("a", "b", tmp_path, 1), ("b", "a", tmp_path, 10))]
    assert [job.result().stdout.split() for job in jobs] == [["2.0"] * 2, ["20.0"] * 2]


def test_the_first_failure_ends_the_other_ranks(script):
    marker = uuid.uuid4().hex
    path = script("sys.exit(7) if rank == 1 else time.sleep(1000)")
    done = fork(1, 3, script=path, check=False, env={"MARKER": marker})
    assert done.returncode == 7 and not processes(marker)
    with pytest.raises(AssertionError, match="exit code 7"):
        fork(1, 3, script=path)


def test_a_rank_that_hangs_shows_where(script):
    done = fork(1, 2, script=script("def waits():\n    time.sleep(1000)\nwaits()"), check=False, timeout=2)
    assert done.returncode != 0 and "Timeout" in done.stderr and "in waits" in done.stderr


def test_output_exit_codes_and_stdin(script):
    path = script("print('out', rank, sys.argv[1:]); print('err', file=sys.stderr); assert not sys.stdin.read()\n"
                  "import atexit\natexit.register(print, 'end')")
    done = fork(1, 1, "a b", 3, script=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out 0 ['a b', '3']\nend\n", "err\n")
    assert fork(1, 1, script=script("raise KeyError(rank)"), check=False).returncode == 1
