"""`launch_cluster.sh --install`: bare hosts, with no more than sshd and a Python, become hosts that can train.

All at once get a copy of this tree, a virtual environment, and the packages in the tested versions. The launcher sends
this very text to each host (`python3 -c`), which has Python's standard library only. Up one ssh connection go a line of
JSON, the job, and a tar archive of the files that the host has not, or has with another content. Down come lines of
JSON behind MARK: {"missing": those files}, {"said": what was done}, and at the end {"error": why it is not complete}.
"""

import contextlib
import fcntl
import fnmatch
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

MARK = "install:"  # precedes an answer, because a login shell may print lines of its own
NEVER = ["*.pyc", "wandb", ".*"]  # is not copied, besides what .gitignore names
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
INDEX_OPTIONS = (".index-url=", ".no-index=", ".find-links=")  # of pip: somebody has chosen where packages come from
GPU = ("/proc/driver/nvidia/gpus/*", "/usr/lib/wsl/lib/nvidia-smi", "/dev/nvhost-gpu")  # of a PC, Windows, a Jetson
# The first of some Pythons that is new enough runs the program $1. $2: the host's python=, which need not be there yet.
FIND_PYTHON = """for name in "$2" python3 python3.13 python3.12 python3.11 python3.10; do "$name" -c \
"import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null && exec "$name" -I -c "$1"; done; \
python3 --version >&2; exit 127"""


def digest(root: str, name: str) -> str | None:
    """sha256 of a file; None where there is none."""
    with contextlib.suppress(OSError), open(os.path.join(root, name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def tell(**fields) -> None:
    print(MARK + json.dumps(fields), flush=True)


def run(*words: str) -> tuple[int, list[str]]:
    """The exit code of a command, and the lines that it printed."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]


def copy(root: str, files: dict[str, str], project: list[str]) -> None:
    """Makes `files`, {name: sha256}, what they are on the launcher's machine. Other files stay; but one that --check
    would count to the project, though it is not there any more, gets the ending .old. So does one that was changed
    here: that is not as the last copy() has left it, which .installed says."""
    record, before = os.path.join(root, ".installed"), {}
    with contextlib.suppress(OSError, ValueError), open(record, encoding="utf-8") as file:
        before = dict(json.load(file))
    there = {name: digest(root, name) for name in files}
    changed = [name for name, found in there.items() if found not in (None, files[name], before.get(name))]
    for name in changed:
        os.replace(os.path.join(root, name), os.path.join(root, f"{name}.old"))
    if changed:
        tell(said=f"changed on this host, and kept with the ending .old: {', '.join(changed[:5])}"
                  + f" and {len(changed) - 5} more" * (len(changed) > 5))
    tell(missing=(missing := [name for name, wanted in files.items() if there[name] != wanted]))
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(root)
    with open(record, "w", encoding="utf-8") as file:
        json.dump(files, file)
    if missing:
        tell(said=f"copied {len(missing)} file{'s' * (len(missing) > 1)} to {root}")
    for folder in project:
        for name in sorted({*glob.glob(f"{folder}/**/*.py", root_dir=root, recursive=True)} - files.keys()):
            os.replace(os.path.join(root, name), os.path.join(root, f"{name}.old"))
            tell(said=f"{name} is no file of the project any more: it is now {name}.old")


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
    tell(said=f"made {folder} with Python {sys.version_info[0]}.{sys.version_info[1]}")


def install_packages(python: str, constraints: str, requirements: list[str]) -> None:
    """Installs what is missing, in the tested versions. pip's own index has torch for a GPU. Where none is, PyTorch's
    index of CPU builds is asked first, unless pip is told where to look: by --env PIP_INDEX_URL=..., or on this host.
    """
    start, pip = time.monotonic(), [python, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    has_gpu = any(map(glob.glob, GPU)) or shutil.which("nvidia-smi") is not None
    is_configured = any(option in line for line in run(*pip, "config", "list")[1] for option in INDEX_OPTIONS)
    if not has_gpu and not is_configured:  # where that index does not answer, the next line finds torch
        run(*pip, "install", "-c", constraints, "--no-deps", "--retries", "1", "--timeout", "10", "--index-url",
            CPU_BUILDS, "torch")
    code, lines = run(*pip, "install", "--progress-bar", "off", "-c", constraints, *requirements)
    if code:
        network = "no network for " * any("Retrying (" in line for line in lines)
        raise RuntimeError(f"{network}pip: {next((line for line in lines if line.lower().startswith('error')), code)}")
    if installed := [line for line in lines if line.startswith("Successfully installed ")]:
        tell(said=f"installed {len(installed[0].split()) - 2} packages in {time.monotonic() - start:.0f} s")


def end_with_launcher() -> None:
    """The input ends with the launcher: pip is not to go on alone then. The end of what tar sent may still be there."""
    while os.read(0, 1 << 16):
        pass
    os.killpg(0, signal.SIGKILL)


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
        copy(root, job["files"], job["project"])
        threading.Thread(target=end_with_launcher, daemon=True).start()
        make_environment(python)
        install_packages(python, os.path.join(root, "constraints.txt"), job["requirements"])
        tell(error=None)
    except (RuntimeError, OSError, tarfile.TarError) as error:
        tell(error=str(error))


def packages(root: str) -> list[str]:
    """Those of setup.py, with two of its extras, read without setuptools."""
    called = {}
    with open(os.path.join(root, "setup.py"), encoding="utf-8") as file:
        exec(file.read().replace("from setuptools import setup", ""), {"setup": called.update})
    return called["install_requires"] + called["extras_require"]["cluster"] + called["extras_require"]["finetune"]


def tree(root: str) -> dict[str, str]:
    """{path: sha256} of what is copied: not what .gitignore names, such as runs and models, nothing hidden, and no
    virtual environment."""
    with open(os.path.join(root, ".gitignore"), encoding="utf-8") as file:
        patterns = [line.strip().rstrip("/") for line in file] + NEVER

    def is_wanted(path: str) -> bool:
        name = os.path.basename(path)
        return not os.path.exists(os.path.join(root, path, "pyvenv.cfg")) and not any(
            fnmatch.fnmatch(path if "/" in pattern else name, pattern.lstrip("/")) for pattern in patterns)

    names = {".gitignore"}
    for folder, folders, files in os.walk(root):
        paths = {name: os.path.relpath(os.path.join(folder, name), root) for name in (*folders, *files)}
        folders[:] = [name for name in folders if is_wanted(paths[name])]
        names |= {paths[name] for name in files if is_wanted(paths[name])}
    return {name: found for name in sorted(names) if (found := digest(root, name))}  # none for a link to nowhere


def install_on(host, root: str, job: dict) -> str | None:
    """Prints what is done on the host. Returns why it is not complete, None if it is."""
    from check_hosts import Contact  # not at the far end

    with open(__file__, encoding="utf-8") as file:
        words = host.ssh("sh", "-c", FIND_PYTHON, "sh", file.read(), host.python)
    contact, answers = Contact(host, words, MARK), []  # what it runs ends when its input does
    with contextlib.suppress(BrokenPipeError):  # the far end has ended
        for answer in contact.answers({**job, "dir": host.dir, "python": host.python}):
            answers.append(answer)
            if "missing" in answer:
                with tarfile.open(fileobj=(to := contact.process.stdin.buffer), mode="w|", dereference=True) as archive:
                    for name in answer["missing"]:
                        archive.add(os.path.join(root, name), name)
                to.flush()
            if text := answer.get("said", "nothing to do" * (answers[1:] == [{"error": None}])):
                print(f"{host.label} | {text}", flush=True)
    code, said = contact.last_words()
    contact.end()
    if answers and "error" in answers[-1]:
        return answers[-1]["error"]
    last_line = said.rpartition("\n")[2]
    if code == 127:
        return f"no Python 3.10 or later there ({last_line}): sudo apt-get install python3 python3-venv"
    return ": ".join(host.explain(code, said) or (f"it ended with exit code {code}", last_line))


def install(hosts: list, root: str, project: list[str], environment: dict[str, str]) -> bool:
    """Installs on all hosts at once; True if all are complete. `environment`: for pip, such as HTTPS_PROXY.

    A host without python= gets the virtual environment `dir`/.venv, for what is started next, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process, and so all
    for host in hosts:
        if "python" not in host.given:
            host.python = os.path.join(host.dir, ".venv", "bin", "python")
    job = {"files": tree(root), "project": project, "requirements": packages(root), "environment": environment}
    with ThreadPoolExecutor(len(hosts)) as pool:
        failures = list(pool.map(lambda host: install_on(host, root, job), hosts))
    for host, failure in zip(hosts, failures):
        if failure:
            print(f"error: {host.label}: {failure}", file=sys.stderr)
        elif "python" not in host.given:
            print(f"{host.label} | write python={host.python} into its line of the hosts file", flush=True)
    return not any(failures)


if __name__ == "__main__":
    on_host()
