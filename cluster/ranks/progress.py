"""Bars for work that takes long, on a terminal alone: where output goes to a pipe or a file, none is drawn."""

import contextlib
import io
import os
import sys

from tqdm import tqdm

DELAY = 1.0  # seconds: shorter work shows none
BAR = "step {n_fmt}/{total_fmt} |{bar:20}| {desc}{remaining} left"  # of a training, as tqdm fills it in


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


class Bar:
    """How far a run is, on the terminal of the rank that logs. It is there between begin() and end().

        step 12/60 |####                | loss 3.4211 | evaluation 3.5120 | 214 tokens/s | 03:12 left
    """

    def __init__(self, is_logging_rank: bool, start: int, num_steps: int):
        self.is_shown = is_logging_rank and is_terminal() and start < num_steps
        self.words = {"loss": "", "evaluation": "", "speed": ""}
        self.tqdm = tqdm(total=num_steps, initial=start, bar_format=BAR, file=sys.stdout, ascii=" #",
                         disable=not self.is_shown, dynamic_ncols=True)
        self.tqdm.clear()

    def begin(self) -> None:
        """Draws it, and puts the cursor back: what another process prints until end() stands over it."""
        self.tqdm.refresh()
        print("\r" * self.is_shown, end="", flush=True)

    def end(self, step: int) -> contextlib.AbstractContextManager:
        """Takes it away, and after it what is printed inside of the context that it returns, the line of a step."""
        if not self.is_shown:
            return contextlib.nullcontext()
        self.tqdm.clear()
        self.tqdm.n = step
        return contextlib.redirect_stdout(io.StringIO())

    def tell(self, **words: str) -> None:
        """What it says besides: of the `loss`, the last `evaluation` and the `speed`."""
        self.words.update(words)
        self.tqdm.set_description_str("".join(f"{each} | " for each in self.words.values() if each), refresh=False)

    def close(self, stays: bool) -> None:
        """For good. `stays`: its last line is left on the terminal."""
        self.tqdm.leave = stays
        self.tqdm.close()
