"""launch_cluster.sh --elastic without a network: flags, the agent of a host, and which hosts take part when.

Stand-ins take the place of ssh and of the training; test_cluster_faults.py has the true ones.
"""

import os
import pathlib
import re
import signal
import sys
import time

import exits
import host_run
import pytest
import torch
from lab.launch import ROOT, modules_of
from maintain.launcher import (
    Launch, all_gone, eventually, lines_of, write_hosts, write_program, write_ssh, write_whole,
)

with modules_of(9):
    from ranks import lost

ONE_FAILS = r"""
import json, os, sys, time
run, rank = json.loads(os.environ["ELASTIC_RUN"]), os.environ["LOCAL_RANK"]
told = {**run, "token": len(run["token"])}, [name for name in os.environ if "MASTER" in name or name == "WORLD_SIZE"]
sys.stdout.write(f"rank {rank} {os.getpid()} {os.getppid()} {told} {sys.argv[1:]} {os.environ['RANK']}\n")
while rank == "0" or not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
sys.exit(int(open(sys.argv[1]).read()))
"""
SAVE = """
import os, signal, sys, time
def save(*_):
    time.sleep(22)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
with open(os.environ["LAUNCH_CLUSTER_STOPS_WITHIN"], "w") as file:
    file.write("18")
print("pids", os.getpid(), os.getppid(), flush=True)
while True:
    time.sleep(1)
"""
JOB = {"nnodes": 3, "node_rank": 1, "nproc": 2, "master_address": "desk", "master_port": 29500, "interface": "lo",
       "peer": None, "environment": {}, "is_home": False, "command": ["train.py", "--epochs", "3"]}


def says(run: Launch, text: str, since: int = 0, seconds: float = 60) -> bool:
    """Whether a line holds `text` (a pattern), in time."""
    return eventually(lambda: any(re.search(text, line) for line in run.lines[since:]), seconds)


def quick(hosts: pathlib.Path, *words, tools: pathlib.Path, wait: float = 600.0) -> Launch:
    """A launcher that tries hosts again sooner, and waits for `wait` seconds with too few of them."""
    return Launch(hosts, *words, tools=tools, PYTHON=write_program(hosts.parent / "quick", f"""#!{sys.executable}
import runpy, sys
sys.path.insert(0, {str(ROOT / "cluster" / "hosts")!r})
import elastic
import remote_run
elastic.RETRY, remote_run.HEARTBEAT, elastic.WAIT, sys.argv = 0.3, 0.1, {wait}, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""))


def test_a_run_that_is_not_elastic_has_torchrun():
    words = host_run.torchrun(JOB)
    assert words[words.index("--node-rank") + 1] == "1" and words[-3:] == JOB["command"]
    variables = host_run.environment(JOB)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo"), "not lo1 as well"
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "900", "host_run.py ends them, not torchrun"
    assert not {"ELASTIC_RUN", "LAUNCH_CLUSTER_HOME", host_run.MARK} & variables.keys()
    assert "LAUNCH_CLUSTER_HOME" in host_run.environment({**JOB, "is_home": True})


def test_hosts_come_and_go(tools, tmp_path):
    """a, which is like any other, is lost and comes back; c is new in hosts.txt, first without a Python; what makes no
    sense is left out; no more than MAX run at once; and all are lost at the same time."""
    hosts = write_hosts(tmp_path, *lines_of(tools, "ab"))
    run = quick(hosts, "--elastic", "1:3", "--", tools / "sleep.py", tools=tools)
    pids = run.pids(2)
    os.kill(pids["a"][1], signal.SIGKILL)
    assert all_gone({"a": pids["a"]}, 1), "its processes die with their agent"
    assert says(run, r"a is lost \(its part was ended by signal 9\): the run goes on with 1 host, and takes it in")
    assert says(run, "launch_cluster: a answers: its part of the run starts")
    assert eventually(lambda: run.pids(2)["a"] != pids["a"]) and run.pids(2)["b"] == pids["b"]
    write_hosts(tmp_path, *lines_of(tools, "ab"), "a b c")
    assert says(run, "launch_cluster: .*hosts.txt, line 3: .*: the run goes on with the hosts that it knows")
    write_hosts(tmp_path, *lines_of(tools, "ab"), *lines_of(tools, "c", "address=fd00::2"))
    assert says(run, "launch_cluster: --elastic meets at IPv4 addresses only, but c has one of IPv6: .*that it knows")
    write_hosts(tmp_path, *lines_of(tools, "ab"), "c python=/nowhere/python")
    assert says(run, "launch_cluster: c can't take part, exit code 127: no Python: can't start /nowhere/python")
    time.sleep(0.5)  # longer than between two attempts
    write_hosts(tmp_path, *lines_of(tools, "abcd"))
    assert eventually(lambda: run.pids(3).keys() == set("abc"))
    time.sleep(0.5)
    assert run.pids(3).keys() == set("abc"), "d stands by"
    mark = len(run.lines)
    for _, agent_pid in run.pids(3).values():
        os.kill(agent_pid, signal.SIGKILL)
    assert says(run, "0 hosts left, but the run needs 1, so it waits", mark), "all are lost at once"
    assert eventually(lambda: sum(" answers: " in line for line in run.lines[mark:]) >= 3)
    os.killpg(run.process.pid, signal.SIGINT)
    text = run.expect(130)
    assert all_gone({"all": list(map(int, re.findall(r"pids (\d+)", text)))}), text
    assert text.count("c can't take part") == 1 and len(re.findall("c is new in", text)) == 1, text


def test_a_process_that_fails_is_started_anew_alone(tools, tmp_path):
    """And what a process is told; and two more ends of a run."""
    def started(rank: int) -> list[re.Match]:
        found = (re.match(rf"[ab] \| rank {rank} (\d+) (\d+) (.*)", line) for line in run.lines)
        return [match for match in found if match]

    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    (tmp_path / "code").write_text("1")
    hosts = write_hosts(tmp_path, *lines_of(tools, "a", "nproc=2"))
    run = quick(hosts, "--elastic", "1:3", "--", tmp_path / "one_fails.py", tmp_path / "code", tools=tools)
    assert says(run, r"a \| process 1 of this host has ended with exit code 1: it is started anew$")
    (tmp_path / "code").unlink()
    assert eventually(lambda: len(started(1)) > 1), run.output()
    assert len(started(0)) == 1 and pathlib.Path(f"/proc/{started(0)[0][1]}").exists()
    told = started(1)[-1][3]
    assert re.fullmatch(r"\({'id': '\w{32}', 'token': 64, 'hosts': \['a'], 'port': 29500, 'host': 0, 'at_least': 1, "
                        rf"'at_most': 3, 'nproc': 2}}, \[]\) \['{tmp_path}/code'] --elastic needs cluster/train_distri"
                        "buted.py, which meets the other hosts by itself", told)
    write_hosts(tmp_path, *lines_of(tools, "b"), *lines_of(tools, "a", "nproc=2"))
    assert says(run, r"'hosts': \['a', 'b'], 'port': 29500, 'host': 1, .* 'nproc': 1"), "a host keeps its place"
    for words in map(lambda path: path.read_bytes(), pathlib.Path("/proc").glob("[0-9]*/cmdline")):
        assert b"'token" not in words and b'"token' not in words
    write_whole(tmp_path / "code", "2")
    text = run.expect(2, "launch_cluster: [ab] .* failed first, with exit code 2",
                      r"    process [01] of this host has ended with exit code 2\n\Z")
    assert all_gone({"all": [int(match[1]) for rank in (0, 1) for match in started(rank)]}, 1), text


def test_what_an_agent_does(tmp_path, monkeypatch, capfd):
    """Its exit code is 0 when all are done, 1 when one does not stop failing."""
    monkeypatch.setattr(host_run, "PAUSE", 0.0)
    (tmp_path / "exit.py").write_text("import os, sys\nsys.exit(int(sys.argv[1 + int(os.environ['LOCAL_RANK'])]))")

    def end(*codes: int) -> int:
        words = [str(tmp_path / "exit.py"), *map(str, codes)]
        started = host_run.Agent({"command": words, "elastic": {}, "nproc": 2}, dict(os.environ))
        assert eventually(lambda: started.poll() is not None, 20)
        return started.returncode

    assert end(0, 0) == 0 and not capfd.readouterr().out
    assert end(0, 1) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[:5] == ["process 1 of this host has ended with exit code 1: it is started anew"] * 5 and len(said) == 6
    assert said[5].endswith("code 1, 6 times in a row within 20 s: it is not started again")
    monkeypatch.setattr(host_run, "SETTLED", 0.0)
    started = host_run.Agent({"command": [str(tmp_path / "exit.py"), "1", "1"], "elastic": {}, "nproc": 1}, {})
    for _ in range(8):
        assert eventually(lambda: started.poll() or "anew" in capfd.readouterr().out, 20)
    assert started.returncode is None, "each has run long enough: it goes on"
    assert end(0, exits.OF_THIS_MACHINE) == 1, "what this machine lacks it will lack again"


def test_what_one_machine_lacks_costs_only_that_machine():
    """Memory, disks and GPUs; what all ranks would meet again ends the run, and a lost peer is neither."""
    own = MemoryError(), OSError(5, "Input/output error"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), RuntimeError("CUDA error: ECC")
    others = KeyError("x"), ConnectionResetError("Connection reset by peer"), RuntimeError("Connection closed by peer")
    assert all(map(lost.is_of_this_machine, own)) and not any(map(lost.is_of_this_machine, others))


def test_too_few_hosts_for_too_long(tools, tmp_path):
    """b can't be reached, which is said once."""
    write_ssh(tmp_path, "case $* in *' b '*) echo 'ssh: connect to host b port 22: No route to host'; exit 255;; esac")
    hosts = write_hosts(tmp_path, *lines_of(tools, "a"), "b python=/bin/false")
    text = quick(hosts, "--elastic", "2:2", "--", tools / "sleep.py", tools=tmp_path, wait=1.0).expect(1)
    said = re.findall("launch_cluster: (.*)", text)
    assert len(said) == 3 and text.count("b | ssh: connect") == 1, text
    assert said[0].startswith("b is lost (ssh: connect to host b port 22: No route to host): 1 host left, but the run ")
    assert said[1] == "b is not back yet: ssh: connect to host b port 22: No route to host"
    assert said[2].startswith("fewer than 2 hosts for 1 seconds, so the run ends: the same command"), said


@pytest.mark.slow
def test_time_to_save(tools, tmp_path):
    """Whoever ends the run: the processes get SIGTERM, and are not killed in the time that they need, in both modes."""
    (tmp_path / "save.py").write_text(SAVE)
    runs = []
    for words in [], ["--elastic", "1:3"]:
        (folder := tmp_path / str(len(words))).mkdir()
        hosts = write_hosts(folder, *lines_of(tools, "abc"))
        runs.append(Launch(hosts, *words, "--", tmp_path / "save.py", tools=tools))
        runs[-1].pids()
    for run in runs:
        os.killpg(run.process.pid, signal.SIGINT)
    for run in runs:
        assert len(re.findall(r"^[abc] \| saved$", run.expect(130), re.M)) == 3
