"""Checkpoints: what was trained so far, in files that any topology can read, and that Hugging Face can read as well.

    checkpoint_dir/run_name/
        step_00000120/              see files.py
        step_00000160.unfinished/   being written: nothing reads it, and the next run removes it
        latest                      the name of the newest whole checkpoint

A save stops the training only while the weights and the optimizer's state are copied to the host's memory. A thread
writes them meanwhile. Where a rank has no memory for copies, none are made, and all wait until the state is written.
Pipeline 0 holds each parameter of the model, so its ranks write: one file a stage, whose first tensor-parallel rank
puts together what its group holds. A checkpoint gets its name, and then `latest` is moved, when all files of all ranks
are on the disk. Where hosts share no disk, each keeps what it wrote, and one more has a copy: the host on which the run
was started, which so has each checkpoint as a whole, and for its own files another one.
"""

import contextlib
import copy
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.files import (
    ADAPTER, ADAPTER_CONFIG, KINDS, STATE, TensorFile, copy_into_one, forget_older, merge, name_of_step, set_latest,
    write_small, write_state,
)
from models.names import as_files_have_it, name_function, trained_alone
from ranks.disks import Disks
from ranks.files import sync_folder
from ranks.lost import FOREVER
from ranks.memory import USABLE_MEMORY, free_memory, memory_of_process
from ranks.placement import is_home, machines
from utils import UserError

WRITER = "checkpoint"  # the name of the thread that writes
CPU = torch.device("cpu")


class Shard(NamedTuple):
    """A tensor that this rank holds, or its part of one: along `dim`, in each of `fused` matrices side by side.

    `kind`: of the file that it is for, one of KINDS.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    dim: int | None = None
    fused: int = 1


class Checkpointer:
    """Writes checkpoints of one run into the folder of `disks`. All ranks make one together, and call save() for the
    same steps.

    `model`, `optimizer`: what plugin.configure returned. `describe(step)`: what state.json says besides. `small`: the
    content of config.json and the tokenizer's files, by name.
    """

    def __init__(self, disks: Disks, model, optimizer: torch.optim.Optimizer, scheduler,
                 describe: Callable, small: dict[str, bytes], keep: int = 2):
        self.folder, self.disks, self.stage = disks.folder, disks, model.module
        self.optimizer, self.scheduler = optimizer, scheduler
        self.describe, self.small, self.keep = describe, small, keep
        grid = self.grid = pgm.process_group_manager
        rows = [row for block in grid.ranks for row in block.tolist()]
        self.tp_group = None
        if grid.tp_world_size > 1:
            self.tp_group, _ = dist.new_subgroups_by_enumeration(rows, FOREVER, backend="gloo")
        self.thread, self.host, self.written, self.messages = None, [], 0, []
        self.is_short = self.is_broken = False  # of memory for copies; whether a rank was lost while one was written
        machines()  # which free_memory() asks; the first call is collective
        if disks.leads:  # of a run that was killed
            for name in os.listdir(self.folder):
                if name.endswith(".unfinished"):
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def lacks_memory(self) -> bool:
        """Whether there are no copies yet, and what is free is too little for them and for what the next step takes."""
        tensors = [shard.tensor for shard in shards_of(self.stage, self.optimizer)]
        if len(self.host) == len(tensors):
            return False
        below_peak = max(0, memory_of_process("VmHWM") - memory_of_process())  # what a step takes, which is free now
        needed, free = sum(tensor.nbytes for tensor in tensors), free_memory(CPU) - below_peak
        was_short, self.is_short = self.is_short, needed > USABLE_MEMORY * free
        if self.is_short and not was_short:
            print(f"rank {dist.get_rank()}: a copy of its part of a checkpoint takes {needed / 1e6:.0f} MB, and "
                  f"{max(0, free) / 1e6:.0f} MB are free: training waits while checkpoints are written", flush=True)
        return self.is_short

    def copy_to_host(self) -> list[Shard]:
        """The shards with copies of their tensors, in memory that the next save uses again."""
        shards = shards_of(self.stage, self.optimizer)
        if len(self.host) != len(shards):
            self.host = [torch.zeros_like(shard.tensor, device=CPU, pin_memory=shard.tensor.is_cuda)
                         for shard in shards]
        copied = [shard._replace(tensor=buffer.copy_(shard.tensor, non_blocking=True))
                  for shard, buffer in zip(shards, self.host)]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def save(self, step: int, waits: bool = False) -> None:
        """Begins to write the state after `step`; with `waits` it is written on return, and no copy is needed.

        Where the checkpoint before is still being written, it waits for that first. Collective.
        """
        start = time.perf_counter()
        self.wait()
        if step == self.written:
            return
        state, shards = copy.deepcopy(self.state(step)), None
        waits = waits or any(self.disks.gather(self.grid.dp_rank == 0 and self.lacks_memory()))
        if self.grid.dp_rank == 0:
            shards = shards_of(self.stage, self.optimizer) if waits else self.copy_to_host()
        stall = None if waits else time.perf_counter() - start
        self.thread = threading.Thread(target=self.write, args=[step, state, shards, stall], name=WRITER)
        self.thread.start()
        if waits:
            self.wait()

    def state(self, step: int) -> dict:
        """What state.json says, but for the files: of the optimizer's groups all but their parameters."""
        groups = [{name: value for name, value in group.items() if name not in ("params", "param_names")}
                  for group in self.optimizer.param_groups]
        return {"step": step, **self.describe(step), "scheduler": self.scheduler.state_dict(),
                "optimizer": {"class": type(self.optimizer).__name__, "param_groups": groups}}

    def wait(self) -> None:
        """Until what save() began is written. Prints, on home_rank(), what came of it."""
        if self.thread:
            self.thread.join()
            self.thread = None
        self.report()

    def report(self) -> None:
        while self.messages:
            print(self.messages.pop(0), flush=True)

    def write(self, step: int, state: dict, shards: list[Shard] | None, stall: float | None) -> None:
        """The thread: all files, and then the name. An error of a disk leaves the older checkpoints as they are.

        `stall`: seconds for which the training stood still; None if it does until this ends.
        """
        name, start = name_of_step(step), time.perf_counter()
        unfinished, part = os.path.join(self.folder, f"{name}.unfinished"), None
        try:
            with self.disks.together():
                if shards is not None:
                    part = self.write_part(unfinished, shards)
            parts = {rank: part for rank, part in enumerate(self.disks.gather(part)) if part}
            self.complete(unfinished, state, parts)
            self.written = step
            size, seconds = sum(facts["bytes"] for facts in state["files"].values()), time.perf_counter() - start
            self.say(f"checkpoint: {os.path.join(self.folder, name)} ({size / 1e6:.1f} MB in {seconds:.2f} s, for "
                     f"which training stood still {1e3 * (seconds if stall is None else stall):.1f} ms)")
            with contextlib.suppress(OSError):
                if self.disks.leads:
                    forget_older(self.folder, step, self.keep)
        except UserError as problem:
            shutil.rmtree(unfinished, ignore_errors=True)
            remedy = ": make room" * any(word in str(problem) for word in ("No space left", "quota"))
            self.say(f"the checkpoint of step {step} could not be written ({problem}){remedy}; " + (
                f"the last one is that of step {self.written}" if self.written else "there is none yet"))
        except RuntimeError as problem:  # another rank is gone, which the training meets as well
            self.is_broken = True
            self.say(f"the checkpoint of step {step} was not finished: {str(problem).splitlines()[0]}")

    def say(self, message: str) -> None:
        if is_home():
            self.messages.append(message)

    def write_part(self, folder: str, shards: list[Shard]) -> dict | None:
        """Writes this stage's two files. Returns what they are, on tp rank 0. Raises OSError, when all have sent."""
        number, part, files = f"{self.grid.pp_rank + 1:05d}-of-{self.grid.pp_world_size:05d}", {}, {}
        for kind in KINDS:
            stem = "adapter" if kind == "model" and ADAPTER_CONFIG in self.small else kind
            own, name, entries = [shard for shard in shards if shard.kind == kind], f"{stem}-{number}.safetensors", {}
            saved = [(shard, parts, as_files_have_it(self.stage.model, shard.name, kind))
                     for shard, parts in zip(own, parts_over(self.tp_group, own))]
            for shard, parts, convert in saved:
                entries |= convert(put_together(shard, parts))
            if self.grid.tp_rank == 0:
                files[name] = TensorFile(os.path.join(folder, name), entries)
            for shard, parts, convert in saved:
                parts = collect(shard, parts, self.tp_group)
                for value in convert(put_together(shard, parts)).values() if name in files else ():
                    files[name].write(value)
            part[f"{kind}_map"] = dict.fromkeys(entries, name)
            if kind == "model":
                part["parameters"] = {shard.name: name for shard in own}
        return {**part, "files": {name: file.close() for name, file in files.items()}} if files else None

    def complete(self, folder: str, state: dict, parts: dict[int, dict]) -> None:
        """Copies between disks, the small files, state.json, the name, `latest`. Collective. Raises UserError."""
        disks, merged, copies, final = self.disks, merge([*parts.values()]), [], folder.removesuffix(".unfinished")
        has_adapters = ADAPTER_CONFIG in self.small  # they are small, and at home they are written as one file as well
        state.update(merged)
        # A second copy of each file, on another disk
        for rank, part in parts.items():
            number, own = next((i, disk) for i, disk in enumerate(disks.all) if rank in disk)
            others = disks.all[number + 1 :] + disks.all[:number]
            to = sorted(others, key=lambda disk: disk != disks.home)[:1]  # a second copy, at home if it is elsewhere
            copies += [(name, own[0], disk[0]) for name in part["files"] for disk in to]
        disks.copy(folder, copies)
        # What each disk has besides; then the checkpoint has its name
        with disks.together():
            if disks.leads:
                merged["files"] |= write_small(folder, self.small, merged)
                if has_adapters and disks.mine == disks.home:
                    copy_into_one(folder, [name for name in merged["files"] if name.startswith("adapter-")], ADAPTER)
                write_state(os.path.join(folder, STATE), state)
                sync_folder(folder)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(folder, final)
                sync_folder(self.folder)
        try:
            if disks.leads:
                set_latest(self.folder, os.path.basename(final))
        except OSError as problem:  # the checkpoint is whole, and --resume auto does not need `latest`
            self.say(f"{self.folder}/latest could not be written: {problem.strerror}")


def shards_of(stage, optimizer: torch.optim.Optimizer) -> list[Shard]:
    """What this rank holds. A tied head is left out where the embedding stands for it."""
    found, tied, name_of, trained = [], stage.tied, name_function(stage), trained_alone(stage)
    for name, param in stage.model.named_parameters():
        is_left_out, is_copy = trained and name not in trained, tied and name == tied[1] and not stage.is_first
        if is_left_out or is_copy:
            continue
        module, _, key = name.rpartition(".")
        module, name = stage.model.get_submodule(module), name_of(tied[0] if tied and name in tied else name)
        split = getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", {}).get(key, 1)
        found.append(Shard("model", name, param.detach(), *split))
        for entry, value in optimizer.state.get(param, {}).items():
            found.append(Shard("optimizer", f"{name}.{entry}", value, *(split if value.shape == param.shape else ())))
    own = tuple(f"{name}." for name in stage.template.modules_per_stage[stage.stage_index])
    params = dict(stage.model.named_parameters(remove_duplicate=False))
    found += [Shard("model", name_of(name), buffer) for name, buffer in stage.model.state_dict().items()
              if name not in params and name.startswith(own) and not trained]
    return sorted(found, key=lambda shard: (-shard.tensor.dtype.itemsize, shard.name))


def parts_over(group: dist.ProcessGroup | None, shards: list[Shard]) -> list[list[torch.Tensor]]:
    """For each shard, the parts that the ranks of the tensor-parallel `group` hold, on the meta device; one part where
    each rank holds all. Collective in the group."""
    everyone = [[shard.tensor.to("meta") for shard in shards]]
    if group:
        everyone *= group.size()
        dist.all_gather_object(everyone, everyone[0], group=group)
    return [parts[:1] if shard.dim is None else parts for shard, *parts in zip(shards, *everyone)]


def collect(shard: Shard, parts: list[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor] | None:
    """`parts` with their numbers, on the first rank of `group`, to which the others send theirs."""
    own = shard.tensor.cpu().contiguous()
    if len(parts) > 1 and group.rank() > 0:
        dist.send(own.flatten().view(torch.uint8), group=group, group_dst=0)
        return None
    parts = [own, *(torch.empty_like(part, device="cpu") for part in parts[1:])]
    for source, part in enumerate(parts[1:], 1):
        dist.recv(part.flatten().view(torch.uint8), group=group, group_src=source)
    return parts


def put_together(shard: Shard, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor."""
    if len(parts) == 1:
        return parts[0]
    chunks = [part.chunk(shard.fused, shard.dim) for part in parts]  # of each rank, one of each fused matrix
    return torch.cat([chunk[k] for k in range(shard.fused) for chunk in chunks], shard.dim)
