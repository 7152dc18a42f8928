"""One rank of a step's train.py, alone and without numbers: what it holds, sends and computes. See memory.py.

    rank = run_rank(script, flags, 16384, 8191, 8, seconds_of, True, {})
    rank.count.peak, rank.schedule(0, 4, 8), rank.kinds()
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lab.program import Program, StepModules
from lab.rank_alone import EndOfStep, FakeTensor, alone
from lab.ranks import run
from lab.watch.held import Phases
from lab.watch.memory import Communication, Count, NormOfCuda


class DryRun(Phases):
    """Counts one optimizer step of a rank that is alone, and takes its numbers away. `agree`(a number of this rank) is
    the largest of all ranks.

    `schedule`(stage, stages, micro-batches) are the actions of any stage, `microbatches` those of the rank's pipeline,
    `tokens` those of all ranks, `parameters` the rank's own.
    """

    places = ("alone",)
    apart = {"types": "without numbers, nothing is typed", "memory": "it counts memory already",
             "waits": "without numbers, nobody waits for them"}

    def __init__(self, seconds_of: Callable = lambda *_: 0.0, is_gpu: bool = False, agree: Callable | None = None):
        super().__init__()
        self.count, self.agree, self.optimizers = Count(seconds_of, is_gpu), agree, []
        self.schedule, self.steps_left = None, 1

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        self.store, self._counts[ranks.rank] = ranks.store, self.count
        with (mock.patch.multiple(dist, **Communication(self.count, self.axis_of, self.agree).patches()),
              without_devices(self.count), super().around(ranks), self.count):
            yield

    @property
    def grid(self):
        return self.modules.process_group_manager.process_group_manager

    def pipeline(self) -> list[int]:
        """The ranks of the stages of this rank's pipeline."""
        if isinstance(self.grid.ranks, list):  # step 9
            return self.grid.ranks[self.grid.dp_rank][:, self.grid.tp_rank].tolist()
        dp, _, *others = (self.grid.ranks == self.grid.global_rank).nonzero()[0].tolist()
        return self.grid.ranks[(dp, slice(None), *others)].tolist()

    def kinds(self) -> list[int]:
        """Ranks that are unlike: of its pipeline the first, the second and the last stage, as those between are like
        the second one. With --pipelines each stage of all."""
        if getattr(self.args, "pipelines", None):
            return [rank for block in self.grid.ranks for rank in block[:, self.grid.tp_rank].tolist()]
        stages = self.pipeline()
        return sorted({*stages[:2], stages[-1]})

    def axis_of(self, group) -> str:
        for name, value in vars(self.grid).items():
            several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
            if name.endswith("_group") and value is group:
                return name.split("_")[1 if name.startswith("cp_dp") else 0]
            if group is not None and any(each is group for each in several):
                return "dp"
        return "all"

    def begin(self, modules: StepModules, rank: int) -> None:
        super().begin(modules, rank)
        self.modules = modules
        modules.utils.choose_device, modules.utils.make_scheduler = self.choose_device, self.make_scheduler
        modules.model.init_weights = self.init_weights
        modules.metrics.RunLogger.log = lambda logger, *args, **more: self.end_step()
        self.wrap(modules.utils, "load_config", lambda config: setattr(self, "config", config))
        with contextlib.suppress(AttributeError):
            run = modules.pipeline_parallel.run_schedule
            modules.pipeline_parallel.run_schedule = lambda schedule, *args: run(
                self.note_schedule(schedule), *args)
        self.wrap(modules.train, "parse_args", self.limit)

    def end(self, modules: StepModules, rank: int) -> None:
        self.microbatches, self.store_operations = self.microbatches[self.grid.dp_rank], self.store.operations

    def wrap(self, module: types.ModuleType, name: str, after: Callable) -> None:
        """after(result) is called after the function."""
        function = getattr(module, name)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            after(result)
            return result

        setattr(module, name, call)

    def limit(self, args) -> None:
        """One step. Two, of which the second one counts, where an optimizer's averages are only made in its step."""
        self.args, self.steps_left = args, 1 + (getattr(args, "optimizer", "adamw") != "adamw")
        pipelines = len(getattr(args, "pipelines", None) or []) or getattr(args, "dp_size", 1)
        self.microbatches = getattr(args, "num_microbatches", None) or [args.gradient_accumulation_steps] * pipelines
        self.tokens = args.micro_batch_size * sum(self.microbatches) * args.seq_len
        if args.max_tokens >= self.tokens or not any(word.split("=")[0] == "--max_tokens" for word in sys.argv):
            args.max_tokens = self.steps_left * self.tokens
        args.profile_batch = args.num_workers = args.eval_every = 0
        for name, value in (("compile", False), ("steps", 1), ("local_steps", 1)):
            if getattr(args, name, None):
                setattr(args, name, value)
        if hasattr(args, "pipelines"):
            args.steps = self.steps_left

    def choose_device(self, device: str, dtype: str) -> tuple[torch.device, torch.dtype, str]:
        is_gpu = self.count.is_gpu = self.count.is_gpu if device == "auto" else device == "cuda"
        self.dtype = getattr(torch, dtype if dtype != "auto" else "bfloat16" if is_gpu else "float32")
        return torch.device("cpu"), self.dtype, "nccl" if is_gpu else "gloo"

    def init_weights(self, model: torch.nn.Module, *args) -> None:
        self.count.is_fake = True
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        for name, param in list(model.named_parameters()):
            module, _, key = name.rpartition(".")
            own = torch.nn.Parameter(torch.empty(param.shape, dtype=dtype))
            own.register_post_accumulate_grad_hook(lambda param: self.count.label(param.grad, "gradients"))
            setattr(model.get_submodule(module), key, own)
        model.tie_weights()
        self.count.params = list(model.parameters())
        self.parameters = sum(param.numel() for param in self.count.params)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, *args):
        """Its averages are made now. Counting begins."""
        if isinstance(optimizer, torch.optim.AdamW):
            if not self.optimizers:
                self.count.snapshot("model")
            self.count.default = "optimizer"
            params = [param for group in optimizer.param_groups for param in group["params"]]
            for param in params:
                param.grad = torch.empty_like(param)
            optimizer.step()
            for param in params:
                param.grad = None
            self.count.params += params
        self.optimizers.append(optimizer)
        self.count.start()
        return types.SimpleNamespace(get_last_lr=lambda: [0.0], step=lambda: None)

    def end_step(self) -> None:
        self.count.snapshot("after the step")
        self.steps_left -= 1
        if self.steps_left == 0:
            raise EndOfStep
        self.count.start()

    def note_schedule(self, schedule: Callable) -> Callable:
        def actions(*sizes: int) -> list:
            with mock.patch.object(self.count, "is_fake", False):  # a schedule's numbers are real
                return list(schedule(*sizes))

        self.schedule = actions
        return actions


def prepare_model(flags: list[str], folder: str, presets: dict) -> list[str]:
    """Instead of the name of a model of data_sheets.py, a folder with a config.json of its sizes."""
    for i, word in enumerate(flags):
        flag, _, value = word.partition("=")
        name = value or "".join(flags[i + 1 : i + 2])
        if flag == "--model_name" and name in presets and not os.path.isdir(name):
            pathlib.Path(folder, "config.json").write_text(json.dumps(presets[name].config()))
            return [*flags[:i], f"{flag}={folder}", *flags[i + 2 - bool(value) :]]
    return flags


@contextlib.contextmanager
def without_devices(count: Count) -> Iterator[None]:
    """Inside of the block there is no device but the CPU, whatever tensors say of themselves."""
    norm, move, move_module, make = F.rms_norm, torch.Tensor.to, torch.nn.Module.to, torch.tensor

    def rms_norm(x, shape, weight=None, eps=None):
        return NormOfCuda.apply(x, weight) if count.is_gpu else norm(x, shape, weight, eps)

    with (mock.patch.object(F, "rms_norm", rms_norm), mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
          mock.patch.object(torch, "tensor", lambda data, device=None, **options: make(data, **options)),
          mock.patch.object(torch.Tensor, "to", lambda tensor, *args, **options: move(
              tensor, *("cpu" if each == "cuda" else each for each in args), **options)),
          mock.patch.object(torch.nn.Module, "to", lambda module, *args, **options: (
              module if count.is_fake else move_module(module, *args, **options))),
          mock.patch.object(FakeTensor, "is_cuda", property(lambda tensor: count.is_gpu), create=True)):
        yield


@functools.cache
def largest_bucket(script: pathlib.Path, flags: tuple[str, ...], world: int, is_gpu: bool, presets: tuple) -> int:
    """On the bytes of a bucket the ranks of step 9 agree, by the one with most parameters: one of each kind runs up to
    there."""
    found: list[int] = []

    def note(own: int) -> None:
        found.append(own)
        raise EndOfStep

    def begin(rank: int) -> DryRun:
        return run_rank(script, [*flags], world, rank, 8, lambda *_: 0.0, is_gpu, dict(presets), note)

    for rank in begin(0).kinds():
        begin(rank)
    return max(found)


def run_rank(script: pathlib.Path, flags: list[str], world: int, rank: int, per_machine: int, seconds_of: Callable,
             is_gpu: bool, presets: dict, agree: Callable[[int], int] | None = None) -> DryRun:
    """One optimizer step of one rank. Raises what the step raises, its UserError among it."""
    if agree is None and (script.parent / "heterogeneous_parallel_plugin.py").is_file():
        largest = largest_bucket(script, (*flags,), world, is_gpu, (*presets.items(),))
        agree = lambda own: largest  # noqa: E731
    dry = DryRun(seconds_of, is_gpu, agree)
    with tempfile.TemporaryDirectory() as folder:
        program = Program("", prepare_model(flags, folder, presets), folders=(script.parent,))
        run(program, alone(rank, world, per_machine, first=()), [dry])
    return dry
