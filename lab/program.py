"""The modules of a step, imported once for each rank of a world in one process (thread_ranks.py), maybe with changes.

The modules of a step share one global grid, so each rank needs modules of its own:

    source = StepSource("8")
    ranks = [source.load() for _ in range(2)]
    ranks[1].pipeline_parallel.PipelineParallel  # not that of ranks[0]

train() runs a step's train.py on all ranks. The files stay as they are: `changed` gives other code for some modules.
"""

import builtins
import functools
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lab.launch import ROOT, STEPS
from lab.thread_ranks import World

SMALL = ("--model_name", str(ROOT / "assets" / "tiny_llama"), "--num_hidden_layers", "4", "--seq_len", "16",
         "--micro_batch_size", "1", "--dtype", "float64", "--device", "cpu")


@functools.cache
def compile_file(path: pathlib.Path) -> types.CodeType:
    return compile(path.read_bytes(), path, "exec")


class StepSource:
    """The modules in `folders`, by default that of step `step`. The code in `changed` takes the place of a file's."""

    def __init__(self, step: int | str, changed: dict[str, types.CodeType] | None = None,
                 folders: tuple[pathlib.Path, ...] = ()):
        self.folders, self.changed = folders or (STEPS[str(step)],), changed or {}

    def load(self) -> "StepModules":
        return StepModules(self)

    def path(self, name: str) -> pathlib.Path | None:
        """The file of the module `name`, None where there is no such module."""
        return next((path for folder in self.folders if (path := folder / f"{name}.py").is_file()), None)

    def code(self, name: str) -> types.CodeType:
        return self.changed.get(name) or compile_file(self.path(name))


class StepModules:
    """One rank's modules of a step: `modules.model` imports model.py, and what that imports, at its first use."""

    def __init__(self, source: StepSource):
        self._source, self._loaded = source, {}
        self._builtins = {**vars(builtins), "__import__": self._import, "print": self._print}

    def __getattr__(self, name: str) -> types.ModuleType:
        if name.startswith("_") or self._source.path(name) is None:
            raise AttributeError(f"there is no {name}.py in {self._source.folders[0].name}")
        if name not in self._loaded:
            module = self._loaded[name] = types.ModuleType(name)
            module.__file__, module.__builtins__ = str(self._source.path(name)), self._builtins
            exec(self._source.code(name), vars(module))
            if name == "process_group_manager":  # ranks of this process share one count of groups: there is no other
                module.require_equal_counts = lambda: None
        return self._loaded[name]

    def _print(self, *args, **kwargs) -> None:
        """What a step itself prints is dropped, such as the grid of its ranks."""
        if pathlib.Path(sys._getframe(1).f_code.co_filename).parent not in self._source.folders:
            print(*args, **kwargs)

    def _import(self, name: str, *args, **kwargs):
        return builtins.__import__(name, *args, **kwargs) if self._source.path(name) is None else getattr(self, name)


class Training(NamedTuple):
    rows: list[dict]  # metrics.jsonl: one for each optimizer step
    gradients: list[list[dict[str, torch.Tensor]]]  # by rank and step, what the optimizer saw, by the parameter's name
    weights: list[list[dict[str, torch.Tensor]]]  # by rank and step, after the optimizer's step
    modules: list[StepModules]  # by rank
    world: World


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


def train(source: StepSource, size: int, flags: Sequence, prepare: Callable | None = None,
          world: World | None = None, timeout: float = 60) -> Training:
    """Runs train.py of a step on `size` ranks in this process, on random samples and a small model, in float64.

    `flags` come after SMALL, so they override it. prepare(modules, rank) is called on each rank before main(). `world`
    runs the ranks, a new World by default, for `timeout` seconds at most. Raises what a rank raises, SystemExit among
    it for a flag that train.py refuses.
    """
    world, modules = world or World(size), [source.load() for _ in range(size)]
    gradients, weights, hooks = [[] for _ in range(size)], [[] for _ in range(size)], []
    register_hook = torch.Tensor.register_post_accumulate_grad_hook

    def keep_hook(param: torch.Tensor, hook: Callable) -> RemovableHandle:
        hooks.append(register_hook(param, hook))
        return hooks[-1]

    def note(records: list, what: str, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        records[dist.get_rank()].append({name.removeprefix("module."): getattr(param, what).detach().clone()
                                         for name, param in zip(group["param_names"], group["params"])
                                         if getattr(param, what) is not None})

    def program(rank: int) -> tuple[list, list, list]:
        modules[rank].train.load_samples = random_samples
        if prepare:
            prepare(modules[rank], rank)
        modules[rank].train.main()
        is_logging_rank = modules[rank].process_group_manager.process_group_manager.is_logging_rank
        rows = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines() if is_logging_rank else []
        return rows, gradients[rank], weights[rank]

    before = register_optimizer_step_pre_hook(lambda optimizer, *_: note(gradients, "grad", optimizer))
    after = register_optimizer_step_post_hook(lambda optimizer, *_: note(weights, "data", optimizer))
    try:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(
                torch.Tensor, "register_post_accumulate_grad_hook", keep_hook), mock.patch.object(
                sys, "argv", ["train.py", *SMALL, *map(str, flags), "--log_dir", folder, "--run_name", "run"]):
            rows, gradients, weights = zip(*world.run(program, timeout))
    finally:
        before.remove()
        after.remove()
        for hook in hooks:  # it refers to a wrapper that has the parameter, through C++, where Python finds no cycle
            hook.remove()
    return Training([json.loads(line) for line in sum(rows, [])], [*gradients], [*weights], modules, world)
