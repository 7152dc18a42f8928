"""Every command of every page, pasted as it stands: it ends well, and what the page quotes is what it prints.

Each page has a fresh clone, in which its blocks run in their order. Runs of a step that are longer than 5 steps are cut
short by --max_tokens. Of lines "step ..." the loss and the gradient norm are compared, of other lines the words. A page
that speaks of several machines is typed on node0 of the test bed, where it is ~/tutorial, or what is about the bed
itself on the machine that has it. The lines that can't run, and why, are in support/typed_in_pages.py.

    pytest -m commands tests/test_pages_commands.py          all blocks of all pages, but for those on hosts
    pytest -n 0 -m hosts --all-cases tests/test_pages_commands.py       as root: those
    pytest -n 0 -s -m slow tests/test_pages_commands.py -k counted      how many blocks there are, and which not
"""

import collections
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig

import pytest
from conftest import not_drawn
from maintain.bed import DISKS, NODES, SCRIPT, bed, testbed
from support.typed_in_pages import (BEFORE, BLOCK, EXACT, FAILS, HERE, KINDS,
                                    LEFT_OUT, ON_HOSTS, RANK, SEVERAL, Block,
                                    blocks, lines_of, shortened, to_run,
                                    unlike)
from test_pages import READMES

from lab.launch import ROOT, environment

HIDDEN = re.compile(r"(?:\$ .*|(?:torchrun|torchx|python3?|pip|mpirun|ray|sbatch|sudo|apt-get|docker|kubectl|"
                    r"cluster/\S+|tools/\S+|export|eval) .*)")  # what is typed, in a block that is not marked as such
OF_THE_BED = re.compile(r"testbed\.sh|ssh_config")  # what is typed on the machine that has the test bed
OWN = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", "-c",
       'ip link set lo up && exec bash -eo pipefail "$0"']
SHELL = ["bash", "-eo", "pipefail"]
REFUSED = subprocess.run(f"{shlex.join(OWN)} /dev/null", shell=True, stderr=subprocess.DEVNULL).returncode
MACHINE = SHELL if REFUSED else OWN
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy":
           ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1", "GLOO_SOCKET_IFNAME": "lo"}
EACH_PAGE = pytest.mark.parametrize("page", [  # of two processes, each takes the next one
    pytest.param(page, id=str(page), marks=pytest.mark.xdist_group(str(page))) for page in HERE])


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> pathlib.Path:
    """The repository's files, as they are now, committed."""
    target = tmp_path_factory.mktemp("repository")
    git = ["git", "--git-dir", target / ".git", "--work-tree"]  # the checkout may be no repository itself
    subprocess.run(["git", "init", "-q", target], check=True)
    subprocess.run([*git, ROOT, "add", "-A"], check=True)
    subprocess.run([*git, target, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"], check=True)
    subprocess.run([*git, target, "reset", "-q", "--hard"], check=True)
    return target


@pytest.fixture
def clone(repository, tmp_path) -> pathlib.Path:
    """A fresh clone, beside it a folder `bin` of what a machine may not have."""
    subprocess.run(["git", "clone", "-q", repository, tmp_path / "tutorial"], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "bin" / "sudo").chmod(0o755)
    return tmp_path / "tutorial"


def run(command: str, folder: pathlib.Path, words: list[str] = MACHINE, seconds: float = 900) -> tuple[int | None, str]:
    """The exit code (None: it took too long) and what was printed. The first line that fails ends it."""
    path = f"{folder.parent}/bin:{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}:/usr/sbin:/sbin"
    answers = (("ssh-keygen", "\n\n\n"), ("exec node0 bash", "exit\n"), ("", "What is the state of the Union?\n"))
    typed = next(answer for words, answer in answers if words in command)
    (folder.parent / "typed").write_text(command)  # pgrep must not find it in the shell's own words
    process = subprocess.Popen([*words, folder.parent / "typed"], cwd=folder, text=True, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=environment(PATH=path, **ALLOWED))
    try:
        printed, _ = process.communicate(typed, timeout=seconds)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def fault_of(block: Block, code: int | None, printed: str) -> str:
    """What is wrong with a block whose commands ended with `code`, or "". An error may be what it shows."""
    shown = block.quoted + "".join(line for line in printed.splitlines() if block.looked_for and block.looked_for in line)
    exact = bool(EXACT.search(block.command))
    wrong = [f"quoted, but not printed: {line}" for line in unlike(block.quoted, printed, exact)]
    if block.looked_for not in printed:
        wrong += [f"`{block.looked_for}` is not in what this prints"]
    if code is None or code and not ("error" in shown.lower() or FAILS.search(block.command)):
        wrong = [f"exit code {code}"]
    return "\n".join([f"$ {block.command}", *wrong, printed[-2000:]]) if wrong else ""


def paste(page: pathlib.Path, here: list[Block], folder: pathlib.Path, place=lambda command: command, words=MACHINE) -> None:
    """Runs the blocks; an AssertionError shows what is wrong with which."""
    wrong = []
    for block in here:
        command = "set +e\n" * bool(FAILS.search(block.command))
        command += "".join(f"{first}\n" for beginning, first in BEFORE.items() if block.command.startswith(beginning))
        command += re.sub(r"(?m)^(diff .*)$", r"\1 || [ $? = 1 ]",
                          block.command if block.looked_for else shortened(block.command))
        wrong.append(fault_of(block, *run(place(command.replace("/tmp/", f"{folder.parent}/")), folder, words)))
    assert not any(wrong), f"{len([*filter(None, wrong)])} of {len(wrong)} blocks of {page}:\n\n" + "\n\n".join(wrong)


@pytest.mark.slow(drawn=15)
@EACH_PAGE
def test_first_block(page, clone):
    paste(page, to_run(page)[:1], clone)


@pytest.mark.slow
@pytest.mark.commands
@pytest.mark.drawn(5)
@EACH_PAGE
def test_commands(page, clone):
    paste(page, to_run(page), clone)


@pytest.fixture(scope="module")
def homes(bed, tmp_path_factory) -> dict[str, pathlib.Path]:
    """Each host's home, on its own disk. There is the virtual environment that --install finds there or makes, with the
    packages of this one, since no network leads out of the hosts."""
    found, folder = {}, tmp_path_factory.mktemp("hosts")
    for node in NODES:
        found[node] = home = pathlib.Path(DISKS, node, "home")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "tutorial" / ".venv"], check=True)
        packages = next(home.glob("tutorial/.venv/lib/python*/site-packages"))
        (packages / "these.pth").write_text(sysconfig.get_path("purelib"))
        (home / ".config" / "pip").mkdir(parents=True)
        (home / ".config" / "pip" / "pip.conf").write_text("[global]\nno-index = true\nno-build-isolation = false\n")
        users = re.sub("(?m)^root:.*", f"root:x:0:0::{home}:/bin/bash", pathlib.Path("/etc/passwd").read_text())
        (folder / node).write_text(users)
        testbed("exec", node, "mount", "--bind", folder / node, "/etc/passwd")
    return found


def typed(command: str, homes: dict[str, pathlib.Path]) -> str:
    """What types it on node0 or, where it says so, each line on the host of its rank, or all of it on several hosts."""
    if OF_THE_BED.search(command):
        return command
    head, *lines = re.split(r"(?m)^(?=torchrun .*--node[_-]rank)", command)
    several = SEVERAL.search(command)
    count = int(several[1] or 1) if several else 1
    parts = [(int(RANK.search(line)[1]), head + line) for line in lines] or [(k, command) for k in range(count)]
    words = []
    for k, part in parts:
        home = homes[f"node{k}"]
        inner = shlex.quote(f"set -eo pipefail; cd ~/tutorial\n{part}")
        words.append(f"{SCRIPT} exec node{k} env -u XDG_CACHE_HOME -u GLOO_SOCKET_IFNAME HOME={home} "
                     f"PATH={home}/tutorial/.venv/bin:$PATH bash -c {inner}")
    return words[0] if len(words) == 1 else " &\n".join([*words, "for job in $(jobs -p); do wait $job; done"])


@pytest.mark.hosts
@pytest.mark.drawn(1)
@pytest.mark.parametrize("page", ON_HOSTS, ids=str)
def test_commands_on_hosts(page, clone, homes):
    for node, home in homes.items():
        for path in (home / "tutorial").iterdir():
            if path.name != ".venv":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(clone, homes["node0"] / "tutorial", dirs_exist_ok=True)
    first = "".join(lines_of(next(block.command for block in to_run(pathlib.Path("cluster/README.md"))
                                  if "--install" in block.command))[:2])  # hosts.txt, and the copies
    try:
        code, printed = run(typed(first, homes), clone, SHELL)
        assert code == 0, printed
        paste(page, to_run(page), clone, lambda command: typed(command, homes), SHELL)
    finally:
        run("tools/testbed.sh down", clone, SHELL)


def test_draws_in_a_row_have_every_page(monkeypatch):
    """.ci/run counts commits."""
    mark = pytest.mark.drawn(5).mark
    cases = [type("Case", (), {"function": "", "get_closest_marker": lambda _, name: mark if name == "drawn" else None})() for _ in HERE]
    shares, had = -(-len(HERE) // 5), set()
    for draw in range(995, 995 + shares):
        monkeypatch.setenv("DRAW", str(draw))
        drawn = set(cases) - not_drawn(cases)
        assert len(drawn) in (4, 5) and not drawn & had
        had |= drawn
    assert had == set(cases)


def test_every_block_is_counted():
    """It runs or stands in the table with one of four reasons. No command is in a block of another kind."""
    counts = collections.Counter()
    for page in READMES:
        text = (ROOT / page).read_text(encoding="utf-8")
        entries = LEFT_OUT.get(str(page), [])
        for block in blocks(text):
            why = [kind for line in lines_of(block.command) for beginning, kind, _ in entries if line.startswith(beginning)]
            place = "on hosts" if page in ON_HOSTS else "here"
            counts[f"left out, {why[0]}" if len(why) == len(lines_of(block.command)) else f"run {place}" + ", in part" * bool(why)] += 1
        lines = [line for block in blocks(text) for line in lines_of(block.command)]
        for beginning, kind, _ in entries:
            assert kind in KINDS and any(line.startswith(beginning) for line in lines), f"{page}: {beginning}"
        others = re.findall(r"^ *```(?!bash)\w*\n(.*?)^ *```", BLOCK.sub("", text), re.S | re.M)
        hidden = [line for other in others for line in other.splitlines() if HIDDEN.fullmatch(line)]
        assert not hidden, f"{page}: mark the block as bash: {hidden}"
    print(f"\n{sum(counts.values())} blocks of {len(READMES)} pages:", *map("{0[1]} {0[0]}".format, counts.items()), sep="\n  ")
    assert set(LEFT_OUT) <= set(map(str, READMES))
