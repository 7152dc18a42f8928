"""slurm.sbatch: a job out of time is requeued, and one that is cancelled or ends is not. Without a Slurm: its programs
and torchrun are a few lines each. That a job which starts again goes on: test_cluster_starts.py.
"""

import signal

import pytest
from lab.launch import ROOT
from maintain.processes import eventually

SCRIPT = ROOT / "cluster" / "engines" / "slurm.sbatch"
PROGRAMS = {
    "scontrol": 'case $1 in show) printf "first\\nsecond\\n";; requeue) echo "REQUEUED $2";; esac',
    "squeue": 'cat "$STATE"',
    "scancel": 'kill -TERM "$(cat "$STATE.pid")"',  # of a step: its tasks get the signal
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >"$STATE.pid"; SLURM_NODEID=1 SLURM_NNODES=2 exec "$@"',
    "python": 'for word; do echo "word $word"; done; [[ -z $CODE ]] || exit "$CODE"\n'
              'trap "sleep 0.3; echo SAVED; exit 1" TERM; echo STARTED; while true; do sleep 0.1; done',
}


@pytest.fixture
def submit(command, tmp_path):
    """submit(state, *flags, **env): a job, of which Slurm says that it is in this state."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def submit(state: str, *flags, code: str = ""):
        (tmp_path / "state").write_text(f"{state}\n")
        return command(["env", f"PATH={tmp_path}:/usr/bin:/bin", "bash", SCRIPT, *flags], STATE=str(tmp_path / "state"),
                       PYTHON=str(tmp_path / "python"), CODE=code, SLURM_JOB_ID="10007", SLURM_JOB_NODELIST="x[1-2]",
                       SLURM_GPUS_ON_NODE="4")

    return submit


@pytest.mark.parametrize("state, is_requeued", [("RUNNING", True), ("COMPLETING", False)])
def test_a_job_that_is_told_to_stop(submit, state, is_requeued):
    """It saves first. Where the whole job is cancelled, the state tells."""
    job = submit(state, "--run_name", "a b")
    assert eventually(lambda: "STARTED" in job.output()), job.output()
    job.process.send_signal(signal.SIGTERM)
    printed = job.end(20)
    assert printed.count("SAVED") == 1 and ("REQUEUED 10007" in printed) == is_requeued, printed
    assert not is_requeued or printed.index("SAVED") < printed.index("REQUEUED")
    words = [line.removeprefix("word ") for line in printed.splitlines() if line.startswith("word ")]
    assert words == ["-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=4",
                     "--master-addr=first", "--master-port=20007", "cluster/train_distributed.py", "--resume", "auto",
                     "--run_name", "a b"]


@pytest.mark.parametrize("code", [0, 2])
def test_a_training_that_ends_is_not_requeued(submit, code):
    job = submit("RUNNING", code=str(code))
    assert "REQUEUED" not in job.end(20) and job.process.returncode == code
