"""Slurm on the test bed, out of Debian's packages: the controller on node0, the compute nodes node1 and node2.

It needs no systemd, no cgroup and no accounting. Everything that it writes is in a temporary folder, which all hosts
see: slurm.sbatch asks for a directory that they share.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from bed import processes, start, testbed
from launch import environment
from processes import eventually

COMPUTE_NODES = ["node1", "node2"]
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue"]
CONFIGURATION = """
ClusterName=testbed
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SchedulerParameters=sched_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# Not pgid: torchrun's processes have sessions of their own, and would outlive a job that is killed.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/linear
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=1 RealMemory=1000
PartitionName=all Nodes=node[1-2] Default=YES State=UP
"""


class Slurm:
    """A Slurm that runs. Its configuration and logs are in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.env = folder, environment(SLURM_CONF=f"{folder}/slurm.conf")

    def __call__(self, *command, check: bool = True) -> str:
        """What the command prints on node0, e.g. slurm("squeue", "--noheader")."""
        return testbed("exec", "node0", *command, check=check, env=self.env).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job, as Slurm names them: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "show", "job", "--oneliner", number)))

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def slurm_bed() -> Iterator[Slurm]:
    """Starts Slurm on the hosts of bed.py, which have to be up. In the end kills it, its jobs and all they started."""
    before, folder = processes(), pathlib.Path(tempfile.mkdtemp(prefix="slurm_bed"))
    slurm, daemons = Slurm(folder), []

    def daemon(node: str, *command) -> None:
        with open(folder / f"{node}-{command[0]}.log", "w") as log:
            daemons.append(start(node, *command, env=slurm.env, stdout=log))

    try:
        folder.chmod(0o755)  # munged refuses a socket that not everybody can reach
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # used for nothing; autodetect wants a mount
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        daemon("node0", "munged", "--foreground", f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid",
               f"--socket={folder}/munge.socket", f"--seed-file={folder}/munge.seed", "--log-file=/dev/stderr")
        assert eventually((folder / "munge.socket").exists, 10), slurm.logs()
        daemon("node0", "slurmctld", "-D")
        for node in COMPUTE_NODES:
            (folder / f"spool-{node}").mkdir()
            daemon(node, "slurmd", "-D", "-N", node)
        assert eventually(lambda: slurm("sinfo", "--noheader", "--format=%T", check=False) == "idle"), slurm.logs()
        yield slurm
    finally:
        while left := processes() - before:  # more than once: what is killed may just have started something
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        for process in daemons:
            process.wait()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def slurm(bed):
    """Slurm for the tests of a module, which import the fixture `bed` as well; skips them where it is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        pytest.skip(f"no {' '.join(missing)} here: apt-get install -y --no-install-recommends slurm-wlm munge")
    with slurm_bed() as slurm:
        yield slurm
