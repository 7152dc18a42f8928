"""launch_cluster.sh --elastic without a network: flags, torchrun's command line, and which hosts take part when.

Stand-ins take the place of ssh and torchrun; test_cluster_elastic.py has the true ones.
"""

import os
import re
import signal
import subprocess
import sys
import time

import host_run
import launch_cluster
import pytest
from launch import ROOT
from launcher import Launch, all_gone, eventually, make_tools, write_hosts

TORCHRUN = """
import os, signal, subprocess, sys
first = next(index for index, word in enumerate(sys.argv) if word.startswith("--local-addr=")) + 1
worker = subprocess.Popen([sys.executable, *sys.argv[first:]], start_new_session=True)
code = worker.wait()
if code == 2:
    print(f"E1 1 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: {code}) local_rank: 0")
sys.exit(code and 1)
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
       "peer": None, "environment": {}, "is_home": False, "command": ["train.py", "--epochs", "3"],
       "elastic": {"nodes": "2:3", "id": "1a", "mark": "1a b", "address": "127.0.0.1"}}


@pytest.fixture(scope="module")
def plain_tools(tmp_path_factory):
    return make_tools(tmp_path_factory.mktemp("plain_tools"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = make_tools(tmp_path_factory.mktemp("tools"))
    (folder / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    return folder


def lines(tools, hosts: str) -> list[str]:
    """Of a hosts.txt whose hosts all are this machine."""
    return [f"{host} iface=lo python={tools / 'python'}" for host in hosts]


def says(run: Launch, text: str, since: int = 0, seconds: float = 60) -> bool:
    """Whether a line holds `text` (a pattern), in time."""
    return eventually(lambda: any(re.search(text, line) for line in run.lines[since:]), seconds)


@pytest.mark.parametrize("words, message", [
    (["--elastic", "3:2"], "'3:2': write MIN:MAX"), (["--elastic", "0:2"], "'0:2': write MIN:MAX"),
    (["--elastic", "x"], "'x': write MIN:MAX"), (["--elastic", "2:"], "'2:': write MIN:MAX"),
    (["--elastic", "4:5"], "error: --elastic 4:5 needs 4 hosts to begin with, but .*hosts.txt has 3"),
])
def test_a_wrong_number_of_hosts(tools, tmp_path, words, message):
    code, text = Launch(write_hosts(tmp_path, *lines(tools, "abc")), *words, "--", "x.py", tools=tools).end()
    assert code == 2 and re.search(message, text) and text.count("error: ") == 1 and " | " not in text, text


def test_more_hosts_may_come(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch_cluster.py", "--elastic", "2:8", "hosts.txt", "--", "train.py"])
    assert launch_cluster.parse_args()[0].elastic == (2, 8)


def test_the_command_line_of_torchrun(monkeypatch, tmp_path):
    words = host_run.command(JOB)
    for word in ("--nnodes=2:3", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=desk:29500",
                 "--max-restarts=100", "--rdzv-id=1a", "--local-addr=127.0.0.1"):
        assert word in words
    conf = next(word for word in words if word.startswith("--rdzv-conf="))
    assert conf.startswith("--rdzv-conf=is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3")
    first = host_run.command({**JOB, "node_rank": 0})
    assert any(word.startswith("--rdzv-conf=is_host=1,") for word in first) and words[-3:] == JOB["command"]
    assert host_run.environment(JOB)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert host_run.environment(JOB)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "900", "host_run.py ends them, not torchrun"
    assert "LAUNCH_CLUSTER_HOME" not in host_run.environment(JOB)
    assert "LAUNCH_CLUSTER_HOME" in host_run.environment({**JOB, "is_home": True})
    plain = {name: value for name, value in JOB.items() if name != "elastic"}
    assert not [word for word in host_run.command(plain) if "rdzv" in word or "local-addr" in word]
    assert not {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", host_run.MARK} & host_run.environment(plain).keys()


def test_torchrun_takes_that_command_line():
    from torch.distributed.run import config_from_args, get_args_parser

    config, _, words = config_from_args(get_args_parser().parse_args(host_run.command(JOB)[3:]))
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (2, 3, 100)
    assert words[-3:] == JOB["command"] and config.rdzv_configs["is_host"] == "0" and config.local_addr == "127.0.0.1"


def test_a_script_is_looked_for_in_cluster_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").mkdir()
    for name in ("cluster/train.py", "cluster/both.py", "both.py"):
        (tmp_path / name).touch()
    for given, found in {"train.py": "cluster/train.py", "both.py": "both.py", "./train.py": "./train.py",
                         "none.py": "none.py", "cluster/train.py": "cluster/train.py"}.items():
        assert host_run.find_script([given, "--x"]) == [found, "--x"]


def test_hosts_come_and_go(tools, tmp_path):
    """b is lost and comes back, c is new in hosts.txt, d has no Python; what makes no sense there changes nothing."""
    run = Launch(write_hosts(tmp_path, *lines(tools, "ab")), "--elastic", "1:3", "--", tools / "sleep.py", tools=tools)
    pids = run.pids(2)
    os.kill(pids["b"][1], signal.SIGKILL)
    assert says(run, r"b is lost \(its torchrun was ended by signal 9\): the run goes on with 1 host, and takes it in")
    assert all_gone({"b": pids["b"]}, 5) and says(run, "launch_cluster: b answers: torchrun starts there")
    assert eventually(lambda: run.pids(2)["b"] != pids["b"])
    write_hosts(tmp_path, *lines(tools, "ab"), "a b c")
    assert says(run, "launch_cluster: .*hosts.txt, line 3: .*: the run goes on with the hosts that it knows")
    write_hosts(tmp_path, *lines(tools, "ab"), "d python=/nowhere/python", *lines(tools, "c"))
    assert says(run, "launch_cluster: d can't take part, exit code 127: no Python: can't start /nowhere/python")
    assert set(run.pids(3)) == {"a", "b", "c"}
    time.sleep(3)  # longer than between two attempts
    pids = run.pids(3)
    os.killpg(run.process.pid, signal.SIGINT)
    code, text = run.end()
    assert code == 130 and all_gone(pids) and text.count("d can't take part") == 1, text
    assert len(re.findall("c is new in", text)) == 1 and text.count("answers: torchrun starts there") == 2, text


def test_no_more_than_max_run_at_once(tools, tmp_path):
    run = Launch(write_hosts(tmp_path, *lines(tools, "abc")), "--elastic", "1:2", "--", tools / "sleep.py", tools=tools)
    pids = run.pids(2)
    assert set(pids) == {"a", "b"}
    time.sleep(4)
    assert len(run.pids(2)) == 2
    os.kill(pids["b"][1], signal.SIGKILL)
    assert says(run, r"launch_cluster: [bc] answers: torchrun starts there")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143 and all_gone(pids)


def test_the_first_host_is_needed(tools, tmp_path):
    run = Launch(write_hosts(tmp_path, *lines(tools, "abc")), "--elastic", "1:3", "--", tools / "sleep.py", tools=tools)
    pids = run.pids()
    os.kill(pids["a"][1], signal.SIGKILL)
    code, text = run.end()
    assert code == 137 and all_gone(pids), text
    said = re.findall("launch_cluster: .*", text)
    assert len(said) == 1 and "a is lost (its torchrun was ended by signal 9). It held the rendezvous" in said[0], text
    assert "the same command" in said[0] and "--resume auto" in said[0]


def test_too_few_hosts_for_too_long(tools, tmp_path):
    (tmp_path / "launch.py").write_text(f"import sys\nsys.path.insert(0, '{ROOT}/cluster/launching')\nimport elastic, "
                                        "launch_cluster\nelastic.WAIT = 3\nsys.exit(launch_cluster.main())\n")
    hosts = write_hosts(tmp_path, *lines(tools, "a"), "b python=/bin/false")
    with open(tmp_path / "ssh_of_b", "w") as file:  # b can't be reached
        file.write((tools / "ssh").read_text().replace("exec sh", "case \" $* \" in *' b '*) echo 'ssh: connect to host"
                                                       " b port 22: No route to host'; exit 255;; esac\nexec sh"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "ssh_of_b").rename(tmp_path / "bin" / "ssh")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, tmp_path / "launch.py", "--elastic", "2:2", hosts, "--", tools / "sleep.py"],
                          env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    said = re.findall("launch_cluster: (.*)", done.stdout)
    assert done.returncode == 1 and len(said) == 2, done.stdout
    assert done.stdout.count("b | ssh: connect") == 1, "it is tried quietly"
    assert said[0].startswith("b is lost (ssh: connect to host b port 22: No route to host): 1 host left, but the run ")
    assert said[1].startswith("fewer than 2 hosts for 3 seconds, so the run ends: the same command"), said


def test_an_error_of_the_users_ends_the_run(tools, tmp_path):
    (tmp_path / "fail.py").write_text("import os, sys, time\nprint('error: a flag is wrong', flush=True)\nsys.exit(2)")
    run = Launch(write_hosts(tmp_path, *lines(tools, "abc")), "--elastic", "2:3", "--", tmp_path / "fail.py",
                 tools=tools)
    code, text = run.end()
    assert code == 1 and re.search(r"\nlaunch_cluster: [abc] failed, with exit code 1\n", text), text
    assert text.endswith("    error: a flag is wrong\n"), text


@pytest.mark.slow
def test_time_to_save(tools, plain_tools, tmp_path):
    """Whoever ends the run: the processes get SIGTERM, and are not killed in the time that they need, in both modes."""
    (tmp_path / "save.py").write_text(SAVE)
    runs = {}
    for how in ("plain", "elastic"):
        folder = tmp_path / how
        folder.mkdir()
        its_tools, words = (tools, ["--elastic", "1:3"]) if how == "elastic" else (plain_tools, [])
        runs[how] = Launch(write_hosts(folder, *lines(its_tools, "abc")), *words, "--", tmp_path / "save.py",
                           tools=its_tools)
        runs[how].pids()
    for run in runs.values():
        os.killpg(run.process.pid, signal.SIGINT)
    for how, run in runs.items():
        code, text = run.end()
        assert code == 130 and len(re.findall(r"^[abc] \| saved$", text, re.M)) == 3, f"{how}:\n{text}"
