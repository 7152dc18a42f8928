"""The processes of a run, wherever torchrun has put them: found by a variable of their environment."""

import pathlib
import subprocess
import sys

import torch.distributed as dist
from launch import environment


def processes(marker: str) -> dict[int, int | None]:
    """pid -> rank (None for torchrun itself) of all that run with MARKER=marker in their environment."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"MARKER={marker}" in variables:
            ranks = [int(text.removeprefix("RANK=")) for text in variables if text.startswith("RANK=")]
            found[int(path.parent.name)] = ranks[0] if ranks else None
    return found


def run_apart(script: pathlib.Path, ranks: list[dict[str, str]], timeout: float = 60) -> list[tuple[int, str]]:
    """Runs the script once for each rank, with these variables, and returns their exit codes and last words.

    Here nobody ends the others where one of them ends, as on machines of which each has a torchrun of its own. This
    process is host of the store. A rank that still waits after `timeout` seconds is a failure.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = dict(WORLD_SIZE=str(len(ranks)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                  TORCHELASTIC_USE_AGENT_STORE="True")
    running = [subprocess.Popen([sys.executable, str(script)], env=environment(**common, RANK=str(rank), **variables),
                                stderr=subprocess.PIPE, text=True) for rank, variables in enumerate(ranks)]
    try:
        ended = [process.communicate(timeout=timeout)[1] for process in running]
        return [(process.returncode, words) for process, words in zip(running, ended)]
    finally:
        for process in running:
            process.kill()
