"""launch_cluster.sh --elastic on three hosts over ssh: hosts are lost and come back, and nothing is left running."""

import os
import re
import signal
import sys
import time

import pytest
from bed import NODES, SSH_CONFIG, bed, testbed
from elastic_bed import kill_all, nothing_runs, switch_on
from launcher import Launch, eventually, write_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
WORKER = "tests/support/elastic_worker.py"
# Seconds until the run goes on without a lost host, and again with it. Workers notice a killed one at once.
BARS = {"killed": (45, 60), "switched off": (45, 60), "cut": (45, 60)}  # generous: the cores may be busy
WAYS = list(BARS) if os.environ.get("ALL_WAYS") else ["switched off"]


@pytest.fixture(autouse=True)
def all_on(bed):
    """Whatever a test does to a host, it is there for the next one."""
    yield
    for node in NODES:
        switch_on(node)


class Bed:
    """An elastic run over ssh on hosts of the test bed. `words`: of the worker."""

    def __init__(self, folder, *words, hosts=NODES):
        listed = write_hosts(folder, *(f"{node} python={sys.executable}" for node in hosts))
        self.run = Launch(listed, "--elastic", "2:3", "--env", "OMP_NUM_THREADS=1", "--", WORKER, *words,
                          options=f"-F {SSH_CONFIG}")

    def wait(self, world: int, nodes: list[str], since: int = 0, seconds: float = 90) -> float:
        """Seconds until all `nodes` have said that they are a world of so many."""
        start = time.monotonic()
        for node in nodes:
            assert self.says(rf"^{node} \| world {world} ", since, seconds), "".join(self.run.lines)
        return time.monotonic() - start

    def says(self, text: str, since: int = 0, seconds: float = 90) -> bool:
        """Whether a line matches `text`, in time."""
        return eventually(lambda: any(re.search(text, line) for line in self.run.lines[since:]), seconds)

    def end(self) -> str:
        os.killpg(self.run.process.pid, signal.SIGINT)
        code, text = self.run.end()
        assert code == 130 and "Traceback" not in text, text
        assert nothing_runs(), text
        return text


@pytest.mark.parametrize("how", WAYS)
def test_a_lost_host_comes_back(tmp_path, how):
    bed_run = Bed(tmp_path)
    bed_run.wait(3, NODES)
    mark = len(bed_run.run.lines)
    if how != "killed":
        testbed("cut", "node2")
    if how != "cut":
        kill_all("node2")
    without = bed_run.wait(2, NODES[:2], mark)
    assert bed_run.says("launch_cluster: node2 is lost .* the run goes on with 2 hosts", mark, 20)
    mark = len(bed_run.run.lines)
    switch_on("node2")
    again = bed_run.wait(3, NODES, mark)
    print(f"{how}: on two hosts after {without:.1f} s, on three {again:.1f} s after its return")
    bed_run.end()
    assert without < BARS[how][0] and again < BARS[how][1]


def test_the_first_host_is_lost(tmp_path):
    bed_run = Bed(tmp_path)
    bed_run.wait(3, NODES)
    kill_all("node0")
    code, text = bed_run.run.end(30)
    said = re.findall("launch_cluster: .*", text)
    assert code == 255 and len(said) == 1, text
    assert re.search(r"node0 is lost .* It held the rendezvous.*the same command.*--resume auto", said[0])
    assert nothing_runs()


def test_a_new_host_and_the_end(tmp_path):
    bed_run = Bed(tmp_path, "--seconds", "15", hosts=NODES[:2])
    bed_run.wait(2, NODES[:2])
    write_hosts(tmp_path, *(f"{node} python={sys.executable}" for node in NODES))
    bed_run.wait(3, NODES)
    code, text = bed_run.run.end()
    assert code == 0 and text.count("| done") == 3 and text.count("launch_cluster: ") == 2 and nothing_runs(), text


def test_ctrl_c_leaves_time_to_save_and_nothing_else(tmp_path):
    bed_run = Bed(tmp_path, "--save", "10")
    bed_run.wait(3, NODES)
    assert len(re.findall(r"node\d \| rank \d saved after 10", bed_run.end())) == 3


def test_an_error_of_the_users(tmp_path):
    """The worker ends its torchrun, so that it is not started anew for ever."""
    code, text = Bed(tmp_path, "--fail").run.end()
    assert code == 1 and "\nlaunch_cluster: node0 failed, with exit code 1\n" in text, text
    assert text.rpartition("its last lines:")[2].rstrip().endswith("error: --fail was given: leave it out"), text
    assert nothing_runs()
