"""Trains on a GPU that is not there, and fails where the host would wait for it in the middle of a step.

    python fake_gpu.py RANK WORLD_SIZE FOLDER/train.py flags...

The modules are copies that say "gpu" for "cuda", see copy_for_fake_gpu() in test_all_steps_no_sync.py: a torch without
CUDA lets Python register a device, but can't even slice a fake tensor on "cuda". Tensors on "gpu" are fake (torch's
FakeTensorMode): they have a shape and a dtype, but no data. Tensors of the host are real. Collectives and messages do
nothing, so one process can be any rank of any grid. FakeTensorMode itself refuses operations whose result has a shape
that depends on data.
"""

import ast
import collections
import importlib
import os
import pathlib
import sys
import threading
import traceback
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401: says what collectives of fake tensors return
import torch.testing._internal.distributed.fake_pg  # noqa: F401: the backend "fake"
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

COPY, COPY_TO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
READ = torch.ops.aten._local_scalar_dense.default  # what item(), tolist(), bool(), float() and int() call


class Watch(TorchDispatchMode):
    """Ends the process where the host waits in the loop over steps of the module at `path`, before its loss.item().

    `num_read` counts the values that the line with loss.item() has read, `num_copied` copies to the device that do not
    block, and `casts` how often each parameter was cast to another dtype.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path, self.num_read, self.num_copied, self.fake = path, 0, 0, FakeTensorMode(allow_non_fake_inputs=True)
        self.casts = collections.Counter()
        text = pathlib.Path(path).read_text()
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


class Module(_DummyBackendModule):
    """torch.gpu."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def pin_memory(tensor: torch.Tensor, device=None) -> torch.Tensor:
    tensor.in_pinned_memory = True
    return tensor


def all_gather_object(everyone: list, mine, group=None) -> None:
    everyone[:] = [mine] * len(everyone)


def one_by_one(operations: list) -> list:
    """A stand-in for dist.batch_isend_irecv, which would ask for the backend of the device."""
    return [operation.op(operation.tensor, operation.peer, operation.group) for operation in operations]


def join(rank: int, world_size: int):
    """A stand-in for dist.init_process_group."""
    init_process_group = dist.init_process_group
    return lambda backend, **options: init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)


def new_group(make=dist.new_group):
    """A stand-in for dist.new_group: what has a backend of its own, gloo, would look for the other ranks."""
    return lambda *args, backend=None, **options: make(*args, **options)


def main() -> None:
    rank, world_size, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv = sys.argv[3:]
    sys.path.insert(0, os.path.dirname(script))
    _setup_privateuseone_for_python_backend("gpu", Module())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device="gpu") makes it on the host and copies it
    del os.environ["RANK"]  # so that nobody looks for the other ranks
    fakes = [(dist, {"get_backend": lambda group=None: "nccl", "init_process_group": join(rank, world_size),
                     "all_gather_object": all_gather_object, "new_group": new_group(),
                     "monitored_barrier": lambda group, timeout: None, "batch_isend_irecv": one_by_one}),
             (dist.distributed_c10d, {"_get_default_store": dist.HashStore}),
             (torch.cuda, {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None,
                          "get_device_name": lambda device: "Fake",
                          "is_bf16_supported": lambda including_emulation: True,
                          "is_current_stream_capturing": lambda: False}),  # a CUDA build would ask for a driver
             (torch.Tensor, {"pin_memory": pin_memory}),
             (torch.nn.Module, {"to": lambda module, *to: module})]  # weights are drawn where they have to be
    for place, functions in fakes:
        mock.patch.multiple(place, **functions).start()
    program = importlib.import_module(pathlib.Path(script).stem)
    with Watch(script) as watch:
        program.main()
    print(f"read {watch.num_read}, copied {watch.num_copied}, cast {sorted(set(watch.casts.values()))}")


if __name__ == "__main__":
    main()
