"""Where the host waits for the device in the middle of a step, so that the device would idle meanwhile.

    waits = start(Program("8", ["--tp_size", 2]), rank=0, size=2).result().stdout

The step trains on a GPU that is not there, as one rank of any grid. Tensors on it are fake (torch's FakeTensorMode):
they have a shape and a dtype, but no data, and tensors of the host are real. FakeTensorMode itself refuses operations
whose result has a shape that depends on data. The step's code says "gpu" for "cuda": a torch without CUDA lets Python
register a device, but can't even slice a fake tensor on "cuda". A process registers one for good, so start() forks.
"""

import sys

if __name__ == "__main__":
    sys.path[0] = __file__.rpartition("/lab/")[0]  # this folder has a types.py and a numbers.py of its own

import ast
import collections
import concurrent.futures
import contextlib
import copy
import json
import os
import re
import threading
import traceback
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed._tools.fake_collectives  # noqa: F401: says what collectives of fake tensors return
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from lab.launch import start_fork
from lab.program import Edit, Program, StepModules
from lab.rank_alone import alone
from lab.ranks import run
from lab.watch import Watch

COPY, COPY_TO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
READ = torch.ops.aten._local_scalar_dense.default  # what item(), tolist(), bool(), float() and int() call
IMPORTS = ("torch.distributed._tools.fake_collectives", "torch._subclasses.fake_tensor",  # seconds
           "torch.testing._internal.distributed.fake_pg", "torch.utils.backend_registration")


class Waits(Watch, TorchDispatchMode):
    """Ends the process where the host waits in train.py's loop over steps, before its loss.item().

    `num_read` counts the values that the line with loss.item() has read, `num_copied` copies to the device that do not
    block, and `casts` how often each parameter was cast to another dtype.
    """

    places = ("alone",)
    apart = dict.fromkeys(("messages", "schedule", "numbers", "memory"),
                          "tensors on a device that is not there have no data")

    def __init__(self):
        super().__init__()
        self.num_read, self.num_copied, self.fake = 0, 0, FakeTensorMode(allow_non_fake_inputs=True)
        self.casts, self.path, self.found = collections.Counter(), "", ""  # `found`: what start() has printed

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        with contextlib.ExitStack() as self.installed:
            yield

    def begin(self, modules: StepModules, rank: int) -> None:
        text, self.path = modules._program.texts.get("train.py", ""), modules.train.main.__code__.co_filename
        if "gpu" not in modules._program.texts.get("utils.py", ""):
            raise ValueError("Waits watches a program for_gpu(), in a process of its own: call lab.watch.waits.start()")
        _setup_privateuseone_for_python_backend("gpu", Module())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device="gpu") makes it on the host and copies it
        for patch in (
                mock.patch.multiple(
                    torch.cuda, is_available=lambda: True, device_count=lambda: 1, set_device=lambda device: None,
                    get_device_name=lambda device: "Fake", is_bf16_supported=lambda including_emulation: True,
                    is_current_stream_capturing=lambda: False),  # a CUDA build would ask for a driver
                mock.patch.object(torch.Tensor, "pin_memory", pin_memory),
                mock.patch.object(torch.nn.Module, "to", lambda module, *to: module), self):  # weights are drawn there
            self.installed.enter_context(patch)
        self.log = max(number for number, line in enumerate(text.splitlines(), 1) if "loss.item()" in line)
        self.first = max(node.lineno for node in ast.walk(ast.parse(text))
                         if isinstance(node, ast.For) and node.lineno < self.log <= node.end_lineno)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0].device if operation is COPY_TO else kwargs.get("device")
        if FakeTensor not in types and (target is None or target.type != "gpu"):
            return operation(*args, **kwargs)  # on the host
        if operation is READ:
            self.num_read += self.check("reads the value of a tensor")
            return 1.0 if args[0].is_floating_point() else 1
        if operation in (COPY, COPY_TO) and target is not None:
            non_blocking = kwargs.get("non_blocking") or args[2:] == (True,)
            self.check_copy(args[operation is COPY_TO], target, non_blocking)
        if operation is COPY and isinstance(args[0], torch.nn.Parameter):
            self.casts[args[0]] += 1
        if operation is COPY and FakeTensor not in types:
            args = (self.fake.from_tensor(args[0]),)
        with self.fake:
            return operation(*args, **kwargs)

    def check(self, what: str) -> bool:
        """Ends the process in the middle of a step. Elsewhere, returns whether it is the line that logs.

        Backward on a device has a thread of its own, in which an exception would abort the process without a word. The
        main thread waits for it.
        """
        frame = sys._current_frames()[threading.main_thread().ident]
        lines = {line for caller, line in traceback.walk_stack(frame) if caller.f_code.co_filename == self.path}
        if not lines.isdisjoint(range(self.first + 1, self.log)):
            traceback.print_stack(frame)
            print(f"in the middle of a step the host {what}", file=sys.stderr, flush=True)
            os._exit(1)
        return self.log in lines

    def check_copy(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
        if source.device.type == target.type:
            return
        if target.type != "gpu":
            self.check("waits for a copy from the device")
        elif not getattr(source, "in_pinned_memory", False):
            self.check("waits for a copy to the device, from memory that is not pinned")
        elif not non_blocking:
            self.check("waits for a copy to the device, without non_blocking=True")
        else:
            self.num_copied += 1

    def __str__(self) -> str:
        return self.found or f"read {self.num_read}, copied {self.num_copied}, cast {sorted(set(self.casts.values()))}"


class Module(_DummyBackendModule):
    """torch.gpu."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def pin_memory(tensor: torch.Tensor, device=None) -> torch.Tensor:
    tensor.in_pinned_memory = True
    return tensor


def for_gpu(program: Program) -> Program:
    """The program, in which the GPU is called "gpu"."""
    other, texts = copy.copy(program), {path.name: path.read_text() for path in program.folders[0].glob("*.py")}
    other.texts = {name: re.sub(r'"cuda"|\.is_cuda', lambda word: word[0].replace("cuda", "gpu"), text)
                   for name, text in {**texts, **program.texts}.items()}
    other.changed = {name.removesuffix(".py"): other.compiled(name) for name in other.texts}
    return other


def start(program: Program, rank: int, size: int, **options) -> concurrent.futures.Future:
    """Two optimizer steps in a process of its own, with the options of fork(): what that returns, as a future."""
    return start_fork(program.step, 1, program.step, rank, size, json.dumps(program.edits), *program.flags,
                      script=__file__, modules=IMPORTS, **options)


def main() -> None:
    step, rank, size, edits, *flags = sys.argv[1:]
    flags = ["--device", "auto", "--dtype", "auto", *flags]
    program = Program(step, flags, [Edit(*each) for each in json.loads(edits)])
    run(for_gpu(program), alone(int(rank), int(size), 1, steps=2), [waits := Waits()])
    print(waits)


if __name__ == "__main__":
    main()
