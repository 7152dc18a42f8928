"""slurm.sbatch on two nodes: a job out of time is requeued and resumes; one that is cancelled or fails is not."""

import pathlib
import re
import sys

import pytest
from bed import bed
from launch import ROOT, fork, metrics
from processes import eventually
from slurm_bed import Slurm, slurm  # noqa: F401, with a fixture

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
STEPS, TOLERANCE = 20, 1e-9
FLAGS = ["--dtype", "float64", "--device", "cpu", "--seq_len", "16", "--batch_size", "2", "--max_steps", str(STEPS),
         "--run_name", "run"]
SHARES = ["--num_microbatches", "10,6"]


class Job:
    """A training that slurm.sbatch runs, with its records in `folder`."""

    def __init__(self, slurm: Slurm, folder: pathlib.Path, *flags: str):
        self.slurm, self.folder = slurm, folder
        self.number = slurm("env", f"PYTHON={sys.executable}", "sbatch", "--parsable", f"--chdir={ROOT}",
                            f"--output={folder}/output", "--time=10", ROOT / "cluster" / "engines" / "slurm.sbatch", *FLAGS, *flags,
                            "--log_dir", folder / "many", "--checkpoint_dir", folder / "checkpoints")

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def rows(self) -> list[dict]:
        return metrics(self.folder / "many", "run") if (self.folder / "many/run/metrics.jsonl").exists() else []

    def wait(self, condition, seconds: float = 120) -> None:
        assert eventually(condition, seconds), f"{self.slurm.job(self.number)}\n{self.output()}\n{self.slurm.logs()}"

    def end(self) -> dict[str, str]:
        self.wait(lambda: self.slurm.job(self.number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
        return self.slurm.job(self.number)


@pytest.fixture
def submit(slurm, tmp_path):
    """submit(*flags) -> Job. Nothing of a test that fails stays on the nodes."""
    yield lambda *flags: Job(slurm, tmp_path, *flags)
    slurm("scancel", "--user=root")
    assert eventually(lambda: not slurm("squeue", "--noheader")), slurm.logs()


def test_a_job_out_of_time_resumes(slurm, submit, tmp_path):
    """From its own checkpoint, also where it began with another: the losses are those of one process that never stops.
    """
    alone = ["--gradient_accumulation", 16, "--checkpoint_dir", tmp_path / "checkpoint"]
    script = ROOT / "cluster" / "train_distributed.py"
    fork(9, 1, *FLAGS, *alone, "--max_steps", 2, "--run_name", "first", "--log_dir", tmp_path / "first", script=script)
    job = submit(*SHARES, "--resume", tmp_path / "checkpoint" / "first")
    job.wait(lambda: len(job.rows()) >= 3)
    slurm("scancel", "--signal=TERM", "--batch", job.number)  # as --signal=B:TERM@120 does before the time limit
    job.wait(lambda: slurm.job(job.number)["Restarts"] == "1")
    (stopped,) = re.findall(r"stopped after step (\d+)", job.output())
    assert 3 <= int(stopped) == len(job.rows()) < STEPS, job.output()
    ended = job.end()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", job.output()
    assert re.findall(r"going on after step (\d+)", job.output()) == ["2", stopped], job.output()
    fork(9, 1, *FLAGS, *alone, "--log_dir", tmp_path / "one", script=script)
    found, expected = job.rows(), metrics(tmp_path / "one", "run")
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, STEPS + 1))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(expected, found)) <= TOLERANCE
    again = submit(*SHARES)  # as a job does that was requeued in the moment in which it was finished
    assert again.end()["JobState"] == "COMPLETED" and again.rows() == found, again.output()


def test_a_job_that_is_cancelled_or_wrong_is_not_requeued(slurm, submit):
    job = submit(*SHARES)
    job.wait(lambda: len(job.rows()) >= 3)
    slurm("scancel", job.number)
    ended = job.end()
    assert ended["JobState"] == "CANCELLED" and ended["Restarts"] == "0", job.output()
    assert "stopped after step" in job.output() and "requeued" not in job.output()
    assert not slurm("squeue", "--noheader")
    ended = (job := submit("--num_microbatches", "1,2,3")).end()
    assert ended["JobState"] == "FAILED" and ended["Restarts"] == "0", job.output()
    assert "--num_microbatches 1,2,3: write 2 numbers" in job.output()
