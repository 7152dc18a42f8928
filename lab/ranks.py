"""Where a program runs, and what watches it.

    messages, numbers = Messages(), Numbers()
    result = run(Program("8", ["--pp_size", 4]), threads(4), [messages, numbers])

threads(n) are ranks of this process, which take turns (thread_ranks.py), and train on random samples. processes(n) are
processes that communicate over gloo, and read the corpus. Both train a small model, in float64; flags of the program
come after SMALL, so they override it.
"""

import contextlib
import json
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch.utils.hooks import RemovableHandle

from lab.launch import ROOT, fork, metrics
from lab.program import Program
from lab.results import Result
from lab.stop import Stop
from lab.thread_ranks import World
from lab.watch import Watch

SMALL = ("--model_name", str(ROOT / "assets" / "tiny_llama"), "--num_hidden_layers", "4", "--seq_len", "16",
         "--micro_batch_size", "1", "--dtype", "float64", "--device", "cpu")


class RandomSamples(torch.utils.data.Dataset):
    """Stands for a corpus: sample i is always the same random tokens. `period`: so many samples, again and again."""

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int, first: int = 0, period: int | None = None):
        self.seq_len, self.vocab_size, self.num_samples = seq_len, vocab_size, num_samples
        self.first, self.period = first, period or num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> torch.Tensor:  # (T + 1,)
        generator = torch.Generator().manual_seed(self.first + i % self.period)
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)


def random_samples(dataset_name, model_name, seq_len: int, vocab_size: int, num_samples: int, cache_dir,
                   held_out: int = 0) -> list[RandomSamples]:
    """In place of load_samples(), with its arguments."""
    samples = RandomSamples(seq_len, vocab_size, num_samples)
    return [samples, RandomSamples(seq_len, vocab_size, num_samples, num_samples, held_out)][: 1 + (held_out > 0)]


class threads:  # noqa: N801  it reads as the function that it is
    """So many ranks of this process. `world` runs them, a new World by default. They stand where `stop` says."""

    kind = "threads"

    def __init__(self, size: int, world: World | None = None, stop: Stop | None = None):
        self.size, self.world, self.stop = size, world or World(size), stop

    def run(self, program: Program, watches: list[Watch], prepare: Callable | None, timeout: float) -> Result:
        modules = [program.load() for _ in range(self.size)]

        def main(rank: int) -> list[str]:
            own = modules[rank]
            if self.stop:
                self.stop.begin(rank)
            for watch in watches:
                watch.begin(own, rank)
            own.train.load_samples = random_samples
            if prepare:
                prepare(own, rank)
            own.train.main()
            for watch in watches:
                watch.end(own, rank)
            is_logging_rank = own.process_group_manager.process_group_manager.is_logging_rank
            return pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines() if is_logging_rank else []

        with tempfile.TemporaryDirectory() as folder, forgetting_hooks(), mock.patch.object(
                sys, "argv", ["train.py", *SMALL, *program.flags, "--log_dir", folder, "--run_name", "run"]):
            rows = self.world.run(main, timeout)
        return Result([json.loads(line) for line in sum(rows or [], [])], modules, self.world, watches)


class processes:  # noqa: N801
    """So many processes, forked from one that has imported torch and `modules` (lab/launch.py). A program that is not a
    step's is as large as its flags say. With a --log_dir of its own, what is logged is there alone."""

    kind = "processes"

    def __init__(self, size: int, modules: Sequence[str] = ()):
        self.size, self.modules = size, modules

    def run(self, program: Program, watches: list[Watch], prepare: Callable | None, timeout: float) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            flags = [*(SMALL if program.step else ()), "--log_dir", folder, "--run_name", "run", *program.flags]
            with open(pathlib.Path(folder, "watches"), "wb") as file:
                pickle.dump([str(ROOT), *sys.path], file)
                pickle.dump((self, watches, prepare), file)
            fork(program.step, self.size, folder, program.script(pathlib.Path(folder)), *flags, modules=self.modules,
                 script=ROOT / "lab" / "rank_process.py", timeout=3 * timeout)  # they have to start, and share cores
            for rank in range(self.size):
                found = torch.load(pathlib.Path(folder, f"rank{rank}.pt"), weights_only=False)
                for watch, findings in zip(watches, found):
                    for name, finding in findings.items():
                        getattr(watch, name)[rank] = finding
            rows = metrics(folder, "run") if pathlib.Path(folder, "run").is_dir() else []
            return Result(rows, [], None, watches)


@contextlib.contextmanager
def forgetting_hooks() -> Iterator[None]:
    """A parameter's hook refers to a wrapper that has the parameter, through C++, where Python finds no cycle: hooks
    that are registered inside of the block are removed after it."""
    hooks, register_hook = [], torch.Tensor.register_post_accumulate_grad_hook

    def keep_hook(param: torch.Tensor, hook: Callable) -> RemovableHandle:
        hooks.append(register_hook(param, hook))
        return hooks[-1]

    try:
        with mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", keep_hook):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def run(program: Program, ranks, watches: Sequence[Watch] = (), prepare: Callable | None = None,
        timeout: float = 60) -> Result:
    """Runs train.py of the program. prepare(modules, rank) is called on each rank before main().

    Raises what a rank raises, SystemExit among it for a flag that train.py refuses, and ValueError as check() does.
    """
    check(ranks, watches)

    def once() -> Result:
        with contextlib.ExitStack() as stack:
            for watch in watches if ranks.kind != "processes" else ():  # there, each process does it
                stack.enter_context(watch.around(ranks))
            return ranks.run(program, [*watches], prepare, timeout)

    stop = getattr(ranks, "stop", None)
    return stop.run(once, program, ranks, watches) if stop else once()


def check(ranks, watches: Sequence[Watch]) -> None:
    """Raises ValueError for watches that make no sense on these ranks, or not together."""
    names = [watch.name for watch in watches]
    for watch in watches:
        if ranks.kind not in watch.places:
            raise ValueError(f"{watch.name} can't watch {ranks.kind}: choose {' or '.join(watch.places)}")
        for other in watch.apart.keys() & {*names}:
            raise ValueError(f"{watch.name} and {other} can't watch together: {watch.apart[other]}. Leave one out")
