"""Threads that take turns: one for each rank, of which exactly one runs at a time, so a program always runs alike.

Rank 0 runs first, until it has to wait for another rank. Then the next rank that can go on gets the baton. Where none
can, the ranks are in a deadlock, and the error says who waits for whom, and where. thread_ranks.py adds the messages.
"""

import contextlib
import functools
import linecache
import os
import pathlib
import re
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable
from typing import NamedTuple

from lab.launch import ROOT

READER = ROOT / "exercises" / "mine"  # where readers write, see exercises/try.py
OWN = str(ROOT / "lab") + os.sep
NOT_OURS = (OWN, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
CELL = re.compile(r"ipykernel_|<ipython-input")  # in the file name of a notebook's cell


class Violation(Exception):
    """The ranks did what does not work between processes. The message is a sentence, and a picture where it helps."""


class Ended(BaseException):
    """Ends the thread of a rank after another one has failed."""


class Handle:
    """What a rank can wait for: it goes on when `ready()`, and then calls `finish()`, once.

    `describe` says in words what it is, and `waits_for()` which ranks have to act.
    """

    def __init__(self, baton: "Baton", describe: str, waits_for: Callable, ready: Callable, finish: Callable):
        self.baton, self.describe, self.waits_for = baton, describe, waits_for
        self.ready, self.finish, self.waited, self.place = ready, finish, False, place()

    def wait(self) -> bool:
        if not self.waited:
            self.baton.block(self)
            self.waited = True
            self.finish()
        return True

    def is_completed(self) -> bool:
        """Where it is not, other ranks go on first: a rank that asks again and again must not keep them from it."""
        if not self.waited and not self.ready():
            self.baton.give_way()
        return self.waited or self.ready()


class Where(NamedTuple):
    """A line of a program. As a string it is its file, number and text."""

    path: str
    line: int

    def __str__(self) -> str:
        linecache.checkcache(self.path)
        return f"{shown(self.path)}, line {self.line}: {linecache.getline(self.path, self.line).strip()}"


@functools.cache
def is_ours(path: str) -> bool:
    return not path.startswith(NOT_OURS)


def place(frame: types.FrameType | None = None) -> Where:
    """Where a program is: the innermost frame in READER, else the innermost one that is of no library."""
    frame, found, reader = frame or sys._getframe(1), None, str(READER)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(reader):
            return Where(path, frame.f_lineno)
        if found is None and (is_ours(path) or frame.f_back is None):
            found = Where(path, frame.f_lineno)  # a line's number takes time to find
        frame = frame.f_back
    return found


def shown(path: str | pathlib.Path) -> str:
    """A path as messages name it: from the repository's folder on, where it is in there."""
    path = pathlib.Path(re.sub(r", changed \(\d+\)$", ", changed", str(path)))  # of which edit need not be said
    return "a cell" if CELL.search(str(path)) else str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def within(seconds: float, is_over: Callable[[float], bool]) -> bool:
    """Whether is_over(a moment to wait for) comes true before this process has computed for so many seconds, or three
    times as many have passed: other programs may run, too."""
    start, latest = time.process_time(), time.monotonic() + 3 * seconds
    while time.process_time() < start + seconds and time.monotonic() < latest:
        if is_over(0.1):
            return True
    return is_over(0.0)


class Baton:
    """Runs a program on `size` ranks that take turns."""

    def __init__(self, size: int):
        self.size, self.failure = size, None
        self.local = threading.local()
        self.batons = [threading.Lock() for _ in range(size)]
        for baton in self.batons:
            baton.acquire()
        self.waiting: list[Handle | None] = [None] * size
        self.done: set[int] = set()
        self.threads: list[threading.Thread] = []
        self.all_done, self.news = threading.Event(), threading.Event()  # news: all are done, or one asks
        self.question, self.answer, self.answered = None, None, threading.Semaphore(0)

    @property
    def rank(self) -> int:
        """That of the calling thread."""
        return self.local.rank

    def run(self, program: Callable[[int], object], timeout: float = 60) -> list:
        """What program(rank) returns, by rank. Raises Violation, or the first error of a rank, whose number is its
        attribute `rank`.

        A rank that has not ended within() `timeout` seconds, counted anew after each question, is a Violation as well.
        """
        results: list = [None] * self.size
        self.threads = [threading.Thread(target=self.live, args=(rank, program, results), daemon=True)
                        for rank in range(self.size)]
        for thread in self.threads:
            thread.start()
        self.batons[0].release()
        try:
            while not self.all_done.is_set():
                self.let_go_on(timeout)
        except BaseException as error:  # Ctrl-C, or commands that can't be read
            self.fail(error)
        if self.failure:
            for thread in self.threads:
                thread.join(1)  # one that does not end is left behind
            raise self.failure
        return results

    def let_go_on(self, timeout: float) -> None:
        """Until all ranks are done, or one of them asks, which is answered."""
        if not within(timeout, self.news.wait):
            rank = next((rank for rank in range(self.size) if rank not in self.done and self.waiting[rank] is None), 0)
            where = place(self.frame(rank))
            self.fail(Violation(f"rank {rank} does not end. After {timeout:g} seconds it is at {where}"))
        elif self.question is not None:
            self.news.clear()
            self.answer, self.question = self.question(), None
            self.answered.release()

    def ask(self, question: Callable[[], object]) -> object:
        """What question() returns in the thread that called run(), where Ctrl-C arrives. Meanwhile all ranks stand."""
        self.question = question
        self.news.set()
        self.answered.acquire()
        if self.failure is not None:
            raise Ended
        return self.answer

    def live(self, rank: int, program: Callable, results: list) -> None:
        """The life of a rank's thread."""
        self.local.rank = rank
        self.batons[rank].acquire()
        try:
            if self.failure is None:
                results[rank] = program(rank)
                self.check_end_of_rank(rank)
        except Ended:
            pass
        except BaseException as error:
            error.rank = rank
            self.fail(error)
        self.done.add(rank)
        if self.failure is None and len(self.done) < self.size:
            self.pass_on(rank)
        elif self.failure is None:
            self.failure = self.check_end()
            self.end()

    def check_end_of_rank(self, rank: int) -> None:
        """Raises Violation where this rank must not end now."""

    def check_end(self) -> Violation | None:
        """What is wrong after all ranks have ended."""

    def fail(self, error: BaseException) -> None:
        """The first failure is that of the run. All other ranks end."""
        self.failure = self.failure or error
        for baton in self.batons:
            with contextlib.suppress(RuntimeError):  # that rank has it already
                baton.release()
        self.end()

    def end(self) -> None:
        self.all_done.set()
        self.news.set()
        self.answered.release()  # of a rank that asks and gets no answer any more

    def pass_on(self, rank: int) -> bool:
        """Gives the baton to the next rank that can go on. False where this is the calling rank itself."""
        for other in (*range(rank + 1, self.size), *range(rank + 1)):
            if other not in self.done and (self.waiting[other] is None or self.waiting[other].ready()):
                if other != rank:
                    self.batons[other].release()
                return other != rank
        self.fail(Violation(self.picture()))
        return True

    def give_way(self) -> None:
        """Lets other ranks run, if any can, and goes on after them."""
        rank = self.rank
        if self.failure is None and self.pass_on(rank):
            self.batons[rank].acquire()
        if self.failure is not None:
            raise Ended

    def block(self, handle: Handle) -> None:
        """Lets other ranks run until the handle is ready."""
        rank = self.rank
        if self.failure is None and not handle.ready():
            handle.place, self.waiting[rank] = place(), handle
            if self.pass_on(rank):
                self.batons[rank].acquire()
            self.waiting[rank] = None
        if self.failure is not None:
            raise Ended

    def frame(self, rank: int) -> types.FrameType | None:
        """The innermost one of a rank's thread, None where that has ended."""
        return sys._current_frames().get(self.threads[rank].ident)

    def picture(self, standing: int | None = None) -> str:
        """Who waits for whom: all ranks, an arrow to those that a rank waits for, and a circle where there is one.

        `standing`: the rank that stands in a debugger. Then others may not have begun, or could go on.
        """
        lines, blocked = ["deadlock: no rank can go on." if standing is None else f"rank {standing} stands.", ""], {}
        for rank, handle in enumerate(self.waiting):
            if rank in self.done:
                lines.append(f"  rank {rank}             has ended")
            elif handle is None:
                where = place(self.frame(rank))
                state = "stands" if rank == standing else "can go on" if is_ours(where.path) else "has not begun"
                lines += [f"  rank {rank} {'':14} {state}"] + [f"{'':25}{where}"] * is_ours(where.path)
            elif handle.ready():
                lines += [f"  rank {rank} {'':14} can go on: {handle.describe}", f"{'':25}{handle.place}"]
            else:
                blocked[rank] = handle.waits_for()
                arrow = f"--> rank {', '.join(map(str, blocked[rank]))}"
                lines += [f"  rank {rank} {arrow:14} {handle.describe}", f"{'':25}{handle.place}"]
        for start in blocked:
            path = [start]
            while (following := next((rank for rank in blocked[path[-1]] if rank in blocked), None)) is not None:
                if following in path:
                    circle = [f"rank {rank}" for rank in (*path[path.index(following) :], following)]
                    return "\n".join([*lines, "", f"  They wait in a circle: {' -> '.join(circle)}"])
                path.append(following)
        ended = "  What they wait for can't come: those ranks have ended."
        return "\n".join([*lines, "", ended] if standing is None else lines)
