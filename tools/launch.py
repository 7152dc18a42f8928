"""Runs a step's train.py on the CPU, one thread a rank, and reads what it leaves.

launch() starts it as its reader does, with torchrun; fork() in processes that need not import anything first.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = {path.name.split("_")[0].removeprefix("step"): path for path in ROOT.glob("step*_*")}
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in  # what step 9 cuts; seconds to import
          ("bert", "gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3", "vit")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(num_processes: int, script, *args) -> list[str]:
    """The command line of `torchrun --nproc_per_node N script args` with this Python, on a port of its own."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes),
            "--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(script), *map(str, args)]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, one thread a rank, no device but the CPU, no Hub; plus `extra`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **extra}


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


@functools.cache
def fork_server() -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "tests" / "support" / "forks.py"), str(ROOT / "assets" / "tiny_llama")]
    server = subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    return server


def fork(step: int | str, num_processes: int, *args, timeout: float = 120, check: bool = True, env=None, script=None,
         modules=()):
    """What launch() does, in processes forked from one that has imported torch, transformers and `modules`.

    One such process serves all tests: use it wherever starting with torchrun is not what is tested.
    """
    server, argv = fork_server(), [str(script or STEPS[str(step)] / "train.py"), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "output")
        job = {"argv": argv, "ranks": num_processes, "timeout": timeout, "env": env or {}, "modules": list(modules),
               "output": output}
        print(json.dumps(job), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the server of forked processes has ended, exit code {server.poll()}: see its stderr"
        code = int(answer)
        stdout, stderr = (pathlib.Path(f"{output}{descriptor}").read_text() for descriptor in (1, 2))
    return finished(argv, code, stdout, stderr, check)


def metrics(log_dir, run_name: str = "default_run") -> list[dict]:
    with open(pathlib.Path(log_dir, run_name, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def losses(log_dir, run_name: str = "default_run") -> list[float]:
    return [row["loss"] for row in metrics(log_dir, run_name)]


@contextlib.contextmanager
def modules_of(step: int | str):
    """Inside the block `import model` and the like find the modules of that step, and forget them afterwards."""
    folder = STEPS[str(step)]
    names = {path.stem for path in folder.glob("*.py")}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
