"""What a host lets a run have: threads within the CPU quota of a container, and memory, which its ranks share."""

import os
import sys
from unittest import mock

import conftest
import host_facts
import host_run
import pytest
import torch
from maintain.launcher import Launch, lines_of, write_hosts

from lab.launch import modules_of

with modules_of(9):
    from ranks import memory, placement

JOB = {"nproc": 1, "is_home": False, "interface": "lo", "peer": None, "environment": {}}


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """groups(own, {file: text}) makes these files of control groups; `own` is what /proc/self/cgroup says."""
    def make(own: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(host_facts, "CGROUPS", str(tmp_path))
        monkeypatch.setattr(host_facts, "OWN_GROUPS", str(tmp_path / "own"))

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return make


@pytest.mark.parametrize("own, files, nproc, threads", [
    ("0::/\n", {"cpu.max": "max 100000\n"}, 1, 8),
    ("0::/\n", {"cpu.max": "max 100000\n"}, 3, 2),
    ("0::/\n", {"cpu.max": "250000 100000\n"}, 1, 2),  # docker --cpus 2.5
    ("0::/\n", {"cpu.max": "50000 100000\n"}, 2, 1),
    ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 1, 3),
    ("0::/host/path\n", {"cpu.max": "400000 100000"}, 1, 4),  # a container does not see the host's path
    ("2:memory:/\n1:cpu,cpuacct:/a\n",
     {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n",
      "cpu/a/cpu.cfs_quota_us": "20000\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, 1, 2),
    ("1:cpuset:/a\n", {"cpu.max": "100000 100000"}, 1, 8),  # not in a group of this controller
])
def test_threads_within_the_quota(groups, own, files, nproc, threads):
    groups(own, files)
    assert host_run.environment({**JOB, "nproc": nproc})["OMP_NUM_THREADS"] == str(threads)
    assert host_run.environment({**JOB, "environment": {"OMP_NUM_THREADS": "7"}})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("own, files", [
    ("3:memory:/a\n0::/\n", {
        "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "10",
        "memory/a/memory.limit_in_bytes": "5000", "memory/a/memory.usage_in_bytes": "2000"}),
    ("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat":
                 "anon 900\nactive_file 1500\ninactive_file 700\nfile_mapped 200\n"}),
    ("3:memory:/a\n", {"memory/a/memory.limit_in_bytes": "5000", "memory/a/memory.usage_in_bytes": "4000",
                       "memory/a/memory.stat": "mapped_file 1\nactive_file 9\ntotal_active_file 1500\n"
                                               "total_inactive_file 700\ntotal_mapped_file 200\n"}),
])
def test_memory_within_the_limit_of_the_own_group(groups, own, files):
    """Files that the group keeps in memory are free, but for those that are mapped: the processes' own libraries."""
    groups(own, files)
    assert host_facts.available_memory() == 3000


@pytest.mark.parametrize("cores, gigabytes, processes", [
    (1, 64, 2), (2, 64, 2), (6.5, 64, 6), (16, 64, 8), (16, 16, 3), (16, 1, 2)])
def test_processes_that_run_these_tests(monkeypatch, cores, gigabytes, processes):
    monkeypatch.setattr(conftest, "usable_cores", lambda: cores)
    monkeypatch.setattr(conftest, "available_memory", lambda: gigabytes * 1e9)
    assert conftest.pytest_xdist_auto_num_workers() == processes


def test_without_linux(monkeypatch, capsys):
    """macOS has no affinity and no /proc: the facts are there all the same, and a run ends with a clear error."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(host_facts, "OWN_GROUPS", "/nowhere/cgroup")
    assert host_facts.usable_cores() == os.cpu_count() and host_facts.available_memory() > 0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_run.main() == 2 and "this host runs darwin, but" in capsys.readouterr().err


def test_the_shells_threads_go_along(tmp_path, tools):
    """OMP_NUM_THREADS of the shell reaches the script unless --env sets it, and each host prints how many it is."""
    (tmp_path / "show.py").write_text("import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    hosts = write_hosts(tmp_path, *lines_of(tools, "a", "nproc=2"))
    runs = {expected: Launch(hosts, *words, "--", tmp_path / "show.py", tools=tools, threads="5")
            for words, expected in (([], "5"), (["--env", "OMP_NUM_THREADS=6"], "6"))}
    for expected, run in runs.items():
        run.expect(0, rf"^a \| threads {expected}$", rf"^a \| 2 processes with OMP_NUM_THREADS={expected} each, ")


@pytest.mark.parametrize("kind, ranks", [("machine", 2), ("GPU", 2), ("GPU", 1)])
def test_ranks_of_a_machine_or_a_gpu_share_its_memory(monkeypatch, kind, ranks):
    """Whatever launcher started them: LOCAL_WORLD_SIZE is torchrun's alone. A launcher may show each rank one GPU only,
    which is then called cuda:0 by all."""
    other = ("a", "other") if kind == "GPU" else ("b", None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(placement, "gather", lambda own: [own] * ranks + [other])
    monkeypatch.setattr(memory, "available_memory", lambda: 1200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1200, 4800))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid="own"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(placement.dist, "get_rank", lambda: 0)
    placement.forget_ranks()
    assert memory.free_memory(torch.device("cuda", 0) if kind == "GPU" else torch.device("cpu")) == 1200 // ranks
    placement.forget_ranks()
