"""`launch_cluster.sh --install`: bare hosts, with no more than sshd and a Python, become hosts that can train.

All at once get the project's files, a virtual environment, and the packages in the tested versions. The
launcher sends this very text to each host (`python3 -c`), which has Python's standard library only. Down its standard
input come a line of JSON, the job, and a tar archive. Back come lines behind MARK, and as last words why it failed.
"""

import contextlib
import fcntl
import glob
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import wait

MARK = "install:"  # precedes what is said, because a login shell may print lines of its own
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
IS_TERMINAL = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
CLEAR = "\r\033[K" if IS_TERMINAL else ""  # the line that says how long it takes
# The first of some Pythons for which torch has wheels runs the program $1. $2: the host's python=, or none there.
FIND_PYTHON = """for name in "$2" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do "$name" -c \
"import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))" 2>/dev/null && exec "$name" -I -c "$1"; done; \
python3 --version >&2; exit 127"""
# The project where git can't say what that is, as in a folder out of a ZIP: the names in its root, the kinds of files
# in its folders, and what is none of it there. So nothing is copied that lies beside it, large or private.
FOLDERS = re.compile(r"\.(ci|github|tours)|assets|beyond|cluster|docs|exercises|lab|notebooks|same_numbers|"
                     r"step\d+_\w+|tests|tools")
FILES = re.compile(r"(README|CONTRIBUTING)\.md|LICENSE|setup\.py|pytest\.ini|constraints\.txt|Dockerfile\.torchx|"
                   r"\.(git|docker|torchx)ignore|\.torchxconfig")
KINDS = re.compile(r"run|LICENSE|[^.].*\.(css|html|ini?|ipynb|m?js|jsonl?|md|png|py|sbatch|sh|svg|toml|tour|txt|typed|"
                   r"ya?ml)")
OTHERS = re.compile(r"\..*|__pycache__|.*\.egg-info|node_modules|site-packages|runs|logs|wandb|mine|build")
LARGEST = 1 << 20  # bytes of a file


def run(*words: str) -> tuple[int, list[str]]:
    """The exit code of a command, and the lines that it printed."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]


def copy(root: str, project: list[str]) -> None:
    """Writes the files of the archive. What is another file here is kept with the ending .old, and so is a module in
    the folders of the `project` that is not in the archive: a run could import it."""
    sent, changed = set(), 0
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            path, content = os.path.join(root, member.name), archive.extractfile(member).read()
            sent.add(path)
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if file.read() == content:
                    continue
                os.replace(path, f"{path}.old")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, member.mode)
            changed += 1
    for path in (path for folder in project for path in glob.glob(f"{root}/{folder}/**/*.py", recursive=True)):
        if path not in sent:
            os.replace(path, f"{path}.old")
    print(f"{MARK}copied {changed} files to {root}", flush=True)


def make_environment(python: str) -> None:
    """Makes the virtual environment in which `python` is to be, unless there is a Python with pip already."""
    folder, exists = os.path.dirname(os.path.dirname(python)), os.path.exists(python)
    if exists and run(python, "-m", "pip", "--version")[0] == 0:
        return
    if not python.startswith(f"{folder}/bin/") or exists and not os.path.exists(f"{folder}/pyvenv.cfg"):
        raise RuntimeError(f"no pip for {python}, and no virtual environment: write python=DIR/.venv/bin/python")
    code, lines = run(sys.executable, "-m", "venv", folder)
    if code or not os.path.exists(python):
        raise RuntimeError(f"can't make {folder} (try: sudo apt-get install python3-venv): {' '.join(lines)}")


def install_packages(python: str, root: str) -> None:
    """Installs what is missing; torch from PyTorch's builds for CPUs where no NVIDIA driver is."""
    builds = [] if shutil.which("nvidia-smi") else ["--extra-index-url", CPU_BUILDS]
    code, lines = run(python, "-m", "pip", "--no-input", "install", "--progress-bar", "off", *builds, "-c",
                      f"{root}/constraints.txt", "-e", f"{root}[cluster,finetune]")
    if code:
        network = "no network for " * any("Retrying (" in line for line in lines)
        raise RuntimeError(f"{network}pip: {next((line for line in lines if line.lower().startswith('error')), code)}")
    print(f"{MARK}{next((line for line in lines if line.startswith('Successfully')), 'all packages are there')}")


def on_host() -> None:
    """The program that the launcher sends."""
    job = json.loads(sys.stdin.buffer.readline())
    os.environ.update(job["environment"])
    root, python = (os.path.expanduser(job[name]) for name in ("dir", "python"))
    root, python = os.path.abspath(root), os.path.abspath(shutil.which(python) or python)
    try:
        os.makedirs(root, exist_ok=True)
        with contextlib.suppress(OSError):  # hosts that share a disk come one after the other, if it has locks
            fcntl.flock(os.open(root, os.O_RDONLY), fcntl.LOCK_EX)
        copy(root, job["project"])
        make_environment(python)
        install_packages(python, root)
    except (RuntimeError, OSError, tarfile.TarError) as error:
        sys.exit(str(error))


def files_of(root: str) -> list[str]:
    """The names of the project's files in `root`: what git tracks there, or by FOLDERS and FILES where `root` has no
    repository of its own, or git does not answer. Raises UserError where that is not the project."""
    from inventory import UserError  # not at the far end

    found = []
    if os.path.exists(os.path.join(root, ".git")):  # else git would speak of a repository around it
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, stderr=subprocess.DEVNULL)
            found = os.fsdecode(listed).split("\0")
    if "setup.py" not in found:
        found = list(walk(root))
    if "setup.py" not in found:
        raise UserError(f"--install copies the project, but {root} is no copy of it, without a setup.py: type it where "
                        "you cloned or unpacked it")
    return sorted(name for name in found if os.path.isfile(os.path.join(root, name)))


def walk(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        is_root = folder == root
        folders[:] = [name for name in folders if (FOLDERS.fullmatch(name) if is_root else not OTHERS.fullmatch(name))
                      and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))]  # a virtual environment
        for name in filter((FILES if is_root else KINDS).fullmatch, names):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.getsize(path) <= LARGEST:
                yield os.path.relpath(path, root)


def archive_of(root: str) -> bytes:
    """A tar archive of the project's files in `root`, as they are now."""
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w", dereference=True) as archive:
        for name in files_of(root):
            archive.add(os.path.join(root, name), name)
    return buffer.getvalue()


def install_on(contact, archive: bytes, job: dict) -> str | None:
    """Prints what is done on the host. Returns why it is not complete, None if it is."""
    host = contact.host
    contact.send(json.dumps({**job, "dir": host.dir, "python": host.python}), archive)
    for line in contact.lines():
        if line.startswith(MARK):
            print(f"{CLEAR}{host.label} | {line.removeprefix(MARK)}", flush=True)
    if contact.code == 127:
        return f"no Python 3.10 to 3.14 there ({contact.last_line()}): sudo apt-get install python3 python3-venv"
    return ": ".join(contact.explain() or [contact.last_line()]) if contact.code else None


def install(hosts: list, root: str, project: list[str], environment: dict[str, str]) -> bool:
    """Installs on all hosts at once; True if all are complete. `environment`: for pip, such as HTTPS_PROXY.

    A host without python= gets the virtual environment `dir`/.venv, for what is started next, too.
    """
    from remote_run import Contact, at_once  # not at the far end

    for host in hosts:
        if "python" not in host.given:
            host.python = os.path.join(host.dir, ".venv", "bin", "python")
    archive, job = archive_of(root), {"project": project, "environment": environment}
    with open(__file__, encoding="utf-8") as file:
        words = ["sh", "-c", FIND_PYTHON, "sh", file.read()]
    with at_once(contacts := [Contact(host, *words, host.python) for host in hosts]) as pool:
        start, runs = time.monotonic(), [pool.submit(install_on, contact, archive, job) for contact in contacts]
        while IS_TERMINAL and (left := [host.label for host, run in zip(hosts, runs) if not run.done()]):
            line = f"{time.monotonic() - start:.0f} s: {len(archive) / 1e6:.0f} MB and packages for {', '.join(left)}"
            print(f"{CLEAR}{line[:shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
            wait(runs, 1)
        print(CLEAR, end="", file=sys.stderr, flush=True)
        failures = [run.result() for run in runs]
    for host, failure in zip(hosts, failures):
        if failure:
            print(f"error: {host.label}: {failure}", file=sys.stderr)
        elif "python" not in host.given:
            print(f"{host.label} | write python={host.python} into its line of the hosts file", flush=True)
    return not any(failures)


if __name__ == "__main__":
    on_host()
