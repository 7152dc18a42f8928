"""Stops in a program on ranks of this process: the ordinary pdb on one of them, while the others stand where they are.

    run(Program("8", ["--pp_size", 4]), threads(4, stop=Stop("pipeline_parallel.py:192", rank=2)))

Ranks take turns (baton.py), so while one stands at a prompt no other one goes on, and all do then what they would have
done. pdb has more commands here: `ranks`, `rank N`, `messages`, and `back`, which runs the program anew.
"""

import bdb
import cmd
import code
import contextlib
import copy
import ctypes
import functools
import inspect
import os
import pdb
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from lab.baton import OWN
from lab.program import Program
from lab.rank_collectives import Event
from lab.results import Result, folded
from lab.watch.messages import Messages

QUIET = ("threading", "torch.nn.modules.module")  # as lab itself, not shown in stacks
STEPPING = "s step n next r return unt until j jump".split()
SHARED = {"breaks", "aliases", "commands", "commands_doprompt", "commands_silent"}  # by the debuggers of all ranks


class StopError(ValueError):
    """A stop that can't be made. The message is a sentence."""


class Back(BaseException):
    """Back(rank, N) ends a run, for another one that stops just before message N; 0: at the first line of the rank."""


def is_own(frame: types.FrameType) -> bool:
    """Whether it belongs to what makes threads take turns, or to torch's way into a forward()."""
    return frame.f_code.co_filename.startswith(OWN) or frame.f_globals.get("__name__") in QUIET


def outside(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost one from here that is not our own, None where there is none."""
    return outside(frame.f_back) if frame and is_own(frame) else frame


def codes_in(code: types.CodeType, name: str) -> Iterator[tuple[str, types.CodeType]]:
    """A module's code, and that of all classes and functions in it, each with its name after those around it."""
    yield name, code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes_in(each, f"{name}.{each.co_name}")


folder_of = functools.cache(os.path.dirname)  # each call of any function asks for it


class Debugger(pdb.Pdb):
    """The pdb of one rank, in its thread."""

    def __init__(self, stop: "Stop", rank: int):
        by_thread = {"backend": "settrace"} if sys.version_info >= (3, 14) else {}  # before, there is no other one
        super().__init__(nosigint=True, readrc=False, **by_thread)
        self.stop, self.rank, self.looked_at, self.left = stop, rank, rank, None
        vars(self).update({name: stop.shared.setdefault(name, vars(self)[name]) for name in SHARED & vars(self).keys()})

    def stop_here(self, frame: types.FrameType) -> bool:
        """`step` leads into functions of the program only."""
        return (frame is self.stopframe or self.stop.is_of_program(frame)) and super().stop_here(frame)

    def set_continue(self) -> None:
        """This thread is traced without breakpoints, too: another rank may set some."""
        self._set_stopinfo(self.botframe, None, -1)

    def break_anywhere(self, frame: types.FrameType) -> bool:
        """All functions of the program are traced: a breakpoint may be set while they run."""
        return self.stop.is_of_program(frame) or super().break_anywhere(frame)

    def break_here(self, frame: types.FrameType) -> bool:
        if self.stop.target == (self.rank, 0) and self.stop.is_of_program(frame):
            self.message(f"back: rank {self.rank} has taken part in no message before. This is its first line:")
            self.stop.target = None
            return True
        return self.stop.is_on(self.rank) and super().break_here(frame)

    def stand(self, frame: types.FrameType) -> None:
        """Stops at once, in the line that `frame` is at."""
        self.interaction(frame, None)
        if sys.version_info < (3, 13):  # what was assigned to local variables; a trace function does so by itself
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
        if self.quitting:
            raise bdb.BdbQuit

    def setup(self, frame: types.FrameType, traceback) -> bool | None:
        self.looked_at, self.prompt = self.rank, f"(rank {self.rank} of {self.stop.world.size}) "
        return super().setup(frame, traceback)

    def get_stack(self, frame: types.FrameType, traceback) -> tuple[list, int]:
        stack, index = super().get_stack(frame, traceback)
        kept = [i for i, (each, _) in enumerate(stack) if each is frame or not is_own(each)]
        return [stack[i] for i in kept], sum(i <= index for i in kept) - 1

    def lookupmodule(self, name: str) -> str | None:  # the step's folder comes before sys.path
        module, program = name.removesuffix(".py"), self.stop.program
        return program.code(module).co_filename if program.path(module) else super().lookupmodule(name)

    def onecmd(self, line: str) -> bool | None:
        if self.looked_at != self.rank and self.parseline(line)[0] in STEPPING:
            return self.error(f"rank {self.looked_at} is only looked at: `rank {self.rank}` leads back to yours")
        local = self.stop.world.local
        local.rank = self.looked_at  # which dist.get_rank() reads
        try:
            return super().onecmd("end" if self.commands_defining and line == "EOF" else line)
        finally:
            local.rank = self.rank

    def do_EOF(self, arg: str) -> bool:  # noqa: N802
        """Where the commands end, the program goes on without stops."""
        self.message("")
        self.stop.is_over = True
        for each in self.stop.debuggers.values():
            each.set_continue()
        return True

    def do_ranks(self, arg: str) -> None:
        """ranks
        What each rank is doing, where, and what it waits for.
        """
        self.message(self.stop.world.picture(self.rank))

    def do_rank(self, arg: str) -> None:
        """rank N
        Shows the frames and variables of rank N, for commands such as w, up, down, ll, p. It does not go on by itself.
        """
        world, numbers = self.stop.world, {str(rank): rank for rank in range(self.stop.world.size)}
        if (rank := numbers.get(arg.strip())) is None:
            return self.error(f"rank needs a number from 0 to {world.size - 1}")
        if self.looked_at == self.rank:
            self.left = self.stack, self.curindex
        stack, index = self.left if rank == self.rank else self.get_stack(outside(world.frame(rank)), None)
        if not stack:
            return self.error(f"rank {rank} has not begun, or has ended: there is nothing to look at")
        self.stack, self.looked_at = stack, rank
        self.prompt = f"(rank {rank} of {world.size}{', to look at' * (rank != self.rank)}) "
        self._select_frame(index)

    def do_messages(self, arg: str) -> None:
        """messages
        All messages so far, in their order.
        """
        for line in self.stop.log():
            self.message(line)

    def do_back(self, arg: str) -> None:
        """back
        Runs the program anew, and stops on this rank just before the newest message in which it took part.
        """
        own = [event.number for event in self.stop.world.events if event.rank == self.rank and event.number]
        raise Back(self.rank, own[-1] if own else 0)

    do_run = do_restart = do_back


class Stop:
    """Where ranks stop: `where` are "FILE:LINE" of the step, names of functions, or "message:N".

    With `rank`, nothing stops but on this one; without, each rank that comes there does. A breakpoint() of the program
    stops, too. Commands come from `stdin`. run() raises StopError for a place that there is not.
    """

    def __init__(self, *where: str, rank: int | None = None, stdin=None):
        self.where, self.rank, self.stdin, self.is_over = where, rank, stdin or sys.stdin, False
        self.target: tuple[int, int] | None = None  # the arguments of the newest Back, until the program is there
        self.debuggers: dict[int, Debugger] = {}
        self.shared: dict[str, object] = {"breaks": {}}
        self.breakpoints: dict[str, list[bdb.Breakpoint]] = {}
        self.numbers, self.came = set(), set()  # of messages

    def run(self, once: Callable, program: Program, ranks, watches: Sequence):
        """What once() returns, which runs the program on the ranks, and anew after each `back`."""
        self.is_over, self.target, self.shared, self.breakpoints = False, None, {"breaks": {}}, {}
        self.numbers, self.came = set(), set()
        self.program, self.folders, self.world = program, {*map(str, program.folders)}, ranks.world
        self.log = lambda: folded(Result([], [], self.world, [Messages(), *watches]))
        variables, state = copy.deepcopy([vars(watch) for watch in watches]), torch.get_rng_state()
        texts = (program.texts.get(path.name) or path.read_text("utf-8") for path in program.folders[0].glob("*.py"))
        self.is_tracing = bool(self.where) or any("breakpoint()" in text or "set_trace()" in text for text in texts)
        if self.is_tracing and any(type(watch).__name__ == "Memory" for watch in watches):
            raise StopError("a stop and memory don't go together, since a debugger holds what it shows: leave one out")
        if self.rank not in (None, *range(ranks.size)):
            raise StopError(f"--rank {self.rank}: the ranks are 0 to {ranks.size - 1}")
        try:
            for where in self.where:
                if where.startswith("message:") and where[8:].isdecimal() and int(where[8:]):
                    self.numbers.add(int(where[8:]))
                else:
                    self.breakpoints[where] = [bdb.Breakpoint(*place) for place in self.places(where)]
                    for each in self.breakpoints[where]:
                        self.shared["breaks"].setdefault(each.file, []).append(each.line)
            with contextlib.ExitStack() as stack:
                for module in (cmd, code, pdb):
                    stack.enter_context(mock.patch.object(module, "input", self.read, create=True))
                for module, name in ((sys, "breakpointhook"), (pdb, "set_trace")):
                    stack.enter_context(mock.patch.object(module, name, self.stand_here))
                while True:
                    self.world, self.world.before = ranks.world, self.before
                    try:
                        return once()
                    except Back as back:
                        self.target, ranks.world = back.args, type(ranks.world)(ranks.size)
                    torch.set_rng_state(state)
                    for watch, first in zip(watches, variables):
                        vars(watch).update(copy.deepcopy(first))
        finally:
            for each in [each for each in bdb.Breakpoint.bpbynumber if each and each.file in self.shared["breaks"]]:
                each.deleteMe()

    def places(self, where: str) -> list[tuple]:
        """Arguments of bdb.Breakpoint, for a line, or for each function of a name."""
        folder, (file, _, line) = self.program.folders[0], where.rpartition(":")
        modules = {path.stem: [*codes_in(self.program.code(path.stem), path.stem)] for path in folder.glob("*.py")}
        codes = modules.get(file.removeprefix(f"{folder.name}/").removesuffix(".py"))
        if codes is None or not line.isdecimal():
            if found := [(each.co_filename, each.co_firstlineno, False, None, each.co_name)
                         for codes in modules.values() for name, each in codes
                         if each.co_flags & inspect.CO_NEWLOCALS and f".{name}".endswith(f".{where}")]:  # not a class
                return found
            raise StopError(f"--stop {where}: not in {folder.name}. Write FILE:LINE, a function's name, or message:N")
        lines = {number for _, each in codes for *_, number in each.co_lines() if number}
        if int(line) not in lines:
            near = min(lines, key=lambda each: abs(each - int(line)))
            raise StopError(f"--stop {where}: this line has no code, choose another one, such as {near}")
        return [(codes[0][1].co_filename, int(line))]

    def begin(self, rank: int) -> None:  # in the thread of this rank, first of all
        debugger = self.debuggers[rank] = Debugger(self, rank)
        debugger.reset()
        debugger.botframe = sys._getframe(1)
        debugger.set_continue()
        if self.is_tracing:
            sys.settrace(debugger.trace_dispatch)

    def is_of_program(self, frame: types.FrameType) -> bool:
        return folder_of(frame.f_code.co_filename) in self.folders

    def is_on(self, rank: int) -> bool:
        return not self.is_over and self.target is None and self.rank in (None, rank)

    def before(self, event: Event) -> None:
        """Called by a rank whose next message, or its part of a collective, this is."""
        number, debugger = event.number, self.debuggers[event.rank]
        if number and self.target == (event.rank, number) or self.is_on(event.rank) and number in self.numbers:
            debugger.message(f"{'back: ' if self.target else ''}just before message {number}, {event}")
            self.target, self.came = None, self.came | {number}
            debugger.stand(outside(sys._getframe(1)))

    def stand_here(self, *args, **kwargs) -> None:
        """Stands for breakpoint() and pdb.set_trace()."""
        if self.is_on(rank := self.world.rank):
            self.debuggers[rank].stand(sys._getframe(1))

    def read(self, prompt: str = "") -> str:
        """Stands for input() in pdb. What does not come from a terminal is printed: the output reads as a session."""
        def read_line() -> str | None:
            try:
                with mock.patch.object(sys, "stdin", self.stdin):
                    line = input(prompt)
                print(end="" if self.stdin.isatty() else f"{line}\n", flush=True)
                return line
            except EOFError:
                return None
            except (AttributeError, OSError, RuntimeError, ValueError) as error:
                raise StopError(f"can't read commands ({error}): type them, or give them by a pipe or a file") from None
        if (line := self.world.ask(read_line)) is None:
            raise EOFError
        return line

    def missed(self) -> str:
        """What of `where` no rank has come to, as a sentence; empty where there is none, or where commands ended."""
        who = "no rank ever" if self.rank is None else f"rank {self.rank} never"
        names = [where for where, each in self.breakpoints.items() if not any(point.hits for point in each)]
        numbers = self.numbers - self.came | {*(self.target or ())[1:]}  # of messages; changed variables are forgotten
        last = max((event.number for event in self.world.events), default=0)
        names += [f"message:{number}, of {last}" for number in sorted(numbers)]
        return f"{who} came to {', '.join(names)}" * bool(names and not self.is_over)
