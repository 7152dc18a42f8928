"""Candidates that take turns, so that whatever else the machine does disturbs all of them alike; and what comes of it.

The speed of a machine with other users changes from minute to minute. Programs that run one after the other meet
different speeds. Here all of them are started, and then each continues for one step and is stopped again (SIGCONT,
SIGSTOP) while the others have their turns. A ratio of two programs then compares steps that are seconds apart.

What is measured is kept as {group: {"seconds": {candidate: [of each turn]}, ...}}.
"""

import collections
import functools
import json
import os
import pathlib
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from lab.launch import environment, writing


def take_turns(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """In each round every candidate has one turn, which returns its seconds. The first round only warms up."""
    seconds = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            seconds[name].append(turn())
        if number:
            took = ", ".join(f"{name} {times[-1]:.3g}" for name, times in seconds.items())
            print(f"round {number}/{rounds}, seconds: {took}", file=sys.stderr, flush=True)
    return {name: times[1:] for name, times in seconds.items()}


def times_as_fast(ours: list[float], theirs: list[float]) -> list[float]:
    """The rounds' ratios of seconds, theirs to ours: lower quartile, median, upper quartile."""
    ratios = [other / own for own, other in zip(ours, theirs)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios


def table(heads: Iterable[str], rows: Iterable[Iterable]) -> str:
    """In Markdown; columns of numbers are aligned on the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    rules = ["---:" if all(re.fullmatch(r"[\d.,%]*", cell) for cell in column) else "---" for column in zip(*rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(heads), rules, *rows])


def read_results(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: pathlib.Path | None, group: str, found: dict) -> None:
    """Writes what was found of a group beside the other groups of the file."""
    if path:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**read_results(path), group: found}, indent=1))


class Program:
    """`script arguments` on several ranks of this machine, which prints a line "step ..." at the end of each step.

    The ranks find each other as under torchrun, by environment variables, to which `variables` are added. The first
    turn() is the start and the first step. After the last one, end() lets the ranks end by themselves, and kill() does
    not.
    """

    def __init__(self, name: str, num_ranks: int, script, *arguments, **variables: str):
        self.name = name
        self.last_lines, self.lines = collections.deque(maxlen=40), queue.SimpleQueue()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_ranks),
                             LOCAL_WORLD_SIZE=str(num_ranks), PYTHONUNBUFFERED="1", **variables)
        read_end, write_end = os.pipe()
        self.ranks = [subprocess.Popen([sys.executable, str(script), *map(str, arguments)], stdin=subprocess.DEVNULL,
                                       stdout=write_end, stderr=write_end,
                                       env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                      for rank in range(num_ranks)]
        os.close(write_end)
        threading.Thread(target=self.read, args=(os.fdopen(read_end),), daemon=True).start()

    def read(self, pipe) -> None:
        for line in pipe:
            self.lines.put((time.perf_counter(), line))
        self.lines.put((time.perf_counter(), None))  # all ranks have ended

    def turn(self) -> float:
        """One step. Returns its seconds."""
        start = time.perf_counter()
        self.signal(signal.SIGCONT)
        line = ""
        while not line.startswith("step "):
            end, line = self.wait_for_line()
            if line is None:
                sys.exit(f"error: {self.name} ended in the middle: {''.join(self.last_lines)}")
        self.signal(signal.SIGSTOP)
        return end - start

    def wait_for_line(self, timeout: float = 600) -> tuple[float, str | None]:
        """Raises SystemExit where a rank fails, since the others might wait for it for ever."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                moment, line = self.lines.get(timeout=1)
            except queue.Empty:
                codes = [rank.poll() for rank in self.ranks]
                if any(codes) or time.monotonic() > deadline:
                    sys.exit(f"error: {self.name} hangs or failed, exit codes {codes}: {''.join(self.last_lines)}")
                continue
            if line is not None:
                self.last_lines.append(line)
            return moment, line

    def end(self) -> None:
        """Lets it run to its end. Raises SystemExit where a rank fails."""
        self.signal(signal.SIGCONT)
        while self.wait_for_line()[1] is not None:
            pass
        if any(codes := [rank.wait() for rank in self.ranks]):
            sys.exit(f"error: {self.name} ended with exit codes {codes}: {''.join(self.last_lines)}")

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def programs_in_turns(starts: dict[str, Callable[[], Program]], rounds: int) -> dict[str, list[float]]:
    """take_turns() of programs, of which a turn is a step. The first one is the start, too: each starts alone."""
    programs = {}

    def turn(name: str) -> float:
        if name not in programs:
            programs[name] = starts[name]()
        return programs[name].turn()

    try:
        seconds = take_turns({name: functools.partial(turn, name) for name in starts}, rounds)
        for program in programs.values():
            program.end()
    finally:
        for program in programs.values():
            program.kill()
    return seconds
