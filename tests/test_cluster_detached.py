"""Runs that outlive their launcher: --detach, --attach, --status and --stop, with stand-ins for ssh and torchrun."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess

import pytest
from lab.launch import ROOT
from maintain.launcher import Launch, all_gone, eventually, runs, write_hosts, write_whole

COUNT = r"""
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    sys.stdout.write("saved\n")
    sys.exit()
signal.signal(signal.SIGTERM, save)
sys.stdout.write(f"pids {os.getpid()} {os.getppid()}\n")
for number in range(100000):
    sys.stdout.write(f"number {number}\n")
    time.sleep(0.1)
    if os.path.exists(sys.argv[1] + os.environ.get("RANK", "")[:1]):
        sys.exit(int(open(sys.argv[1] + os.environ.get("RANK", "")[:1]).read()))
"""


class Hosts:
    """Hosts that all are this machine, with a copy of the project where their output goes."""

    def __init__(self, folder: pathlib.Path, tools: pathlib.Path):
        self.folder, self.tools, self.root = folder, tools, folder / "copy"
        shutil.copytree(ROOT / "cluster" / "hosts", self.root / "cluster" / "hosts",
                        ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "count.py").write_text(COUNT)
        self.write("ab")

    def write(self, labels: str, **others: str) -> None:
        """hosts.txt, with what follows a host's name where that is no host that is well."""
        well = f"iface=lo python={self.tools / 'python'} dir={self.root}"
        self.hosts = write_hosts(self.folder, *(f"{label} {others.get(label, well)}" for label in labels))

    def launch(self, words: str) -> Launch:
        return Launch(self.hosts, *words.split(), tools=self.tools)

    def expect(self, code: int, words: str, *patterns: str) -> str:
        """What launch_cluster.sh prints that is started by these words; a script follows --detach."""
        words += f" -- {self.folder / 'count.py'} {self.folder / 'code'}" * ("--detach" in words)
        return self.launch(words).expect(code, *patterns, seconds=30)

    def folders(self) -> dict[str, pathlib.Path]:
        return {path.name: path for path in self.root.glob("logs/launches/*/*")}

    def pids(self) -> dict[str, list[int]]:
        """{host: [worker, daemon]}."""
        def found() -> dict[str, list[int]]:
            return {label: [int(re.findall(r"pids (\d+)", (path / "output").read_text())[-1]),
                            int((path / "pid").read_text())]
                    for label, path in self.folders().items() if "pids" in (path / "output").read_text()}

        assert eventually(lambda: found().keys() == self.folders().keys(), 20)
        return found()


@pytest.fixture
def hosts(tmp_path, tools):
    hosts = Hosts(tmp_path, tools)
    yield hosts
    for path in hosts.folders().values():
        if runs(pid := int((path / "pid").read_text())):
            os.kill(pid, signal.SIGTERM)


def numbers(run: Launch, label: str) -> list[int]:
    return [int(match[1]) for line in run.lines if (match := re.match(rf"{label} +\| number (\d+)", line))]


def test_a_run_outlives_its_launcher(hosts):
    hosts.expect(2, "--attach", "error: no host of .*hosts.txt that answers has a detached run: start one by --detach")
    text = hosts.expect(0, "--detach --elastic 1:3 --env TOKEN=hidden", "--attach shows what it prints")
    assert text.count("launch_cluster: ") == 2
    pids = hosts.pids()
    assert all(runs(pid) for pair in pids.values() for pid in pair) and set(pids) == {"a", "b"}
    for label, folder in hosts.folders().items():
        assert stat.S_IMODE((folder / "job.json").stat().st_mode) == 0o600
        assert os.getsid(pids[label][1]) == pids[label][1], "a session of its own"
        token = json.loads((folder / "job.json").read_text())["elastic"]["token"]
        assert token not in text + (folder / "output").read_text()
    attached = hosts.launch("--attach")
    assert eventually(lambda: len(numbers(attached, "a")) > 12 and len(numbers(attached, "b")) > 12, 20)
    found = numbers(attached, "a")
    assert found == list(range(found[0], found[0] + len(found))), "nothing twice, nothing left out"
    os.killpg(attached.process.pid, signal.SIGINT)
    assert "saved" not in attached.expect(130, "^launch_cluster: left. The run goes on", seconds=10)
    attached = hosts.launch("--attach")
    assert eventually(lambda: numbers(attached, "a"), 20)
    attached.process.kill()
    text = hosts.expect(0, "--status")
    assert re.match(r"a +yes +\w{8} +count.py \S+ +runs since 20\S+ \S+ +number \d+$", text.splitlines()[1]), text
    attached = hosts.launch("--attach")
    text = hosts.expect(0, "--stop")
    assert all_gone(pids, 0)
    for text in text, attached.expect(143, seconds=10):
        assert len(re.findall(r"^[ab] \| saved$", text, re.M)) == 2 and "failed" not in text, text
    assert hosts.expect(0, "--status").count(" was stopped  ") == 2
    left = [file.read_text(errors="replace") for folder in hosts.folders().values() for file in folder.iterdir()]
    assert len(left) == 8 and not any("hidden" in text for text in left), "no secret of --env outlives the run"
    assert hosts.expect(0, "--stop") == "launch_cluster: no part of a run is alive any more\n"


@pytest.mark.slow
def test_detach_twice(hosts):
    """Of an elastic run, the hosts that have no part get one, with the same token; nothing else goes beside a run."""
    hosts.write("a")
    hosts.expect(0, "--detach --elastic 1:2")
    hosts.write("bac")
    hosts.expect(0, "--detach --elastic 1:2", "goes on by itself on a, b, with")
    jobs = {label: json.loads((path / "job.json").read_text()) for label, path in hosts.folders().items()}
    assert set(jobs) == {"a", "b"} and jobs["b"]["elastic"] == {
        **jobs["a"]["elastic"], "hosts": ["a", "b", "c"], "host": 1} and jobs["a"]["elastic"]["hosts"] == ["a"]
    pids = hosts.pids()
    for words in "--elastic 1:3", "", "--elastic 1:2 --port 29501", "--elastic 1:2 --env OTHER=1":
        hosts.expect(2, f"--detach {words}", r"^error: the run \w{8} \(.*count.py .*\) is alive on b, a: end it first, "
                                             "by .*hosts.txt --stop")
    assert hosts.pids() == pids
    hosts.expect(0, "--stop")
    assert all_gone(hosts.pids(), 0)


def test_hosts_have_numbers_of_their_own(hosts):
    """Each part knows the hosts of its start, and the first one of hosts.txt the fewest. A host that comes while others
    are away, or are in hosts.txt no more, gets none of theirs. A part that can't keep the list, as on a full disk, says
    so, and the same command sends the list again."""
    def numbers_of(labels: str, full: str = "", **others: str) -> dict[str, int]:
        hosts.write(labels, **others)
        text = hosts.expect(0, "--detach --elastic 1:9")
        said = "^launch_cluster: (.) can't keep the list of hosts: make room in logs/launches/ there"
        assert re.findall(said, text, re.M) == list(full)
        jobs = [json.loads((path / "job.json").read_text()) for path in hosts.folders().values()]
        assert len({job["id"] for job in jobs}) == len({job["elastic"]["token"] for job in jobs}) == 1
        return {job["mark"][-1]: job["elastic"]["host"] for job in jobs}

    assert numbers_of("ab") == {"a": 0, "b": 1}
    (known := hosts.folders()["a"] / "hosts.new").mkdir()
    assert numbers_of("acb", full="a") == {"a": 0, "b": 1, "c": 2}
    known.rmdir()
    assert numbers_of("adcb", c="python=/nowhere/python") == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert json.loads(known.with_name("hosts").read_text()) == list("abcd")
    assert numbers_of("eadb") == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}


def test_the_end_of_a_run_is_seen(hosts):
    """An exit code of a part is that of --attach, also for whoever comes late."""
    hosts.expect(0, "--detach")
    attached = hosts.launch("--attach")
    assert eventually(lambda: numbers(attached, "a") and numbers(attached, "b"), 20)
    write_whole(hosts.folder / "code1", "3")
    write_whole(hosts.folder / "code0", "0")
    for run in attached, hosts.launch("--attach"):
        run.expect(1, r"^launch_cluster: b \(node rank 1\) failed first, with exit code 1",
                   "^launch_cluster: a: its part of the run has ended with code 0")
    hosts.expect(0, "--status", "has ended with code 1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_full_disk_under_the_output(hosts):
    """The exit code is known all the same; and where there is no room for a part, none is started."""
    def fill(file: pathlib.Path) -> None:
        with contextlib.suppress(OSError), open(file, "ab", buffering=0) as full:
            while full.write(4096 * b"x"):
                pass

    hosts.write("a")
    (logs := hosts.root / "logs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", logs], check=True)
    try:
        hosts.expect(0, "--detach")
        fill(logs / "filler")
        fill(hosts.folders()["a"] / "output")  # which has room in its last block
        hosts.expect(1, "--attach", "failed first, with exit code 1")  # the script itself ends where it can't print
        hosts.expect(0, "--status", "has ended with code 1")
        shutil.rmtree(logs / "launches")
        fill(logs / "filler")
        hosts.expect(2, "--detach", "^error: a could not start its part.*: No space left on device: make room")
        shutil.rmtree(logs / "launches")
    finally:
        subprocess.run(["umount", "-l", logs], check=True)


def test_a_dead_part_hides_no_living_one(hosts):
    """Not even one that has started later, by a clock that was ahead then. And it keeps no secret of --env."""
    hosts.expect(0, "--detach")
    living = hosts.folders()["a"]
    job = json.loads((living / "job.json").read_text())
    dead = living.parent.parent / "dead" / "a"
    dead.mkdir(parents=True)
    (dead / "output").touch()
    (dead / "job.json").write_text(json.dumps({**job, "id": "dead", "started": job["started"] + 1e6,
                                               "environment": {"KEY": "c0rrect-h0rse"}}) + "\n")
    assert hosts.expect(0, "--status").count("runs since") == 2
    assert "c0rrect-h0rse" not in (dead / "job.json").read_text() and json.loads((dead / "job.json").read_text())
    assert hosts.expect(0, "--stop", "a: its part of the run was stopped").count("saved") == 2
    shutil.rmtree(dead.parent)


@pytest.mark.slow
def test_hosts_without_a_part(hosts):
    """A part that can't begin ends the others. Without a host that is away an elastic run begins, and no other."""
    hosts.write("abc", c=f"iface=no0 python={hosts.tools / 'python'} dir={hosts.root}")
    hosts.expect(2, "--detach", "c could not start its part, so all were stopped", "there is no interface no0")
    shutil.rmtree(hosts.root / "logs")
    hosts.write("abc", c="python=/nowhere/python")
    text = hosts.expect(2, "--detach", "^error: nothing is started, since hosts are missing: c: no Python: exit code")
    assert not hosts.folders() and text.count("\n") == 1
    hosts.expect(0, "--detach --elastic 2:3", "^launch_cluster: no part yet has c: no Python: ")
    assert set(hosts.pids()) == {"a", "b"}
    hosts.expect(1, "--stop", "^launch_cluster: out of reach, where it may go on: c")
    hosts.write("ab")
    hosts.expect(0, "--stop")
