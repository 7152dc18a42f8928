"""Runs that outlive their launcher: --detach, --attach, --status and --stop, with stand-ins for ssh and torchrun."""

import contextlib
import functools
import io
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

    def write(self, labels: str) -> None:
        self.hosts = write_hosts(self.folder, *(f"{label} iface=lo python={self.tools / 'python'} dir={self.root}"
                                                for label in labels))

    def launch(self, *words, script: bool = False) -> Launch:
        words = [*words, "--", self.folder / "count.py", self.folder / "code"] if script else words
        return Launch(self.hosts, *words, tools=self.tools)

    def end(self, *words, script: bool = False) -> tuple[int, str]:
        return self.launch(*words, script=script).end(30)

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
    code, text = hosts.end("--detach", "--elastic", "1:3", "--env", "TOKEN=hidden", script=True)
    said = re.findall("^launch_cluster: (.*)", text, re.M)
    assert code == 0 and len(said) == 2 and "--attach shows what it prints" in said[1], text
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
    code, text = attached.end(10)
    assert code == 130 and "launch_cluster: left. The run goes on" in text and "saved" not in text, text
    attached = hosts.launch("--attach")
    assert eventually(lambda: numbers(attached, "a"), 20)
    attached.process.kill()
    code, text = hosts.end("--status")
    rows = text.splitlines()
    assert code == 0 and re.match(r"a +yes +\w{8} +count.py \S+ +runs since 20\S+ \S+ +number \d+$", rows[1]), text
    attached = hosts.launch("--attach")
    code, text = hosts.end("--stop")
    assert code == 0 and all_gone(pids, 0) and len(re.findall(r"^[ab] \| saved$", text, re.M)) == 2, text
    code, text = attached.end(10)
    assert code == 143 and len(re.findall(r"^[ab] \| saved$", text, re.M)) == 2 and "failed" not in text, text
    assert hosts.end("--status")[1].count(" was stopped  ") == 2
    left = [file.read_text(errors="replace") for folder in hosts.folders().values() for file in folder.iterdir()]
    assert len(left) == 8 and not any("hidden" in text for text in left), "no secret of --env outlives the run"
    code, text = hosts.end("--stop")
    assert code == 0 and text == "launch_cluster: no part of a run is alive any more\n", text


@pytest.mark.slow
def test_detach_twice(hosts):
    """Of an elastic run, the hosts that have no part get one, with the same token; nothing else goes beside a run."""
    hosts.write("a")
    assert hosts.end("--detach", "--elastic", "1:2", script=True)[0] == 0
    hosts.write("bac")
    code, text = hosts.end("--detach", "--elastic", "1:2", script=True)
    assert code == 0 and "goes on by itself on a, b, with" in text, text
    jobs = {label: json.loads((path / "job.json").read_text()) for label, path in hosts.folders().items()}
    assert set(jobs) == {"a", "b"} and jobs["b"]["elastic"] == {
        **jobs["a"]["elastic"], "hosts": ["a", "b", "c"], "host": 1} and jobs["a"]["elastic"]["hosts"] == ["a"]
    pids = hosts.pids()
    for words in (["--elastic", "1:3"], [], ["--elastic", "1:2", "--port", "29501"],
                  ["--elastic", "1:2", "--env", "OTHER=1"]):
        code, text = hosts.end("--detach", *words, script=True)
        expected = r"error: the run \w{8} \(.*count.py .*\) is alive on b, a: end it first, by .*hosts.txt --stop"
        assert code == 2 and re.search(expected, text), text
    assert hosts.pids() == pids
    assert hosts.end("--stop")[0] == 0 and all_gone(hosts.pids(), 0)


@pytest.fixture
def numbered(monkeypatch, tmp_path):
    """numbered(labels, away=...): types --detach with these hosts. Then {label: its number in the run}.

    The far end of each host is answer() in a folder of its own, in which a part is alive as soon as it has a job.
    """
    import detached
    from inventory import Host
    from launch_cluster import make_job

    def start(job: dict) -> None:
        folder = pathlib.Path(job["folder"])
        folder.mkdir(parents=True)
        (folder / "output").touch()
        (folder / "job.json").write_text(json.dumps(job))

    def ask_all(hosts, what, jobs=None, **more) -> dict:
        said = {}
        for host in hosts:
            (tmp_path / host.label).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / host.label)
            lines = io.StringIO()
            with contextlib.redirect_stdout(lines):
                detached.answer({"ask": what, "label": host.label, "run": "*", **more}
                                | ({"job": jobs[host.label], "run": jobs[host.label]["id"]} if jobs else {}))
            said[host.label] = json.loads(lines.getvalue().removeprefix(detached.MARK))
        return {label: {"away": "unreachable"} if label in are_away else it for label, it in said.items()}

    for name, stand_in in {"start": start, "is_alive": lambda folder: True, "ask_all": ask_all}.items():
        monkeypatch.setattr(detached, name, stand_in)
    are_away = set()

    def detach(labels: str, away: str = "") -> dict[str, int]:
        are_away.clear(), are_away.update(away)
        hosts = [Host(label, address=f"10.0.0.{ord(label)}", rank=rank) for rank, label in enumerate(labels)]
        run = {"id": f"run of {labels}", "token": labels, "hosts": [], "started": 1.0, "port": 29500, "environment": {},
               "command": ["x.py"], "is_detached": True}
        assert detached.detach(hosts, "hosts.txt", (1, 9), {}, run, functools.partial(make_job, run, (1, 9), "")) == 0
        jobs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/logs/launches/*/*/job.json")}
        assert len({job["id"] for job in jobs.values()}) == len({job["elastic"]["token"] for job in jobs.values()}) == 1
        return {label: job["elastic"]["host"] for label, job in jobs.items()}

    return detach


def test_hosts_added_one_after_the_other_have_numbers_of_their_own(numbered):
    """Each part knows the hosts of its start, and the first one of hosts.txt the fewest."""
    numbered("ab")
    assert numbered("acb") == {"a": 0, "b": 1, "c": 2}
    assert numbered("adcb") == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert numbered("eadcb") == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}


@pytest.mark.parametrize("left", ["c is silent", "c is not in hosts.txt"])
def test_a_host_gets_no_number_of_one_that_is_not_asked(numbered, left):
    numbered("ab")
    numbered("acb")
    found = numbered("adcb", away="c") if left == "c is silent" else numbered("adb")
    assert found == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_part_that_can_not_keep_the_list_of_hosts(numbered, tmp_path, capsys):
    """As on a full disk. The launcher says so, and the same command sends the list again."""
    numbered("ab")
    (full := next(tmp_path.glob("a/logs/launches/*/a")) / "hosts.new").mkdir()
    numbered("acb")
    assert "a can't keep the list of hosts: make room in logs/launches/ there" in capsys.readouterr().err
    full.rmdir()
    numbered("acb")
    assert "keep" not in capsys.readouterr().err and len(json.loads(full.with_name("hosts").read_text())) == 3


def test_the_end_of_a_run_is_seen(hosts):
    """An exit code of a part is that of --attach, also for whoever comes late."""
    assert hosts.end("--detach", script=True)[0] == 0
    attached = hosts.launch("--attach")
    assert eventually(lambda: numbers(attached, "a") and numbers(attached, "b"), 20)
    write_whole(hosts.folder / "code1", "3")
    write_whole(hosts.folder / "code0", "0")
    for code, text in attached.end(20), hosts.end("--attach"):
        assert code == 1 and "launch_cluster: b (node rank 1) failed first, with exit code 1" in text, text
        assert "launch_cluster: a: its part of the run has ended with code 0" in text, text
    assert "has ended with code 1" in hosts.end("--status")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_full_disk_under_the_output(hosts):
    """The exit code is known all the same; and where there is no room for a part, none is started."""
    hosts.write("a")
    (logs := hosts.root / "logs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", logs], check=True)
    try:
        assert hosts.end("--detach", script=True)[0] == 0
        for file in logs / "filler", hosts.folders()["a"] / "output":  # the latter has room in its last block
            with contextlib.suppress(OSError), open(file, "ab", buffering=0) as full:
                while full.write(4096 * b"x"):
                    pass
        code, text = hosts.end("--attach")  # the script itself ends where it can't print
        assert code == 1 and "failed first, with exit code 1" in text, text
        assert "has ended with code 1" in hosts.end("--status")[1]
        shutil.rmtree(logs / "launches")
        with contextlib.suppress(OSError), open(logs / "filler", "ab", buffering=0) as full:
            while full.write(4096 * b"x"):
                pass
        code, text = hosts.end("--detach", script=True)
        assert code == 2 and re.search("error: a could not start its part.*: No space left on device: make room", text)
        shutil.rmtree(logs / "launches")
    finally:
        subprocess.run(["umount", "-l", logs], check=True)


def test_a_dead_part_hides_no_living_one(hosts):
    """Not even one that has started later, by a clock that was ahead then. And it keeps no secret of --env."""
    assert hosts.end("--detach", script=True)[0] == 0
    [living] = [path for label, path in hosts.folders().items() if label == "a"]
    job = json.loads((living / "job.json").read_text())
    dead = living.parent.parent / "dead" / "a"
    dead.mkdir(parents=True)
    (dead / "output").touch()
    (dead / "job.json").write_text(json.dumps({**job, "id": "dead", "started": job["started"] + 1e6,
                                               "environment": {"KEY": "c0rrect-h0rse"}}) + "\n")
    code, text = hosts.end("--status")
    assert code == 0 and text.count("runs since") == 2, text
    assert "c0rrect-h0rse" not in (dead / "job.json").read_text() and json.loads((dead / "job.json").read_text())
    code, text = hosts.end("--stop")
    assert text.count("saved") == 2 and "a: its part of the run was stopped" in text, text
    shutil.rmtree(dead.parent)


@pytest.mark.slow
def test_hosts_without_a_part(hosts):
    """A part that can't begin ends the others. Without a host that is away an elastic run begins, and no other."""
    lines = hosts.hosts.read_text()
    hosts.hosts.write_text(f"{lines}c iface=no0 python={hosts.tools / 'python'} dir={hosts.root}\n")
    code, text = hosts.end("--detach", script=True)
    assert code == 2 and "c could not start its part, so all were stopped" in text, text
    assert "there is no interface no0" in text, text
    shutil.rmtree(hosts.root / "logs")
    hosts.hosts.write_text(f"{lines}c python=/nowhere/python\n")
    code, text = hosts.end("--detach", script=True)
    assert code == 2 and not hosts.folders() and text.count("\n") == 1, text
    assert text.startswith("error: nothing is started, since hosts are missing: c: no Python: exit code"), text
    code, text = hosts.end("--detach", "--elastic", "2:3", script=True)
    assert code == 0 and "launch_cluster: no part yet has c: no Python: " in text and set(hosts.pids()) == {"a", "b"}
    code, text = hosts.end("--stop")
    assert code == 1 and "launch_cluster: out of reach, where it may go on: c" in text, text
    hosts.hosts.write_text(lines)
    assert not hosts.end("--stop")[0]
