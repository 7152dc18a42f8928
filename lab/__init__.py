"""The laboratory: a program, on ranks, while something watches. `python -m lab --help` shows what can be typed.

    from lab import Messages, Program, run, threads

    messages = Messages()
    result = run(Program("8", ["--pp_size", 4, "--max_tokens", 512]), threads(4), [messages])

A Program is a step's train.py with flags and edits (program.py). It runs on ranks: threads of this process that take
turns (ranks.py), or one of any number, alone (rank_alone.py). What watches is installed before, and holds its findings
after (watch/).
"""

import importlib

MODULES = {  # public name -> its module, which is imported when the name is first used: most of them import torch
    "Allocated": "watch.kept", "DryRun": "watch.dry_run", "Edit": "program", "Kept": "watch.kept",
    "Memory": "watch.held", "Messages": "watch.messages", "Numbers": "watch.numbers", "Program": "program",
    "Result": "results", "SameNumbers": "watch.numbers", "Schedule": "watch.actions", "Stop": "stop",
    "Types": "watch.typed_steps", "Waits": "watch.waits", "WholeNumbers": "watch.numbers", "alone": "rank_alone",
    "compare": "results", "look": "one_step", "processes": "ranks", "run": "ranks", "threads": "ranks",
    "timed": "picture"}
__all__ = [*MODULES]


def __getattr__(name: str):
    if name not in MODULES:
        raise AttributeError(f"module 'lab' has no attribute {name!r}: it has {', '.join(MODULES)}")
    return getattr(importlib.import_module(f"lab.{MODULES[name]}"), name)
