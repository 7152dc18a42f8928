"""How far a training is: on a terminal one line that is drawn anew, elsewhere a line every minute.

    step 12/60 |#####               | loss 3.4211 | evaluation 3.5120 | 214 tokens/s | 03:12 left

While the bar is there, what this process prints appears above it. In a file or a pipe each step has its line from
RunLogger already, so that only the time left is added.
"""

import os
import sys
import time

EVERY = 60  # seconds between two lines where there is no terminal


class Progress:
    """Of the steps `start` + 1 to `num_steps`, on the rank that logs; on others, with `is_shown` False, nothing.

    `is_bar`: whether there is a bar, and no lines of the steps are wanted.
    """

    def __init__(self, num_steps: int, start: int, is_shown: bool):
        self.num_steps, self.first, self.last, self.evaluation = num_steps, None, ("", ""), ""
        self.is_shown, self.bar, self.streams = is_shown, None, (sys.stdout, sys.stderr)
        self.is_bar = is_shown and start < num_steps and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        if self.is_bar:
            from tqdm import tqdm

            self.bar = tqdm(total=num_steps, initial=start, file=sys.stdout, dynamic_ncols=True, smoothing=0.1,
                            bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc}{remaining} left")
            sys.stdout, sys.stderr = (Above(stream, self.bar) for stream in self.streams)

    def step(self, number: int, loss: float, tokens_per_second: float) -> None:
        """Step `number` is done."""
        if self.bar is not None:
            self.last = f"loss {loss:.4f} | ", f"{tokens_per_second:,.0f} tokens/s | "
            self.describe()
            self.bar.update(number - self.bar.n)
        elif self.is_shown:
            self.print_time_left(number, time.monotonic())

    def evaluated(self, loss: float) -> None:
        """The loss of an evaluation, which the bar has until the next one."""
        self.evaluation = f"evaluation {loss:.4f} | "
        if self.bar is not None:
            self.describe()

    def describe(self) -> None:
        before, behind = self.last
        self.bar.set_description_str(before + self.evaluation + behind, refresh=False)

    def print_time_left(self, number: int, now: float) -> None:
        """The first step, which warms up, counts neither as done nor as time."""
        if self.first is None:
            self.first, self.last_line = (number, now), now
        elif now - self.last_line >= EVERY and number < self.num_steps:
            first, began = self.first
            left = (now - began) / (number - first) * (self.num_steps - number)
            print(f"{number / self.num_steps:.0%} of the steps are done, about {duration(left)} left", flush=True)
            self.last_line = now

    def close(self) -> None:
        """The bar stays as it is, and what follows is printed below it."""
        if self.bar is not None:
            sys.stdout, sys.stderr = self.streams
            self.bar.close()
            self.bar = None


class Above:
    """A stream in the place of `stream`, whose whole lines are written above the bar."""

    def __init__(self, stream, bar):
        self.stream, self.bar, self.pending = stream, bar, ""

    def write(self, text: str) -> int:
        lines, end, self.pending = (self.pending + text).rpartition("\n")
        if end:
            self.bar.clear()
            self.stream.write(lines + end)
            self.stream.flush()
            self.bar.refresh()
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def duration(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
