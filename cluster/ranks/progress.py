"""A bar for work that takes long, on a terminal alone: where output goes to a pipe or a file, nothing is printed."""

import os
import sys

from tqdm import tqdm

DELAY = 1.0  # seconds: shorter work shows none


def is_terminal() -> bool:
    """Whether what this process prints is seen by a person who types at a terminal that can rewrite a line."""
    streams = sys.stdout, sys.stderr
    return os.environ.get("TERM") != "dumb" and all(stream is not None and stream.isatty() for stream in streams)


def progress(what: str, items=None, total: float | None = None, unit: str = "", by_all: bool = False) -> tqdm:
    """A bar named `what` that moves as its `items` are taken, or by update(n), to the `total` if that is known.

    It is gone when the work ends. `by_all`: the ranks of a machine do this at once, and the first of them shows it;
    else the one that works does.
    """
    is_shown = is_terminal() and (not by_all or os.environ.get("LOCAL_RANK", "0") == "0")
    return tqdm(items, what, total, leave=False, disable=not is_shown, unit=unit, unit_scale=items is None,
                dynamic_ncols=True, delay=DELAY)
