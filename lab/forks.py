"""A server of forked processes: ranks that start within milliseconds, since the slow libraries are imported already.

It reads one JSON object a line, {"number": N, "argv": [script, flags...], "ranks": R, "timeout": seconds, "env": {},
"modules": [], "output": prefix}, and runs the script as R processes, with the environment that torchrun would give
them and their output in the files <prefix>1 and <prefix>2. When the job is done it answers with a line, "N CODE": the
exit code of the first rank that failed, or 0. Jobs run at the same time, each under a supervisor of its own:

    server -- supervisor of job 1, which holds the job's store -- rank 0, rank 1, ...
           -- supervisor of job 2 ...

When a rank fails the supervisor ends the others, as torchrun does; after `timeout` seconds each rank prints where it
is, and ends. `modules` are imported by the server, before the fork: what only some scripts need. The store listens on a
port that was never free again after it was chosen, so no two jobs can meet. See launch.fork, the other end.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo  # noqa: F401  which the first optimizer imports, in each rank anew
import torch.distributed as dist
from datasets import load_dataset  # noqa: F401
from transformers import AutoConfig, AutoTokenizer


def run_rank(job: dict, rank: int, port: int) -> int:
    """In the rank's process: runs the script and returns its exit code."""
    os.environ.update(job["env"], RANK=str(rank), WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1",
                      LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job["ranks"]), MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True")  # the supervisor hosts the store, ranks connect
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in 1, 2:
        os.dup2(os.open(f"{job['output']}{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for stream in sys.stdout, sys.stderr:  # whole lines, even with PYTHONUNBUFFERED: ranks write to one file
        stream.reconfigure(line_buffering=True, write_through=False)
    faulthandler.dump_traceback_later(job["timeout"], exit=True)
    atexit._clear()  # what the server's imports have registered is not the script's
    sys.argv, sys.path[0] = job["argv"], os.path.dirname(job["argv"][0])
    try:
        runpy.run_path(job["argv"][0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def supervise(job: dict) -> int:
    """In the supervisor's process: runs all ranks of the job and returns the first failure's exit code, or 0."""
    listener = socket.create_server(("127.0.0.1", 0))  # ranks may connect from now on, the store answers them below
    port, ranks = listener.getsockname()[1], set()
    for rank in range(job["ranks"]):
        if (pid := os.fork()) == 0:
            listener.close()
            code = run_rank(job, rank, port)
            atexit._run_exitfuncs()  # what the script has registered
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # a second less than to tear down all that was imported
        ranks.add(pid)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                          master_listen_fd=listener.detach())
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    del store  # it has served until here
    return failed


def serve(answers: int) -> None:
    """Starts a supervisor for each job that arrives on stdin; answers are written to the descriptor `answers`."""
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # supervisors that are done go
        job = json.loads(line)
        for name in job["modules"]:
            importlib.import_module(name)
        gc.freeze()  # what is here stays here: children neither scan nor copy it
        if os.fork() == 0:
            code = supervise(job)
            os.write(answers, f"{job['number']} {code}\n".encode())
            os._exit(0)


if __name__ == "__main__":
    for auto in AutoConfig, AutoTokenizer:
        auto.from_pretrained(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    serve(answers)
    os.killpg(0, signal.SIGKILL)  # whoever asked has gone: so do all that still run
