"""Runs each step's train.py once for the site, and keeps what its pages draw in assets/site_runs.json.

A step has one run of 50 optimizer steps in its own topology, with default flags otherwise: its command and the losses.
Steps 8 and 9 also have timelines of an optimizer step of a larger model, in a compact form:

    {"ranks": ["rank 0: dp 0 pp 0 tp 0", ...], "kinds": ["forward", ...],
     "events": [[rank, track, kind, micro-batch or -1, start, duration, sender or -1], ...]}     microseconds
"""

import json
import pathlib
import re
import tempfile

from launch import ROOT, STEPS, launch

RUNS_FILE = ROOT / "assets" / "site_runs.json"
TOPOLOGIES = {  # step -> number of processes, flags
    1: (1, ()),
    2: (1, ()),
    3: (1, ()),
    4: (4, ("--tp_size", 4)),
    5: (4, ("--dp_size", 4, "--micro_batch_size", 1)),
    6: (4, ("--dp_size", 4, "--micro_batch_size", 1)),
    7: (4, ("--pp_size", 4)),
    8: (4, ("--pp_size", 4)),
    9: (3, ("--pipelines", "8;5,3", "--num_microbatches", "6,2")),
    10: (4, ("--pp_size", 4)),
}
TITLES = {  # step -> schedule -> its title; the first one is shown first
    8: {"1f1b": "1F1B", "afab": "all forward, all backward"}, 10: {"zb": "zero bubble", "1f1b": "1F1B"}}


def command_line(step: int, num_ranks: int, flags: tuple) -> str:
    """What a reader types for this run."""
    script = f"{STEPS[str(step)].relative_to(ROOT)}/train.py"
    words = [f'"{flag}"' if ";" in str(flag) or "," in str(flag) else str(flag) for flag in flags]
    start = "python" if step == 1 else f"torchrun --nproc_per_node {num_ranks}"
    return " ".join([start, script, *words])


def compact(trace: dict) -> dict:
    """A Chrome trace that a step's timeline.py wrote, as in the docstring of this module."""
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    spans = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))
    kinds = list(dict.fromkeys(event["cat"] for event in spans))
    events = [[event["pid"], event["tid"], kinds.index(event["cat"]), event["args"].get("microbatch", -1),
               round(event["ts"]), round(event["dur"]), event["args"].get("peer", -1)] for event in spans]
    return {"ranks": [names[rank] for rank in sorted(names)], "kinds": kinds, "events": events}


def timelines(step: int, folder: pathlib.Path) -> dict[str, dict]:
    """Title -> timeline, of the runs of which make_figures.py draws figures."""
    import make_figures  # imported here: it needs matplotlib, which a build of the site does not

    if step in TITLES:
        traces = make_figures.traces_of_schedules(folder)
        found = {title: traces[engine] for engine, title in TITLES[step].items()}
    else:
        found = {"pipelines 8;5,3": make_figures.trace_of_unlike_pipelines(folder)} if step == 9 else {}
    return {title: compact(json.loads(path.read_text())) for title, path in found.items()}


def run(step: int, folder: pathlib.Path) -> dict:
    """One step's entry of the file: its command, its losses, and its timelines if it has any."""
    num_ranks, flags = TOPOLOGIES[step]
    where = ("--log_dir", folder, "--run_name", "run") if step > 1 else ()
    done = launch(step, num_ranks, *flags, *where, timeout=600)
    losses = [float(loss) for loss in re.findall(r"^step \d+/\d+ \| loss ([\d.]+)", done.stdout, re.M)]
    print(f"step {step}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    entry = {"command": command_line(step, num_ranks, flags), "ranks": num_ranks, "losses": losses}
    return {**entry, "timelines": found} if (found := timelines(step, folder)) else entry


def read_runs() -> dict[int, dict]:
    """What assets/site_runs.json holds, step by step; empty where there is no such file yet."""
    if not RUNS_FILE.exists():
        return {}
    return {int(step): entry for step, entry in json.loads(RUNS_FILE.read_text()).items()}


def write_runs(steps: list[int]) -> None:
    """Runs these steps, and replaces their entries of the file."""
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            entry = run(step, pathlib.Path(folder))
        runs = {**read_runs(), step: entry}
        lines = [f'"{number}": {json.dumps(runs[number], separators=(",", ":"))}' for number in sorted(runs)]
        RUNS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
