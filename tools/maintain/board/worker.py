"""Runs rows of one library in this environment, each in one process and then in its ranks: one JSON line a row.

    python tools/maintain/board/worker.py LIBRARY [--rows NAME...] [--keep FOLDER]

The library is imported once; ranks are forked from this process, which itself computes nothing.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]
PATIENCE = 150  # seconds for all ranks of a run
LATE = (
    "numpy",
    "same_numbers.__main__",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
)
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu",
         "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}


def forked(function, output: pathlib.Path, environment: dict) -> int:
    """The id of a child that calls `function`, prints into `output` and leaves its error in `output`.error."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(environment)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = function() or 0
    except BaseException as error:
        traceback.print_exc()
        output.with_suffix(".error").write_text(first_words(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def first_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240]


def wait_for(children: list[int], patience: float = PATIENCE) -> bool:
    """True where all end with 0 in time. What is left of them is ended."""
    right, waiting, end = True, set(children), time.time() + patience
    while waiting and right and time.time() < end:
        for child in [*waiting]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                waiting.discard(child)
                right &= status == 0
        time.sleep(0.02)
    if waiting and not right:
        time.sleep(0.5)  # others may be about to say why
    for child in waiting:
        try:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    return right and not waiting


def start(row, folder: pathlib.Path, ranks: int) -> str:
    """Runs a row on so many ranks. Returns why it failed, or ''."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 or row.options.get("group") else {}
        children.append(forked(lambda: run(row, folder), folder.parent / f"{folder.name}_{rank}.txt",
                               {key: str(value) for key, value in environment.items()}))
    if wait_for(children):
        return ""
    errors = [path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}_*.error"))]
    own = [each for each in errors if not re.search(r"Connection (closed|reset)|Broken pipe", each)]
    return (own or errors or [f"no end within {PATIENCE} s, or a crash without a word"])[0]


def run(row, folder: pathlib.Path) -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, row.dtype))
    row.run(row, folder)


def verdict(one: pathlib.Path, many: pathlib.Path) -> tuple[int, list[str]]:
    """same_numbers' exit code and lines."""
    def judged() -> int:
        from same_numbers.__main__ import main

        sys.argv = ["same_numbers", str(one), str(many)]
        return main()
    output = one.parent / "verdict.txt"
    child = forked(judged, output, {})
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text().splitlines()


def compared(one: pathlib.Path, many: pathlib.Path) -> dict:
    """How much both recordings have: steps, gradients of parameters, samples."""
    import torch

    found = {"steps": 0, "gradients": 0, "samples": 0}
    for path in sorted(one.glob("rank0_step*.pt")):
        step = path.name.partition("_")[2]
        a, *b = [torch.load(each, weights_only=True) for each in [path, *many.glob(f"rank*_{step}")]]
        if any("gradients" not in each for each in (a, *b)):  # what the Recorder could not record
            break
        held = {name for each in b for name, size in each["gradients"]["sizes"].items() if size is not None}
        samples = {sample for each in b for sample in each["samples"]}
        found["steps"] += 1
        found["gradients"] += min(len(held), sum(size is not None for size in a["gradients"]["sizes"].values()))
        found["samples"] += len(samples & {*a["samples"]})
    return found


def plain(one: pathlib.Path, many: pathlib.Path) -> dict:
    """Whole gradients of the first step, compared without same_numbers: how many, and which are off by how much."""
    import torch

    try:
        a = torch.load(one / "plain" / "0_1.pt")
        b = [torch.load(path) for path in sorted((many / "plain").glob("*_1.pt"))]
    except FileNotFoundError:
        return {"compared": 0, "wrong": {}, "worst": None}
    total = sum(float(each.double().norm()) ** 2 for each in a.values()) ** 0.5
    off, names = {}, {name for each in b for name in each}
    is_fine = all(each.dtype == torch.float64 for each in a.values())
    floor = (1e-9 if is_fine else 1e-4) * total  # of gradients that are zero but for rounding
    for name, right in a.items():
        known = name if name in names else next((each for each in names if each.endswith(f".{name}")
                                                 or name.endswith(f".{each}")), None)
        for each in b:
            if known in each and each[known].shape == right.shape:
                length = max(float(right.double().norm()), floor)
                off[name] = max(off.get(name, 0.0), float((each[known].double() - right.double()).norm()) / length)
    coarse = 1e-5 if is_fine else 3e-3
    wrong = {name: float(f"{each:.2g}") for name, each in off.items() if not each <= coarse}
    return {"compared": len(off), "wrong": wrong, "worst": max(off.values(), default=None)}


def judge(row, folder: pathlib.Path, versions: dict) -> dict:
    """All that the board says of a row."""
    since, found = time.time(), {
        "library": row.library, "row": row.name, "model": row.model, "parallelism": row.parallelism,
        "micro_batches": row.micro_batches, "ranks": row.ranks, "dtype": row.dtype, "patch": row.patch,
        "versions": versions}
    for words, ranks, name in (("one process", 1, "one"), (f"{row.ranks} ranks", row.ranks, "many")):
        if error := start(row, folder / name, ranks):
            return found | {"code": None, "lines": [f"{words}: {error}"], "seconds": round(time.time() - since, 1)}
    code, lines = verdict(folder / "one", folder / "many")
    return found | {"code": code, "lines": lines, **compared(folder / "one", folder / "many"),
                    "plain": plain(folder / "one", folder / "many"), "seconds": round(time.time() - since, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--rows", nargs="*", help="names of rows; without it, all")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for recordings and outputs (default: none is kept)")
    args = parser.parse_args()
    os.environ.update(QUIET)
    recipes = importlib.import_module(f"of_{args.library}")
    rows = [row for row in recipes.ROWS if not args.rows or row.name in args.rows]
    import torch

    torch.set_num_threads(1)
    for module in LATE:  # once, instead of in each rank
        importlib.import_module(module)
    getattr(recipes, "prepare", int)()
    gc.freeze()
    versions = {name: importlib.metadata.version(name) for name in ("torch", *recipes.SHOWN)}
    for row in rows:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep / row.library / row.name if args.keep else pathlib.Path(temporary)
            if args.keep:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            getattr(recipes, "before", id)(row)
            print(json.dumps(judge(row, folder, versions)), flush=True)


if __name__ == "__main__":
    main()
