"""What an exercise's check works with: the reader's version inside of the course's modules, and ways to judge it."""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import pathlib
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from blanks import find, put_in
from lab.baton import shown
from lab.launch import ROOT, STEPS
from lab.program import Program, StepModules
from lab.ranks import run, threads
from lab.thread_ranks import World
from lab.watch.numbers import Numbers

SECONDS = 20  # that a check may take: ours take 5 at most


def folders_of(folder: str) -> tuple[pathlib.Path, ...]:
    """Where the modules of a step, of "references" or of "cluster" are."""
    if folder == "cluster":
        return ROOT / "cluster" / "planning", ROOT / "cluster" / "run", STEPS["9"]
    return (ROOT / "exercises",) if folder == "references" else (STEPS[folder],)


class Wrong(Exception):
    """The reader's version does something else than it should. The message says what, in one screen."""


class Score(NamedTuple):
    """A number that can be proved to have an optimum. Three stars are for the optimum, two for half as good."""

    what: str
    value: float
    best: float

    @property
    def stars(self) -> int:
        return 3 if self.value <= self.best * (1 + 1e-9) else 2 if self.value <= 2 * self.best else 1


class Trained(NamedTuple):
    rows: list[dict]  # as of lab.ranks.Result
    gradients: dict[int, list[dict[str, torch.Tensor]]]  # as of lab.watch.numbers.Numbers
    weights: dict[int, list[dict[str, torch.Tensor]]]
    modules: list[StepModules]
    world: World


class Attempt:
    """One check of an exercise with the reader's file `path`. `theirs` and `ours` are the step with and without it."""

    def __init__(self, exercise, path: pathlib.Path):
        folder, module, folders = exercise.folder, exercise.module, folders_of(exercise.folder)
        self.ours = Program(folder, folders=folders)
        self.place = find(self.ours.path(module), exercise.name_in_module)
        self.theirs = Program(folder, changed={module: put_in(self.place, path)}, folders=folders)
        self.scores: list[Score] = []
        self.sizes: set[int] = set()  # numbers of ranks that the check ran on
        self.module, self.name = module, exercise.name_in_module

    def function(self, source: Program | None = None, changes: tuple[int, ...] = ()):
        """The reader's function, or that of `source`, for exercises without ranks.

        It gets copies of lists and dictionaries, which it may change. Tensors stay as they are, but at `changes`.
        """
        found = getattr((source or self.theirs).load(), self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        if isinstance(found, type):
            return found
        names = [*inspect.signature(found).parameters]

        @functools.wraps(found)
        def with_copies(*args):
            given = {i: each.detach().clone() for i, each in enumerate(args)
                     if isinstance(each, torch.Tensor) and i not in changes}
            result = found(*(copy.deepcopy(each) if isinstance(each, (list, dict)) else each for each in args))
            for i, before in given.items():
                which = f"`{names[i]}`" if len(names) == len(args) else f"its argument {i + 1}"
                self.require(torch.equal(args[i], before), f"it changes {which}, which has to stay as it is")
            return result

        return with_copies

    def checked(self, function: type) -> type:
        """The same autograd Function of one tensor. Where it returns what autograd can't use, a sentence says so."""
        def forward(ctx, x):
            ctx.checked_input, y = x.detach(), function.forward(ctx, x)
            self.require(isinstance(y, torch.Tensor), f"rank {dist.get_rank()}: forward returns {shorten(y)}, and not "
                         f"a tensor{': is a return missing?' * (y is None)}")
            return y

        def backward(ctx, grad):
            given, found = grad.clone(), function.backward(ctx, grad)
            self.require(torch.equal(grad, given), f"rank {dist.get_rank()}: backward changes the tensor that it is "
                         "given. Autograd may use it elsewhere, too: work on a copy.")
            one = found[0] if isinstance(found, tuple) and len(found) == 1 else found
            self.same(one, ctx.checked_input, "what backward returns", dist.get_rank(), torch.inf)  # shape and dtype
            return found

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(function.__name__, (function,), methods)

    def world(self, size: int) -> World:
        """What runs so many ranks."""
        self.sizes.add(size)
        return World(size)

    def run(self, size: int, program: Callable[[StepModules, int], object], ours: bool = False) -> tuple[list, World]:
        """What program(modules, rank) returns on each of `size` ranks, and the world with its log of messages."""
        world, source = self.world(size), self.ours if ours else self.theirs
        return world.run(lambda rank: program(source.load(), rank), SECONDS / 2), world

    def both(self, size: int, program: Callable[[StepModules, int], object], what: str,
             tolerance: float = 1e-9) -> World:
        """Runs a program with the reader's version and with ours, and compares what it returns, rank by rank."""
        expected, _ = self.run(size, program, ours=True)
        got, world = self.run(size, program)
        for rank in range(size):
            self.same(got[rank], expected[rank], what, rank if size > 1 else None, tolerance)
        return world

    def grid(self, modules: StepModules, dp: int = 1, pp: int = 1, tp: int = 1, **sizes: int):
        """Sets up the process groups of a step, and returns its ProcessGroupManager. To be called on all ranks."""
        modules.process_group_manager.setup_process_group_manager(dp, pp, tp, **sizes)
        return modules.process_group_manager.process_group_manager

    def train(self, size: int, flags: str, ours: bool = False, prepare: Callable | None = None) -> "Trained":
        """train.py of the step, with these flags, on `size` ranks; see lab.ranks.run()."""
        program = (self.ours if ours else self.theirs).with_flags(flags.split())
        result = run(program, threads(size, self.world(size)), [numbers := Numbers()], prepare, SECONDS / 2)
        return Trained(result.rows, numbers.gradients, numbers.weights, result.modules, result.world)

    in_one_process = True  # where types are checked, see on_processes.py

    @contextlib.contextmanager
    def typed(self, axes: dict[str, int]):
        """One rank of a grid under types for collectives, see lab/watch/types.py. What it refuses is wrong."""
        try:
            from lab.rank_alone import alone
            from lab.watch.types import TypedRank, TypeRefused
        except ImportError as error:
            raise Wrong(str(error)) from None
        with alone(0, math.prod(axes.values())).joined(), TypedRank(axes) as rank:
            try:
                yield rank
            except TypeRefused as error:
                raise Wrong(rank.named(str(error))) from None

    def ranks_of(self, group) -> str:
        """The global ranks of a process group, as text."""
        return str(group and dist.get_process_group_ranks(group))

    def same(self, got, expected, what: str, rank: int | None = None, tolerance: float = 1e-9) -> None:
        """Raises Wrong where two tensors, numbers, lists or dictionaries of them differ, with the first place."""
        who = "" if rank is None else f"rank {rank}: "
        if isinstance(expected, dict):
            for key in expected:
                self.same(got.get(key), expected[key], f"{what}, {key}", rank, tolerance)
        elif isinstance(expected, (list, tuple)) and not isinstance(got, type(None)):
            if not isinstance(got, (list, tuple)) or len(got) != len(expected):
                raise Wrong(f"{who}{what}\n  expected  {shorten(expected)}\n  got       {shorten(got)}")
            for i, (one, other) in enumerate(zip(got, expected)):
                self.same(one, other, f"{what}, [{i}]", rank, tolerance)
        elif isinstance(expected, torch.Tensor):
            self.same_tensor(got, expected, who + what, tolerance)
        elif isinstance(expected, float) and isinstance(got, (int, float)):
            if not abs(got - expected) <= tolerance * max(1.0, abs(expected)):
                raise Wrong(f"{who}{what}\n  expected  {expected:.10g}\n  got       {got:.10g}{ratio(got, expected)}")
        elif got != expected:
            raise Wrong(f"{who}{what}\n  expected  {shorten(expected)}\n  got       {shorten(got)}")

    def same_tensor(self, got, expected: torch.Tensor, what: str, tolerance: float) -> None:
        if not isinstance(got, torch.Tensor):
            missing = "" if got is not None else (": is a return missing?" if "gradient of" not in what else
                                                  ": is it left out, or detached on the way to the result?")
            raise Wrong(f"{what} is {shorten(got)}, but has to be a tensor of shape {list(expected.shape)}{missing}")
        if got.shape != expected.shape:
            raise Wrong(f"{what} has shape {list(got.shape)}, but has to have {list(expected.shape)}")
        if got.dtype != expected.dtype:
            raise Wrong(f"{what} is of {got.dtype}, but has to be of {expected.dtype}")
        if not expected.numel():
            return
        error = (got.detach().double() - expected.detach().double()).abs()
        wrong = ~(error <= tolerance * expected.detach().double().abs().max().clamp(min=1.0))
        if not wrong.any():
            return
        first = tuple(wrong.nonzero()[0].tolist())
        one, other = got[first].item(), expected[first].item()
        hint = ""
        if one != one:
            hint = "\n  NaN is what a tensor holds before its message has arrived."
        where = f"element {list(first)}" if first else "it"
        raise Wrong(f"{what}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong. The first, {where}\n"
                    f"  expected  {other:.10g}\n  got       {one:.10g}{ratio(one, other)}{hint}")

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            raise Wrong(sentence)

    def messages_only(self, world: World) -> None:
        """Raises Wrong where torch's own collectives were called instead of sends and receives."""
        for event in world.events:
            self.require(event.kind in ("send", "receive", "new_group"),
                         f"rank {event.rank} calls {event.kind}: write it with sends and receives")

    def score(self, what: str, value: float, best: float) -> None:
        """Notes a number with its proved optimum. An exercise that has scores gets the stars of the worst of them."""
        self.require(value >= best * (1 - 1e-9), f"{what}: {value:g}, but {best:g} is the least that there can be. "
                     "Something is done in a way that is not counted.")
        self.scores.append(Score(what, value, best))

    def some(self, generator: Iterable, most: int, what: str) -> list:
        """A list of what a generator yields. Raises Wrong where that is more than `most`."""
        items = list(itertools.islice(generator, most + 1))
        self.require(len(items) <= most, f"{what} yields more than {most} items, the last one {items[-1]}")
        return items


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shorten(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 160 else f"{text[:150]} ... ({len(text)} characters)"


def ratio(got: float, expected: float) -> str:
    """A remark on a whole ratio, which is often a sum where a mean is meant, or the other way around."""
    for one, other, words in ((got, expected, "{:.0f} times as large"), (expected, got, "1/{:.0f} of it")):
        if other and 1.5 < (quotient := one / other) < 17 and abs(quotient - round(quotient)) < 1e-6:
            return f"   ({words.format(quotient)})"
    return ""


def describe_error(error: BaseException, path: pathlib.Path) -> str:
    """One line for an error in the reader's function, or in the course's code that works with its result."""
    rank = f"rank {error.rank}: " if hasattr(error, "rank") else ""
    said = f"{rank}{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if "NoneType" in said:
        said += "\n  None is what a function without a return gives."
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if frame.filename == str(path):
            return f"{said}\n  in {shown(path)}, line {frame.lineno}: {frame.line}"
    for frame in reversed(frames):
        if pathlib.Path(frame.filename).parent in STEPS.values():
            return (f"{said}\n  in the course's code, which calls your function or uses its result:\n"
                    f"  {shown(frame.filename)}, line {frame.lineno}: {frame.line}")
    return said
