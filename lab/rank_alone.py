"""One rank alone, of any number of ranks: a step's train.py runs on it until its first optimizer step is over.

    run(Program("8", ["--pp_size", 4]), alone(2, 4))

torch's "fake" process group says how many ranks there are: groups are real, what a rank sends or receives is done at
once, and nothing arrives. Tensors have numbers, unless a watch takes them away: DryRun all, Waits those of the device.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

try:
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: F401: for those without numbers
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:  # torch does not promise to keep them
    sys.exit(f"error: torch {torch.__version__} has not what a rank alone needs ({error}): use that of constraints.txt")

from lab.program import Program
from lab.ranks import SMALL, Result, forgetting_hooks, random_samples
from lab.watch import Watch


class EndOfStep(Exception):
    """The optimizer step is over, or what is watched of it."""


class CountedStore(dist.Store):
    """Stands for the store of torchrun, to which all other ranks have come before, with the same flags."""

    def __init__(self):
        super().__init__()
        self.operations, self.values = 0, {"flags": "{}", "difference": ""}

    def set(self, key: str, value: str) -> None:
        self.operations += 1
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.operations += 1
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.operations += 1
        return 0  # another rank is the last one


class Logger:
    """In place of a step's RunLogger. `left`: optimizer steps that are to come."""

    left = 1

    def __init__(self, args, grid, num_steps: int, tokens_per_step: int):
        self.num_steps = num_steps

    def log(self, *args, **more) -> None:
        self.left -= 1
        if self.left == 0:
            raise EndOfStep


class alone:  # noqa: N801  it reads as the function that it is
    """Rank `rank` of `size`, of which `per_machine` are in a machine, for `steps` optimizer steps. Flags of the program
    come after those in `first`. Before step 3 samples are a step's own, and step 1 ends by itself."""

    kind = "alone"

    def __init__(self, rank: int, size: int, per_machine: int = 8, steps: int = 1, first: tuple[str, ...] = SMALL):
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} of {size}: choose one of 0 to {size - 1}")
        self.rank, self.size, self.steps, self.first, self.store = rank, size, steps, first, CountedStore()
        self.environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_machine),
                            "LOCAL_WORLD_SIZE": str(min(per_machine, size))}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Inside of the block init_process_group() joins this rank alone, once."""
        join, new_group, backend = dist.init_process_group, dist.new_group, ["gloo"]

        def init(name: str, **options) -> None:
            backend[0] = name
            if not dist.is_initialized():
                join("fake", store=FakeStore(), rank=self.rank, world_size=self.size)

        with mock.patch.dict(os.environ, self.environment), mock.patch("sys.excepthook"):  # torch replaces the latter
            try:
                with mock.patch.multiple(
                        dist, rendezvous=lambda *args, **options: iter([(self.store, self.rank, self.size)]),
                        init_process_group=init, get_backend=lambda group=None: backend[0],
                        new_group=lambda *args, **options: new_group(*args, **{**options, "backend": "fake"}),
                        P2POp=lambda call, tensor, peer=None, group=None, tag=0, group_peer=None: (
                            lambda: call(tensor, peer, group, tag, group_peer)),  # torch's asks the device's backend
                        batch_isend_irecv=lambda operations: [operation() for operation in operations],
                        barrier=lambda *args, **options: None, monitored_barrier=lambda *args, **options: None,
                        all_gather_object=lambda objects, value, group=None: objects.__setitem__(
                            slice(None), [value] * len(objects))):
                    yield
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def run(self, program: Program, watches: list[Watch], prepare: Callable | None, timeout: float) -> Result:
        modules = program.load()
        with self.joined(), forgetting_hooks(), mock.patch.object(
                sys, "argv", ["train.py", *self.first, *program.flags]):
            if hasattr(modules, "dataloader"):  # train.py is not imported yet, and imports these
                modules.dataloader.load_samples = random_samples
            if hasattr(modules, "metrics"):
                modules.metrics.RunLogger = type("RunLogger", (Logger,), {"left": self.steps})
            for watch in watches:
                watch.begin(modules, self.rank)
            if prepare:
                prepare(modules, self.rank)
            with contextlib.suppress(EndOfStep):
                modules.train.main()
            for watch in watches:
                watch.end(modules, self.rank)
        return Result([], [modules], None, watches)
