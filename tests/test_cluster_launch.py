"""launch_cluster.sh without a network: hosts.txt, no word for a shell, whose fault it was, and nothing left running.

An `ssh` that runs its command here takes the place of the true one; test_cluster_launch_on_hosts.py has hosts.
"""

import ast
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

import host_run
import inventory
import pytest
from host_facts import ASKS
from lab.launch import ROOT, environment
from maintain.launcher import Launch, all_gone, lines_of, write_hosts, write_program, write_ssh

PROJECT = ("cluster", "step9_heterogeneous_pp")
FAIL = """
import os, sys, time
time.sleep(0.5 * (os.environ["RANK"] == "1"))
print("the cause" if os.environ["RANK"] == "1" else "Connection closed by peer", file=sys.stderr)
time.sleep(1000 * (os.environ["RANK"] == "2"))
sys.exit(3)
"""
ECHO = f"""import sys
print({ASKS!r}, flush=True)
for line in sys.stdin.buffer:
    print("got", line, flush=True)
print("end", flush=True)
"""


@pytest.mark.parametrize("line", [
    "-oProxyCommand=touch${IFS}HERE", "-v", "a;touch HERE", "$(touch HERE)", "`touch HERE`@a", "a port=22;touch",
    "a port=70000", "a iface=$(touch)", "a iface=eth0;touch", "a address=-x", "a python=-c", "a dir=-", "a nproc=0",
    "a what=1", "a nproc=2 nproc=3", "a 'touch HERE", "a dir='x\ttouch HERE'", "a b", "", "a\na port=22 nproc=2\na",
])
def test_a_line_that_makes_no_sense_is_an_error(line, tmp_path, monkeypatch):
    """Nothing runs: not even ssh, whose stand-in would leave a file."""
    write_program(tmp_path / "ssh", f"#!/bin/sh\ntouch {tmp_path}/ran\necho hostname x\n")
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


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = write_hosts(tmp_path, "a address=10.0.0.1", "b address=10.0.0.2")
    path.write_bytes("\ufeff".encode() + path.read_bytes().replace(b"\n", b"\r\n"))  # as an editor of Windows writes it
    assert [(host.label, host.address) for host in inventory.read_hosts(str(path))] == [("a", "10.0.0.1"), ("b", "10.0.0.2")]


def test_no_word_is_read_by_a_shell(tools, tmp_path):
    """A folder, an argument and a variable that are commands to any shell arrive as they are."""
    hostile = "a 'b\" $(touch ran) `touch ran` ; touch ran & | > ran \\ * ~"
    root = tmp_path / hostile
    shutil.copytree(ROOT / "cluster", root / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "show.py").write_text("import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getcwd())")
    hosts = write_hosts(tmp_path, f"a dir={shlex.quote(str(root))} python={shlex.quote(str(tools / 'python'))}")
    text = Launch(hosts, "--env", f"WORD={hostile}", "--", "show.py", hostile, "--", "--check", tools=tools).expect(0)
    assert f"a | {[hostile, '--', '--check']} {hostile} {root}" in text, text
    assert not list(tmp_path.rglob("ran"))


def test_nothing_outlives_a_run(tools, tmp_path):
    """Not after Ctrl-C, nor where the launcher, a torchrun or a worker is killed. And the first failure is
    not that of a rank which complains of a lost peer."""
    (tmp_path / "fail.py").write_text(FAIL)
    hosts, runs = write_hosts(tmp_path, *lines_of(tools, "abc")), {}
    for how in ("ctrl-c", "killed launcher", "killed torchrun", "killed worker"):  # five runs at the same time
        runs[how] = Launch(hosts, "--", tools / "sleep.py", tools=tools)
    fails = Launch(hosts, "--", tmp_path / "fail.py", tools=tools)
    [run.pids() for run in runs.values()]
    os.killpg(runs["ctrl-c"].process.pid, signal.SIGINT)
    runs["killed launcher"].process.kill()
    os.kill(runs["killed torchrun"].pids()["b"][1], signal.SIGKILL)
    os.kill(runs["killed worker"].pids()["b"][0], signal.SIGKILL)
    runs["ctrl-c"].expect(130)
    for how, code in ("killed torchrun", 137), ("killed worker", 1):
        runs[how].expect(code, rf"b \(node rank 1\) failed first, with exit code {code}")
    for how, run in runs.items():
        assert all_gone(run.pids()), how
    text = fails.expect(1, r"b \(node rank 1\) failed first, with exit code 1", "its last lines:$")
    assert text.endswith("\n    the cause\n"), text


def test_the_launchers_log_on_a_full_disk(tools, tmp_path):
    """What it prints is lost then, and the run is not."""
    (tmp_path / "end.py").write_text(f"print('line ' * 5000); open({str(tmp_path / 'ended')!r}, 'w')")
    hosts = write_hosts(tmp_path, f"a iface=lo python={tools / 'python'}")
    with open("/dev/full", "w") as log:
        done = subprocess.run([ROOT / "cluster" / "launch_cluster.sh", hosts, "--", tmp_path / "end.py"], stdout=log,
                              stderr=log, env=environment(PATH=f"{tools}:{os.environ['PATH']}", PYTHON=sys.executable))
    assert done.returncode == 0 and (tmp_path / "ended").exists()


def test_check_compares_the_hosts(tools, tmp_path):
    """Another torch, clock and project, a public way, and a port in use; what a login shell or ssh -v
    prints is no answer. The cures run nowhere by themselves and delete nothing."""
    write_ssh(tmp_path, """echo "Welcome. Sending command: $last"; printf 'no mail, ' >&2""")
    for name in PROJECT:
        shutil.copytree(ROOT / name, tmp_path / "old copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "old copy" / "cluster" / "plan.py").write_text("")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        old = f"b iface=lo port=2222 address=8.8.8.8 python={tools / 'python_old'} dir='{tmp_path}/old copy'"
        hosts = write_hosts(tmp_path, *lines_of(tools, "a"), old, *lines_of(tools, "c"))
        text = Launch(hosts, "--check", "--port", port, "--", "train.py", tools=tmp_path).expect(1)
    problems = dict(re.findall(r"^([abc]\S*: .+)\n    cure: (.+)$", text, re.M))
    for start, cure in {
            f"a: blocked port: {port}: Address already in use": f"--port {port + 1}",
            "a: warning: the run's way is public, by 8.8.8.8: what the ranks send is neither": "a VPN: its interface",
            "b:2222: other torch version: 2.9.1, but a has 2.13.0": "launch_cluster.sh HOSTS --install; for",
            "b:2222: other project version: hash ": "launch_cluster.sh HOSTS --install",
            "b:2222: clock skew: +4": "on both: sudo timedatectl"}.items():
        assert [found for name, found in problems.items() if name.startswith(start) and cure in found], (start, text)
    assert len(problems) == 5 and " | " not in text and not re.search(r"--delete|\brm ", text), text
    rows = {line.split()[0]: line for line in text.splitlines()[1:4]}
    assert rows["b:2222"].count("!") == 3 and rows["a"].count("!") == 1 and "!" not in rows["c"], text


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


def test_a_host_without_its_python(tools, tmp_path):
    code, text = Launch(write_hosts(tmp_path, "a python=/nowhere/python"), "--", "x.py", tools=tools).end()
    assert code == 127 and "error: " not in text, text
    assert "no Python: can't start /nowhere/python there: give this host a python=" in text


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


def test_what_one_types_for_a_chat(tools, tmp_path):
    """Goes to the host that asks for it, line by line as it is; its end, too."""
    (tmp_path / "echo.py").write_text(ECHO)
    typed = "one\n\n two é \n".encode() + b"\xff\n" + b"x" * 200_000 + b"\nlast"
    command = [ROOT / "cluster" / "launch_cluster.sh", write_hosts(tmp_path, f"a python={tools}/python"), "--",
               tmp_path / "echo.py", "--chat"]
    variables = environment(PATH=f"{tools}:{os.environ['PATH']}", PYTHON=sys.executable)
    done = subprocess.run(list(map(str, command)), input=typed, env=variables, capture_output=True, timeout=60)
    got = re.findall(r"a \| got (.*)", done.stdout.decode())
    assert done.returncode == 0 and list(map(ast.literal_eval, got)) == typed.splitlines(keepends=True)
    assert done.stdout.decode().endswith("a | end\n")
