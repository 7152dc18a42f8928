"""A server of forked processes: ranks that start within milliseconds, since the slow libraries are imported already.

It reads one JSON object a line, {"argv": [script, flags...], "ranks": N, "timeout": seconds, "env": {}, "modules": [],
"output": prefix}, and runs the script as that many processes, with the environment that torchrun would give them, their
output in the files <prefix>1 and <prefix>2. It answers with a line: the exit code of the first rank that failed, or 0.
When a rank fails the others are ended, as torchrun does; after `timeout` each rank shows where it is, and ends.

`modules` are imported here, before the fork: what only some scripts need. See launch.fork, the other end.
"""

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

import torch  # noqa: F401
from datasets import load_dataset  # noqa: F401
from transformers import AutoConfig, AutoTokenizer


def run(job: dict, rank: int, port: int) -> int:
    """In the child: the script's exit code."""
    os.environ.update(job["env"], RANK=str(rank), WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1",
                      LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job["ranks"]), MASTER_PORT=str(port))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in 1, 2:
        os.dup2(os.open(f"{job['output']}{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.dump_traceback_later(job["timeout"], exit=True)
    sys.argv, sys.path[0] = job["argv"], os.path.dirname(job["argv"][0])
    try:
        runpy.run_path(job["argv"][0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(job: dict) -> int:
    for name in job["modules"]:
        importlib.import_module(name)
    gc.freeze()  # what is here stays here: children neither scan nor copy it
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = set()
    for rank in range(job["ranks"]):
        if (pid := os.fork()) == 0:
            code = run(job, rank, port)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # a second less than to tear down all that was imported
        ranks.add(pid)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    for auto in AutoConfig, AutoTokenizer:
        auto.from_pretrained(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what an import prints is no answer
    os.dup2(2, 1)
    for line in sys.stdin:
        print(serve(json.loads(line)), file=answers)
