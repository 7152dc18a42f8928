"""A row of the scoreboard, and what its runs have in common: batches, the loop, and what is recorded of a step.

A recipe module, `of_LIBRARY.py`, imports nothing of its library at the top, so that rows can be listed without it. It
has NEEDS (what pip installs), ROWS, and perhaps `prepare()`, which a process calls once, before it starts ranks.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable

STEPS, SAMPLES, LENGTH, VOCABULARY = 3, 8, 12, 64
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)(?=\.)")


@dataclasses.dataclass(frozen=True)
class Row:
    """`run(row, folder)` trains in each rank and, in one process, is the trusted run. `data` is by how many ranks the
    samples are divided. `patch` names what of the library is replaced so that it runs here."""
    library: str
    model: str
    parallelism: str
    run: Callable
    micro_batches: int = 1
    ranks: int = 2
    data: int = 1
    dtype: str = "float64"
    patch: str = ""
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        batches = f" m{self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.model} {self.parallelism}{batches}".replace(" ", "-")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def factor() -> float:
    """By which the gradients of ranks are too large: 1, unless a test asks for another with FACTOR."""
    return float(os.environ.get("FACTOR", 1)) if world() > 1 else 1.0


def join():
    """Ranks meet over gloo; one process is a group of one where a library asks for it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")


def tokens(step: int):
    """(SAMPLES, LENGTH) token ids, the same in each process."""
    import torch

    return torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def micro_batches(row: Row, step: int, data_rank: int = 0) -> list:
    """Of a rank or, in one process, of all ranks, one after the other."""
    shares = range(row.data) if world() == 1 else [data_rank]
    return [part for share in shares for part in tokens(step)[share :: row.data].chunk(row.micro_batches)]


def shake(model):
    """Every parameter random, norms and biases, too: no gradient is then zero by chance of the initial values."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, dtype=torch.float64).to(param.dtype), alpha=0.05)
    return model


class Watch:
    """Records steps for same_numbers and, without it, whole gradients and weights for a comparison in plain torch."""

    def __init__(self, model, optimizer, folder: pathlib.Path, full: Callable | None = None,
                 whole_name: Callable[[str], str] = str, recorder=None, **options):
        import same_numbers

        self.model, self.folder, self.full, self.count = model, folder, full or whole, 0
        self.recorder = recorder or same_numbers.Recorder(model, optimizer, folder, **options)
        self.whole_name = whole_name

    def step(self, **numbers):
        self.keep({name: self.full(param, param.grad) for name, param in self.named()})
        self.recorder.step(**numbers)

    def named(self):
        for model in self.model if isinstance(self.model, (list, tuple)) else [self.model]:
            for name, param in model.named_parameters():
                yield self.whole_name(name), param

    def keep(self, found: dict):
        import torch

        self.count += 1
        (self.folder / "plain").mkdir(parents=True, exist_ok=True)
        found = {WRAPPERS.sub("", name).lstrip("."): each for name, each in found.items() if each is not None}
        torch.save(found, self.folder / "plain" / f"{rank()}_{self.count}.pt")

    def close(self):
        self.recorder.close()


def whole(param, numbers):
    """The whole of a gradient: all ranks call it for all parameters in the same order."""
    if numbers is None:
        return None
    numbers = numbers.detach()
    return (numbers.full_tensor() if hasattr(numbers, "full_tensor") else numbers).clone()


def loop(row: Row, model, folder: pathlib.Path, loss_of: Callable, *, data_rank: int = 0, optimizer=None,
         backward=None, update=None, before=None, clip=None, **options):
    """STEPS steps of AdamW over `micro_batches`. `before(i, is_last)` is called before each forward."""
    import torch

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    watch = Watch(model, optimizer, folder, **options)
    for step in range(STEPS):
        total, parts = 0.0, micro_batches(row, step, data_rank)
        for i, ids in enumerate(parts):
            if before:
                before(i, i == len(parts) - 1)
            loss = loss_of(model, ids)
            (backward or torch.Tensor.backward)(loss * factor() / len(parts))
            total += float(loss.detach()) / len(parts)
        norm = clip(model) if clip else None
        watch.step(loss=total, norm=norm)
        (update or optimizer.step)()
        optimizer.zero_grad()
    watch.close()
