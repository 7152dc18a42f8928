"""Runs a step's train.py on the CPU, one thread a rank, and reads what it leaves.

launch() starts it as its reader does, with torchrun; fork() in processes that need not import anything first, one job
after the other; start_fork() and start() several jobs at the same time.
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import errno
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = {path.name.split("_")[0].removeprefix("step"): path for folder in (ROOT, ROOT / "beyond")
         for path in folder.glob("step*_*")}
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in  # what step 9 cuts; seconds to import
          ("bert", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "qwen2", "qwen3", "vit")]

LEFT_OUT = {  # of the environment: a test must not find a way to the Hub, and ranks should not compile each module anew
    *(f"{name}_proxy" for name in ("http", "https", "all", "no")), "pythondontwritebytecode"}
# macOS has no affinity.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SLOTS = max(4, 2 * CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))  # so many ranks of forked jobs run
# at the same time, or one larger job: of this process, which may be one of several that run tests


ROOMS = ("cluster", "tools")  # whose modules import those of a step
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}


@contextlib.contextmanager
def writing(place):
    """Around what a tool writes to `place`: where that is full, or may not be written, one line ends the program."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.exit(f"error: can't write {error.filename or place} ({error.strerror}): make room there, or choose another "
                 "place")


class Help(argparse.RawDescriptionHelpFormatter):
    """--help with a program's docstring as it is, its examples among it, and with the defaults of its flags."""

    def _get_help_string(self, action: argparse.Action) -> str:
        says_it = action.default in (None, False, [], argparse.SUPPRESS) or "default" in action.help
        return action.help + " (default: %(default)s)" * (not says_it)


def torchrun(num_processes: int, script, *args) -> list[str]:
    """The command line of `torchrun --nproc_per_node N script args` with this Python, on a port that it chooses."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1",
            "--nproc_per_node", str(num_processes), str(script), *map(str, args)]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, one thread a rank, no device but the CPU, no Hub and no proxy; plus `extra`."""
    inherited = {name: value for name, value in os.environ.items() if name.lower() not in LEFT_OUT}
    return {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **extra}


def launch(step: int | str, num_processes: int, *args, timeout: float = 120, check: bool = True, env=None, script=None):
    """Runs step `step` (or `script`) with `args` and returns the finished process, its output as text.

    With `check` an exit code other than zero is an AssertionError that shows the output's end.
    """
    command = torchrun(num_processes, script or STEPS[str(step)] / "train.py", *args)
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=environment(**(env or {})), start_new_session=True, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too, not torchrun alone
        raise
    return finished(command, process.returncode, stdout, stderr, check)


def finished(command: list[str], code: int, stdout: str, stderr: str, check: bool) -> subprocess.CompletedProcess:
    if check:
        assert code == 0, f"{' '.join(command)}\nexit code {code}\n{(stdout + stderr)[-6000:]}"
    return subprocess.CompletedProcess(command, code, stdout, stderr)


class ForkServer:
    """This process's end of forks.py, which runs scripts in processes that it forks. Thread-safe."""

    def __init__(self):
        command = [sys.executable, str(ROOT / "lab" / "forks.py"), str(ROOT / "assets" / "tiny_llama")]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.process = subprocess.Popen(command, env=environment(), **pipes)
        atexit.register(self.end)
        self.jobs: dict[int, concurrent.futures.Future] = {}  # number -> its exit code, as soon as it is known
        self.numbers, self.lock = itertools.count(), threading.Lock()
        self.free_slots, self.slot_freed = SLOTS, threading.Condition()
        threading.Thread(target=self.read_answers, daemon=True).start()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it runs, too
        self.process.wait()

    def read_answers(self) -> None:
        for line in self.process.stdout:
            number, code = map(int, line.split())
            self.jobs.pop(number).set_result(code)
        for job in self.jobs.values():
            job.set_exception(RuntimeError("the server of forked processes has ended: see its stderr"))

    def run(self, job: dict) -> int:
        """The exit code of the job; waits first until the ranks of other threads' jobs leave room for its own."""
        slots = min(job["ranks"], SLOTS)
        with self.slot_freed:
            self.slot_freed.wait_for(lambda: self.free_slots >= slots)
            self.free_slots -= slots
        try:
            with self.lock:
                number, answer = next(self.numbers), concurrent.futures.Future()
                self.jobs[number] = answer
                print(json.dumps({"number": number, **job}), file=self.process.stdin, flush=True)
            return answer.result(timeout=job["timeout"] + 120)  # the ranks end themselves before; imports come first
        finally:
            with self.slot_freed:
                self.free_slots += slots
                self.slot_freed.notify_all()


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


def fork(step: int | str, num_processes: int, *args, timeout: float = 180, check: bool = True, env=None, script=None,
         modules=()) -> subprocess.CompletedProcess:
    """What launch() does, in processes forked from one that has imported torch, transformers and `modules`.

    One such process serves all tests: use it wherever starting with torchrun is not what is tested. A rank that still
    runs after `timeout` seconds prints where it is and ends.
    """
    argv = [str(script or STEPS[str(step)] / "train.py"), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "output")
        code = fork_server().run({"argv": argv, "ranks": num_processes, "timeout": timeout, "env": env or {},
                                  "modules": list(modules), "output": output})
        stdout, stderr = (pathlib.Path(f"{output}{descriptor}").read_text() for descriptor in (1, 2))
    return finished(argv, code, stdout, stderr, check)


def start(function, *args, **kwargs) -> concurrent.futures.Future:
    """What function(*args, **kwargs) will return, which forks, as a future: such jobs run at the same time, as far as
    SLOTS go."""
    fork_server()  # one for all of them
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


start_fork = functools.partial(start, fork)


def metrics(log_dir, run_name: str = "default_run") -> list[dict]:
    with open(pathlib.Path(log_dir, run_name, "metrics.jsonl"), encoding="utf-8-sig") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]  # a full disk may hold half of the last one


def losses(log_dir, run_name: str = "default_run") -> list[float]:
    return [row["loss"] for row in metrics(log_dir, run_name)]


@contextlib.contextmanager
def modules_of(step: int | str):
    """Inside the block `import model` and the like find the modules of that step, and forget them afterwards.

    So are those of cluster/ and tools/, which import the step's. What was imported before it is there again after it.
    """
    folder = STEPS[str(step)]
    names, rooms = {path.stem for path in folder.glob("*.py")}, tuple(f"{ROOT / room}{os.sep}" for room in ROOMS)

    def forget() -> dict:
        """Those of the step, of cluster/ and of tools/ that are imported."""
        found = {name: module for name, module in sys.modules.items()
                 if name in names or (getattr(module, "__file__", None) or "").startswith(rooms)}
        for name in found:
            del sys.modules[name]
        return found

    before = forget()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()
        sys.modules.update(before)
