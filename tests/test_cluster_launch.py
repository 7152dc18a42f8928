"""launch_cluster.sh: what it says of hosts that are not fit, how it starts, and that it always ends everywhere.

Most tests run a stand-in for torch and torchrun, that starts in no time: a Python whose `torch` is a few lines. Those
of hosts.txt need no host either: an `ssh` that hands its last word to a shell here, as the true one does there.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launch import ROOT, STEPS, environment, modules_of

STEP, CLUSTER = STEPS["9"], ROOT / "tools" / "testbed.sh"
LAUNCH = STEP / "launch_cluster.sh"
NODES = ("node0", "node1", "node2")
TORCH = """
import os, types
__version__ = os.environ.get("TORCH", "2.13.0")
version, cuda = types.SimpleNamespace(cuda=None), types.SimpleNamespace(is_available=lambda: False)
"""
TORCHRUN = """
import os, subprocess, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
rank, script = option("--node-rank"), sys.argv[sys.argv.index("--master-port") + 2:]
worker = subprocess.Popen([sys.executable, *script], start_new_session=True, env={**os.environ, "RANK": rank})
sys.exit(1 if worker.wait() else 0)
"""
CLOCK = "import os, time; now = time.time; time.time = lambda: now() + float(os.environ.get('AHEAD', 0))"
SLEEP = "import os, time; print('pids', os.getpid(), os.getppid(), flush=True); time.sleep(1000)"
GLOO = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
print("pids", os.getpid(), os.getppid(), "interface", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
while True:
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.05)
"""
SSH = """#!/bin/sh
for word; do last=$word; done
case " $* " in *" -G "*) echo "hostname $last"; exit;; esac
exec sh -c "$last"
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A folder with `python`, of the fast torch, `python_old`, of an old torch and a clock ahead, and `ssh`."""
    folder = tmp_path_factory.mktemp("tools")
    files = {"torch/__init__.py": TORCH, "torch/distributed/__init__.py": "", "torch/distributed/run.py": TORCHRUN,
             "sitecustomize.py": CLOCK, "sleep.py": SLEEP, "true/gloo.py": GLOO, "ssh": SSH}
    start = f'PYTHONPATH={shlex.quote(str(folder))} exec {shlex.quote(sys.executable)} "$@"\n'
    files |= {"python": f"#!/bin/sh\n{start}", "python_old": f"#!/bin/sh\nTORCH=2.9.1 AHEAD=40 {start}"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("python", "python_old", "ssh"):
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def bed():
    """The three hosts of tools/testbed.sh; `bed(...)` runs one of its commands, `bed.options` are those of ssh."""
    def command(*words):
        subprocess.run([CLUSTER, *words], check=True)

    up = subprocess.run([CLUSTER, "up"], capture_output=True, text=True)
    if up.returncode == 2:
        pytest.skip(up.stderr)
    assert up.returncode == 0, up.stderr
    yield command
    command("down")


class Launch:
    """A launcher that runs, in a process group of its own like a command typed at a terminal."""

    def __init__(self, hosts: pathlib.Path, *words, options="-F /run/testbed/ssh_config", **variables):
        env = environment(SSH_OPTIONS=options, PYTHON=sys.executable, **variables)
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.process = subprocess.Popen([LAUNCH, hosts, *words], env=env, start_new_session=True, **pipes)
        self.lines = []

    def pids(self) -> dict[str, list[int]]:
        """{host: [worker, its torchrun]} as soon as all three have said so."""
        found = {}
        while len(found) < 3:
            line = self.process.stdout.readline()
            assert line, "".join(self.lines)
            self.lines.append(line)
            if match := re.match(r"(\w+) +\| pids (\d+) (\d+)", line):
                found[match[1]] = [int(match[2]), int(match[3])]
        return found

    def end(self, seconds: float) -> tuple[int, str]:
        """(exit code, all that it printed), at the latest after `seconds`."""
        try:
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, "".join(self.lines) + rest


def hosts_file(folder, *lines) -> pathlib.Path:
    (folder / "hosts.txt").write_text("\n".join(lines) + "\n")
    return folder / "hosts.txt"


def inside() -> dict[str, set[str]]:
    """{host: its processes}"""
    return {node: set(subprocess.check_output(["ip", "netns", "pids", f"testbed-{node}"], text=True).split())
            for node in NODES}


def wait_until_inside(before: dict, seconds: float) -> None:
    """Until no host has more processes than before."""
    deadline = time.monotonic() + seconds
    while more := {node: pids - before[node] for node, pids in inside().items() if pids - before[node]}:
        assert time.monotonic() < deadline, f"still there after {seconds} s: {more}"
        time.sleep(0.1)


# --- hosts.txt -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line", [
    "-oProxyCommand=touch${IFS}HERE", "-v", "a;touch HERE", "$(touch HERE)", "`touch HERE`@a", "a port=22;touch",
    "a port=70000", "a iface=$(touch)", "a iface=eth0;touch", "a address=-x", "a python=-c", "a dir=-", "a nproc=0",
    "a what=1", "a nproc=2 nproc=3", "a 'touch HERE", "a dir='x\ttouch HERE'", "a b", "", "a\na port=22 nproc=2\na",
])
def test_a_line_that_makes_no_sense_is_an_error(line, tools, tmp_path):
    """Nothing runs: not even ssh, whose stand-in would leave a file."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho hostname x\n")
    (fake / "ssh").chmod(0o755)
    hosts = hosts_file(tmp_path, line.replace("HERE", f"{tmp_path}/ran"))
    with modules_of("9"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
        from cluster_hosts import read_hosts

        with pytest.raises(ValueError, match="hosts.txt"):
            read_hosts(str(hosts))
    assert not (tmp_path / "ran").exists()


def test_no_word_is_read_by_a_shell(tools, tmp_path):
    """A folder, an argument and a variable that are commands to any shell arrive as they are."""
    hostile = "a 'b\" $(touch ran) `touch ran` ; touch ran & | > ran \\ * ~"
    folder = tmp_path / hostile.replace("/", "") / "step"
    shutil.copytree(STEP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "show.py").write_text("import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getcwd())")
    hosts = hosts_file(tmp_path, f"a dir={shlex.quote(str(folder))} python={shlex.quote(str(tools / 'python'))}")
    run = Launch(hosts, "--env", f"WORD={hostile}", "--", "show.py", hostile, "--", "--check", options="",
                 PATH=f"{tools}:{os.environ['PATH']}")
    code, text = run.end(30)
    assert code == 0 and f"a | {[hostile, '--', '--check']} {hostile} {folder}" in text, text
    assert not list(tmp_path.rglob("ran"))


def test_the_first_failure_is_not_who_complains_of_a_lost_peer(tools, tmp_path):
    (tmp_path / "fail.py").write_text("""
import os, sys, time
time.sleep(0.5 * (os.environ["RANK"] == "1"))
print("the cause" if os.environ["RANK"] == "1" else "Connection closed by peer", file=sys.stderr)
time.sleep(1000 * (os.environ["RANK"] == "2"))
sys.exit(3)
""")
    lines = [f"{host} iface=lo python={tools / 'python'}" for host in "abc"]
    run = Launch(hosts_file(tmp_path, *lines), "--", tmp_path / "fail.py", options="",
                 PATH=f"{tools}:{os.environ['PATH']}")
    code, text = run.end(30)
    assert code == 1 and "b (node rank 1) failed first, with exit code 1" in text, text
    assert text.endswith("its last lines:\n    the cause\n"), text


# --- the hosts of the test bed ---------------------------------------------------------------------------------------

def test_check_names_what_is_wrong(bed, tools, tmp_path):
    """A full disk and a blocked port, another torch, clock, project and own name, a wrong key, nobody there."""
    copy, old = tmp_path / "copy" / STEP.name, tmp_path / "old" / STEP.name
    for folder in (copy, old):
        shutil.copytree(STEP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (old / "train.py").write_text("")
    runs = tmp_path / "copy" / "runs"
    runs.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "config").write_text(f"Host node2\n  IdentityFile {tmp_path}/key\n  IdentitiesOnly yes\n"
                                     "  UserKnownHostsFile /run/testbed/known_hosts\n  HostKeyAlias testbed\n"
                                     "  HostName 198.18.0.12\nHost node0 node1\n  Include /run/testbed/ssh_config\n")
    hosts = hosts_file(tmp_path, f"node0 python={tools}/python dir={copy}",
                       f"node1 python={tools}/python_old dir={old}", f"node2 python={tools}/python",
                       f"198.18.0.99 python={tools}/python")
    names = pathlib.Path("/etc/netns/testbed-node1/hosts")
    before = names.read_text()
    block = ["to", "198.18.0.10", "ipproto", "tcp", "dport", "29500", "prohibit"]
    on_node0 = ["ssh", "-F", "/run/testbed/ssh_config", "node0"]
    subprocess.run([*on_node0, f"mount -t tmpfs -o size=64k none {runs}"], check=True)
    subprocess.run(["ip", "-n", "testbed-node1", "rule", "add", *block], check=True)
    names.write_text(re.sub(r"\S+ node1", "127.0.0.1 node1", before))
    try:
        run = Launch(hosts, "--check", "--", "train.py", options=f"-F {tmp_path}/config -o ConnectTimeout=2")
        code, text = run.end(40)
    finally:
        names.write_text(before)
        subprocess.run(["ip", "-n", "testbed-node1", "rule", "del", *block], check=True)
        subprocess.run([*on_node0, f"umount {runs}"], check=True)
    assert code == 1, text
    for problem in ("node0: full disk: ", "node0: blocked port: 198.18.0.10:29500 can't be reached from node1",
                    "node1: other torch version: 2.9.1, but node0 has 2.13.0", "node1: clock skew: +40.0 s from node0",
                    "node1: host name that resolves to 127.0.0.1", "node1: other project version", "node2: wrong key: ",
                    "198.18.0.99: unreachable host: "):
        assert re.search(rf"^{re.escape(problem)}.*\n    cure: .", text, re.M), f"{problem!r} is not in\n{text}"
    assert text.count("cure: ") == 8 and " | " not in text, text  # nothing else, and nothing was started


def test_check_passes_and_ctrl_c_ends_all(bed, tools, tmp_path):
    before = inside()
    hosts = hosts_file(tmp_path, *(f"{node} python={tools}/python" for node in NODES))
    run = Launch(hosts, "--check", "--", tools / "sleep.py")
    run.pids()
    os.killpg(run.process.pid, signal.SIGINT)
    code, text = run.end(10)
    assert code == 130 and "cure" not in text and len(re.findall(r"^node\d +ok ", text, re.M)) == 3, text
    wait_until_inside(before, 2)


def test_a_killed_launcher_leaves_nothing(bed, tools, tmp_path):
    before = inside()
    run = Launch(hosts_file(tmp_path, *(f"{node} python={tools}/python" for node in NODES)), "--", tools / "sleep.py")
    run.pids()
    run.process.kill()
    wait_until_inside(before, 10)
    run.end(1)


def test_a_killed_torchrun_leaves_no_orphan(bed, tools, tmp_path):
    before = inside()
    run = Launch(hosts_file(tmp_path, *(f"{node} python={tools}/python" for node in NODES)), "--", tools / "sleep.py")
    os.kill(run.pids()["node1"][1], signal.SIGKILL)
    code, text = run.end(30)
    assert code == 137 and "node1 (node rank 1) failed first, with exit code 137" in text, text
    wait_until_inside(before, 2)


def test_a_cut_cable_ends_both_sides_within_30_s(bed, tools, tmp_path):
    before = inside()
    run = Launch(hosts_file(tmp_path, *(f"{node} python={tools}/python" for node in NODES)), "--", tools / "sleep.py")
    pids = run.pids()
    bed("cut", "node2")
    try:
        start = time.monotonic()
        code, text = run.end(30)
        assert code == 255 and "node2 (node rank 2) failed first, with exit code 255" in text, text
        assert "unreachable host" in text, text
        while [pid for pid in pids["node2"] if pathlib.Path(f"/proc/{pid}").exists()]:  # it heard of nothing
            assert time.monotonic() < start + 30, "node2 trains on"
            time.sleep(0.1)
    finally:
        bed("join", "node2")
    wait_until_inside(before, 60)  # its sshd learns of it when packets pass again


def test_a_killed_worker_of_a_true_run_ends_the_others_within_30_s(bed, tools, tmp_path):
    before = inside()
    hosts = hosts_file(tmp_path, *(f"{node} python={sys.executable}" for node in NODES))
    run = Launch(hosts, "--env", "OMP_NUM_THREADS=1", "--", tools / "true" / "gloo.py")
    os.kill(run.pids()["node1"][0], signal.SIGKILL)
    code, text = run.end(30)
    assert len(re.findall(r"^node\d \| pids .* interface eth0$", text, re.M)) == 3, text
    assert code == 1 and "node1 (node rank 1) failed first, with exit code 1" in text, text
    assert "exitcode: -9" in text.rpartition("failed first")[2], text
    wait_until_inside(before, 2)
