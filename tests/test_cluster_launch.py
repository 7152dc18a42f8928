"""launch_cluster.sh without a network: hosts.txt, no word for a shell, whose fault it was, and nothing left running.

An `ssh` that runs its command here takes the place of the true one; test_cluster_launch_on_hosts.py has hosts.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading

import check_hosts
import host_facts
import host_run
import inventory
import launch_cluster
import pytest
from launch import ROOT
from launcher import Launch, all_gone, make_tools, write_hosts


PROJECT = ("cluster", "step9_heterogeneous_pp")
FAIL = """
import os, sys, time
time.sleep(0.5 * (os.environ["RANK"] == "1"))
print("the cause" if os.environ["RANK"] == "1" else "Connection closed by peer", file=sys.stderr)
time.sleep(1000 * (os.environ["RANK"] == "2"))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return make_tools(tmp_path_factory.mktemp("tools"))


def three(tools, *options: str) -> list[str]:
    """Lines of hosts.txt for a, b and c, which all are this machine."""
    return [f"{host} iface=lo python={tools / 'python'} {' '.join(options)}" for host in "abc"]


@pytest.mark.parametrize("line", [
    "-oProxyCommand=touch${IFS}HERE", "-v", "a;touch HERE", "$(touch HERE)", "`touch HERE`@a", "a port=22;touch",
    "a port=70000", "a iface=$(touch)", "a iface=eth0;touch", "a address=-x", "a python=-c", "a dir=-", "a nproc=0",
    "a what=1", "a nproc=2 nproc=3", "a 'touch HERE", "a dir='x\ttouch HERE'", "a b", "", "a\na port=22 nproc=2\na",
])
def test_a_line_that_makes_no_sense_is_an_error(line, tmp_path, monkeypatch):
    """Nothing runs: not even ssh, whose stand-in would leave a file."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho hostname x\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(inventory.UserError, match="hosts.txt"):
        inventory.read_hosts(str(write_hosts(tmp_path, line.replace("HERE", f"{tmp_path}/ran"))))
    assert not (tmp_path / "ran").exists()


def test_what_a_line_says_arrives(tmp_path, monkeypatch, tools):
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    first, second = inventory.read_hosts(str(write_hosts(
        tmp_path, "# two", "pi@pi0 port=2222 dir=~/tutorial", "desk nproc=2 address=192.168.1.7  # mine")))
    assert (first.rank, first.label, first.address, first.dir) == (0, "pi0:2222", "pi@pi0", "~/tutorial")
    assert (second.rank, second.nproc, second.address, second.dir) == (1, "2", "192.168.1.7", str(ROOT))
    assert inventory.home_of([first, second]) is first, "none of them is this machine"
    second.address = "127.0.0.1"
    assert inventory.home_of([first, second]) is second
    assert first.ssh("~/a b")[-5:] == ["-p", "2222", "--", "pi@pi0", "'a b'"]
    assert first.explain(255, "... Permission denied (publickey).")[1].startswith("ssh-copy-id -p 2222 pi@pi0, or")


def test_no_word_is_read_by_a_shell(tools, tmp_path):
    """A folder, an argument and a variable that are commands to any shell arrive as they are."""
    hostile = "a 'b\" $(touch ran) `touch ran` ; touch ran & | > ran \\ * ~"
    root = tmp_path / hostile
    shutil.copytree(ROOT / "cluster", root / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "show.py").write_text("import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getcwd())")
    hosts = write_hosts(tmp_path, f"a dir={shlex.quote(str(root))} python={shlex.quote(str(tools / 'python'))}")
    code, text = Launch(hosts, "--env", f"WORD={hostile}", "--", "show.py", hostile, "--", "--check", tools=tools).end()
    assert code == 0 and f"a | {[hostile, '--', '--check']} {hostile} {root}" in text, text
    assert not list(tmp_path.rglob("ran"))


def test_nothing_outlives_a_run(tools, tmp_path):
    """Not after Ctrl-C, nor where the launcher, a torchrun or a worker is killed. And the first failure is
    not that of a rank which complains of a lost peer."""
    (tmp_path / "fail.py").write_text(FAIL)
    lines, runs = three(tools), {}
    for how in ("ctrl-c", "killed launcher", "killed torchrun", "killed worker"):  # five runs at the same time
        runs[how] = Launch(write_hosts(tmp_path, *lines), "--", tools / "sleep.py", tools=tools)
    fails = Launch(write_hosts(tmp_path, *lines), "--", tmp_path / "fail.py", tools=tools)
    [run.pids() for run in runs.values()]
    os.killpg(runs["ctrl-c"].process.pid, signal.SIGINT)
    runs["killed launcher"].process.kill()
    os.kill(runs["killed torchrun"].pids()["b"][1], signal.SIGKILL)
    os.kill(runs["killed worker"].pids()["b"][0], signal.SIGKILL)
    assert runs["ctrl-c"].end()[0] == 130
    for how, expected in ("killed torchrun", 137), ("killed worker", 1):
        code, text = runs[how].end()
        assert code == expected and f"b (node rank 1) failed first, with exit code {expected}" in text, text
    for how, run in runs.items():
        assert all_gone(run.pids()), how
    code, text = fails.end()
    assert code == 1 and "b (node rank 1) failed first, with exit code 1" in text, text
    assert "its last lines:\n" in text and text.endswith("\n    the cause\n"), text


def test_check_compares_the_hosts(tools, tmp_path):
    """Another torch, clock and project, and a port in use. The cures run nowhere by themselves and delete nothing."""
    for name in PROJECT:
        shutil.copytree(ROOT / name, tmp_path / "old copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "old copy" / "cluster" / "plan.py").write_text("")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        old = f"b iface=lo port=2222 python={tools / 'python_old'} dir='{tmp_path}/old copy'"
        hosts = write_hosts(tmp_path, three(tools)[0], old, three(tools)[2])
        code, text = Launch(hosts, "--check", "--port", str(port), "--", "train.py", tools=tools).end()
    assert code == 1, text
    problems = dict(re.findall(r"^([abc]\S*: .+)\n    cure: (.+)$", text, re.M))
    for start, cure in {
            f"a: blocked port: {port}: Address already in use": f"--port {port + 1}",
            "b:2222: other torch version: 2.9.1, but a has 2.13.0": "launch_cluster.sh HOSTS --install; for",
            "b:2222: other project version: hash ": "launch_cluster.sh HOSTS --install, where",
            "b:2222: clock skew: +40.0 s from a": "on both: sudo timedatectl"}.items():
        assert [found for name, found in problems.items() if name.startswith(start) and cure in found], (start, text)
    assert len(problems) == 4 and " | " not in text and not re.search(r"--delete|\brm ", text), text
    rows = {line.split()[0]: line for line in text.splitlines()[1:4]}
    assert rows["b:2222"].count("!") == 3 and rows["a"].count("!") == 1 and "!" not in rows["c"], text


@pytest.mark.parametrize("name, files, path", [
    ("eth0", {"type": "1", "speed": "1000"}, ("ethernet", ", 1 Gbit/s")),
    ("eth0", {"type": "1", "speed": "100"}, ("ethernet", ", 0.1 Gbit/s")),
    ("enp3s0", {"type": "1", "speed": "-1"}, ("ethernet", "")), ("br0", {"type": "1"}, ("ethernet", "")),
    ("wlan0", {"type": "1", "wireless/x": "", "speed": "866"}, ("wifi", "")),
    ("mlan0", {"phy80211/x": ""}, ("wifi", "")), ("ppp0", {"type": "512"}, ("tunnel", "")),
    ("wg0", {"type": "65534"}, ("tunnel", "")), ("tailscale0", {"type": "65534", "tun_flags": "0x5"}, ("tunnel", "")),
    ("zt5u4", {"type": "1", "tun_flags": "0x1002", "speed": "10"}, ("tunnel", "")),
    ("home", {"type": "65534"}, ("tunnel", "")), ("gone", {}, ("ethernet", "")),
])
def test_the_kind_of_an_interface(tmp_path, monkeypatch, name, files, path):
    """A TUN interface says 10 Mbit/s, whatever it is."""
    for file, text in files.items():
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text(f"{text}\n")
    monkeypatch.setattr(host_facts, "NETWORK", str(tmp_path))
    assert host_facts.path_of(name) == path


@pytest.mark.parametrize("kind, public, others, warning", [
    ("wifi", [], {"wifi"}, None), ("ethernet", [], {"ethernet", "wifi"}, None),
    ("tunnel", [], {"tunnel", "wifi"}, "unlike paths: if0 is tunnel, other hosts have wifi"),
    ("ethernet", ["8.8.8.8"], {"ethernet"}, "the run's way is public, by 8.8.8.8")])
def test_a_way_that_is_public_or_unlike_others_is_a_warning(kind, public, others, warning):
    it, said = check_hosts.Contact.__new__(check_hosts.Contact), []
    it.report, it.cells = {"kind": kind, "public": public}, {"interface": "if0"}
    it.fail = lambda *told: said.append(told)
    it.warn_of_path(others)
    assert [(what, text.startswith(warning)) for _, what, text, _ in said] == [("warning", True)] * bool(warning)


@pytest.mark.parametrize("address, peer, public", [
    ("192.168.1.7", "10.0.0.1", []), ("192.168.1.7", "8.8.8.8", ["8.8.8.8"]), ("8.8.4.4", None, ["8.8.4.4"]),
    ("100.64.0.3", "100.64.0.1", []), ("198.18.1.10", "198.18.1.11", [])])
def test_a_public_address_is_found(monkeypatch, address, peer, public):
    """Also where the host's own is not: a cloud's machines are reached by others than they have."""
    monkeypatch.setattr(host_facts, "run_interface", lambda chosen, peer: ("eth0", address))
    report = host_facts.Report.__new__(host_facts.Report)
    report.cells, report.problems = {"own name": "none"}, []
    report.check_network(None, peer)
    assert report.public == public


def test_a_bug_of_the_launcher_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(path):
        raise ValueError("a bug")

    monkeypatch.setattr(launch_cluster, "read_hosts", broken)
    monkeypatch.setattr(sys, "argv", ["launch_cluster.py", str(tmp_path / "hosts.txt"), "--check"])
    with pytest.raises(ValueError, match="a bug"):
        launch_cluster.main()


def test_a_host_answers_without_torch_and_without_the_tutorial(tmp_path):
    """The launcher sends it the program; Python's own modules are all that it imports."""
    program = (ROOT / "cluster" / "hosts" / "host_facts.py").read_text()
    question = {"root": str(tmp_path / "none"), "interface": "no0", "peer": None, "port": 0}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], input=f"{json.dumps(question)}\n[]\n", text=True,
                          capture_output=True, check=True, timeout=60)
    report, connected = (json.loads(line.removeprefix("host_facts:")) for line in done.stdout.splitlines())
    assert {name for _, name, *_ in report["problems"]} >= {"no torch", "no project", "no interface"}
    assert report["root"] == question["root"] and report["port"] > 0 and connected["errors"] == []
    assert re.fullmatch(r"\d+\.\d GB", report["cells"]["memory"])


def test_one_clear_error(tools, tmp_path):
    """Of hosts.txt that can't be read, of a flag, and of a host."""
    (tmp_path / "binary").write_bytes(b"a\nb \xff\n")
    hosts, bare = write_hosts(tmp_path, "a"), tmp_path / "bare.txt"
    bare.write_text("a python=/nowhere/python\n")
    for words, code, message in (
            ([tmp_path / "none", "--check"], 2, f"error: {tmp_path}/none can't be read ("),
            ([tmp_path / "binary", "--check"], 2, f"error: {tmp_path}/binary can't be read ("),
            ([tmp_path, "--check"], 2, f"error: {tmp_path} can't be read ("), ([hosts], 2, "nothing to start"),
            ([hosts, "--port", "70000", "--check"], 2, "--port 70000: a port is a number from 1 to 65535"),
            ([hosts, "--env", "A B=1", "--check"], 2, "'A B=1': write NAME=VALUE"),
            ([bare, "--", "x.py"], 127, "no Python: can't start /nowhere/python there: give this host a python=")):
        found, text = Launch(*words, tools=tools).end()
        assert found == code and message in text and text.count("error: ") == (code == 2), text


def test_pages_install_what_was_tested_together():
    """Other versions on a host are an error of --check."""
    lines = [line for path in (ROOT / "cluster").glob("*.md") for line in path.read_text().splitlines()]
    copies = [line for line in lines if re.search(r"rsync .* \./ ", line)]
    installs = [line for line in lines if re.search(r"pip install .*(torch|-e )", line) and not line.startswith("|")]
    assert not copies and all("pip install -c constraints.txt " in line for line in installs), "--install does it"
    assert sum("hosts.txt --install" in line for line in lines) >= 4


def test_a_connection_ends_its_own_processes_only():
    """A host that is called again while the connection before still waits for a save: that must not end the new run."""
    marks = ("run a 1", "run a 2", "run ab 3")
    sleeps = {mark: subprocess.Popen(["sleep", "60"], env={**os.environ, host_run.MARK: mark}) for mark in marks}
    try:
        assert set(host_run.started_for("run a")) == {sleeps[mark].pid for mark in marks[:2]}
        reaper = threading.Thread(target=sleeps[marks[0]].wait)  # as init does where the parent is gone
        reaper.start()
        host_run.end_all(marks[0])
        reaper.join()
        assert [sleeps[mark].poll() is None for mark in marks] == [False, True, True]
    finally:
        for process in sleeps.values():
            process.kill()
            process.wait()
