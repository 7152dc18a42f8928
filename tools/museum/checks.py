"""The checks: what each says of a fault, or of the same step or trainer without it.

    numbers   same_numbers: samples, gradients, norm and weights beside those of one process, in float64
    bytes     what each rank sends, beside what it sends without the fault
    messages  a deadlock, collectives that do not match, a tensor changed while it is sent (lab/thread_ranks.py)
    schedule  the pipeline's schedules, without ranks: do all micro-batches get through, and once each?
    types     the types of what rank 0 sends and computes, up to its first optimizer step (typed.py)

Steps train on ranks in this process, trainers of same_numbers in forked ones.
"""

import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import same_numbers
from lab.program import Program
from lab.ranks import run, threads
from lab.thread_ranks import Violation
from lab.watch.numbers import SameNumbers
from lab.watch.schedule import check_schedules
from museum import trainers
from museum.fault import Fault

NOT_TYPED = {"pp": "torch.distributed.pipelining sends objects", "ddp": "DDP's hooks are C++",
             "--zero": "ZeRO's sums are sends and receives of unlike parts",
             "--virtual_stages": "types know no virtual stages", "--generators": "a rank alone gets no answers"}
STEPS_RUN, STEPS_RECORDED, FEW_MICROBATCHES = 2, 3, ("--gradient_accumulation_steps", "4")


class Finding(NamedTuple):
    alarm: bool
    saw: str
    tried: bool = True  # otherwise `saw` is why not


def train(program: Program, steps: int, watches=(), dtype: str = "float64", layers: int | None = None):
    """Trains a step for so many optimizer steps on random samples. Returns lab's Result, raises what a rank raises."""
    sizes = program.sizes
    samples = sizes.micro_batch_size * sizes.group_size * sizes.dp_size * sizes.gradient_accumulation_steps
    flags = [*program.flags, "--dtype", dtype, "--max_tokens", steps * samples * sizes.seq_len]
    flags += ["--num_hidden_layers", layers] if layers else []
    return run(program.with_flags(flags), threads(program.size), watches, timeout=600)


@functools.cache
def bytes_sent(step: str, flags: tuple[str, ...], edits: tuple) -> list[int]:
    """By each rank. Where experts are chosen, only the first step is that of the same weights."""
    program = Program(step, flags, edits)
    world = train(program, 1 if program.sizes.num_experts else STEPS_RUN, dtype="float32").world
    return [world.num_bytes(rank) for rank in range(program.size)]


@functools.cache
def trusted(step: str, flags: tuple[str, ...], edits: tuple) -> tempfile.TemporaryDirectory:
    """What one process records, once for all faults that share its flags."""
    folder = tempfile.TemporaryDirectory()
    train(Program(step, flags, edits), STEPS_RECORDED, [SameNumbers(folder.name, STEPS_RECORDED)])
    return folder


def numbers(program: Program, right: Program) -> Finding:
    """Compares with the same steps without the fault, in one process."""
    one = trusted(right.step, tuple(right.one_process().flags), tuple(right.edits))
    with tempfile.TemporaryDirectory() as many:
        train(program, STEPS_RECORDED, [SameNumbers(many, STEPS_RECORDED)])
        return verdict(one.name, many)


def verdict(one, many) -> Finding:
    """What `python -m same_numbers` prints of two recordings."""
    try:
        lines = [each.line for each in same_numbers.compare(one, many).found]
    except ValueError as error:
        lines = [f"error: {error}"]
    return Finding(bool(lines), "\n".join(lines) or f"{STEPS_RECORDED} steps are those of one process")


def num_bytes(program: Program, right: Program) -> Finding:
    both = (bytes_sent(each.step, (*each.flags,), (*each.edits,)) for each in (program, right))
    for rank, (sent, wanted) in enumerate(zip(*both, strict=True)):
        if sent != wanted:
            return Finding(True, f"rank {rank} sends {sent:,} bytes, and {wanted:,} without the fault: "
                           f"{sent / max(wanted, 1):.3g} times as many")
    return Finding(False, f"all ranks send what they send without the fault, rank {rank} {sent:,} bytes")


def messages(program: Program, _) -> Finding:
    try:
        world = train(program, STEPS_RUN).world
    except Violation as violation:
        return Finding(True, str(violation))
    sent = sum(map(world.num_bytes, range(program.size)))
    return Finding(False, f"{sent:,} bytes in {STEPS_RUN} steps, all received, none changed on the way")


def schedule(program: Program, _) -> Finding:
    lines = check_schedules(program.load())
    wrong = [line for line in lines if "legal" not in line]
    return Finding(bool(wrong), "; ".join(wrong or lines))


def types(program: Program, _) -> Finding:
    from museum import typed  # it needs spmd_types

    refused = typed.check_step(program)
    return Finding(bool(refused), refused or "nothing is refused")


CHECKS: dict[str, Callable[[Program, Program], Finding]] = {  # a step and the right one beside it
    "numbers": numbers, "bytes": num_bytes, "messages": messages, "schedule": schedule, "types": types}


def cannot(fault: Fault, check: str) -> str:
    """Why a check says nothing of a fault, "" where it does."""
    if not fault.is_trainer and not fault.is_step:
        return f"of {fault.where}"
    if fault.is_trainer:
        return {"numbers": "", "types": NOT_TYPED.get(fault.step, "")}.get(check, "of steps only")
    if check == "types" and (reasons := [reason for word, reason in NOT_TYPED.items() if word in fault.where.split()]):
        return reasons[0]
    return "no pipeline" if check == "schedule" and "--pp_size" not in fault.where else ""


def find(fault: Fault, check: str = "", healthy: bool = False) -> Finding:
    """What the fault's own check, or another one, says of what has the fault, or of the same without it."""
    check = check or next(iter(fault.seen))
    if reason := cannot(fault, check):
        return Finding(False, reason, tried=False)
    if fault.is_trainer:
        return trainer(fault, check, healthy)
    right, wrong = (fault.program(*FEW_MICROBATCHES, healthy=each) for each in (True, False))
    try:
        return CHECKS[check](right if healthy else wrong, right)
    except Violation as error:
        return Finding(False, f"the ranks stop: {error}", tried=False)


@functools.cache
def trusted_trainer(kind: str) -> tempfile.TemporaryDirectory:
    """What a trainer records in one process."""
    folder = tempfile.TemporaryDirectory()
    trainers.record(1, [(trainers.of(kind, trainers.RIGHT.load()), folder.name)], STEPS_RECORDED)
    return folder


def trainer(fault: Fault, check: str, healthy: bool) -> Finding:
    modules = fault.program(healthy=healthy).load()
    if check == "types":
        from museum import typed

        refused = typed.check_trainer(fault.step, modules)
        return Finding(bool(refused), refused or "nothing is refused")
    with tempfile.TemporaryDirectory() as many:
        trainers.record(2, [(trainers.of(fault.step, modules), many)], STEPS_RECORDED)
        return verdict(trusted_trainer(fault.step).name, many)


def says(fault: Fault, check: str, saw: str) -> tuple[bool, bool]:
    """Whether the finding names the place and the cause, as the fault's record says that it does."""
    words = fault.seen[check]
    place, cause = words if isinstance(words, tuple) else (words, words)
    first = saw.partition("\n")[0] if isinstance(words, tuple) else saw
    return bool(re.search(place, first)), bool(re.search(cause, first))


TOPOLOGIES = (  # healthy ones: a step and its flags
    "3", "4 --tp_size 2", "4 --tp_size 4", "5 --dp_size 2", "5 --dp_size 2 --tp_size 2", "6 --dp_size 2",
    "6 --dp_size 3", "7 --pp_size 2", "7 --pp_size 2 --dp_size 2", "8 --pp_size 4", "8 --pp_size 2 --recompute",
    "8 --pp_size 2 --tp_size 2 --pp_engine afab", "8 --dp_size 2 --pp_size 2 --tp_size 2", "9 --pp_size 2",
    "9 --dp_size 2 --tp_size 2", "10 --pp_size 2 --pp_engine zb", "10 --pp_size 4 --pp_engine zb",
    "11 --pp_size 2 --pp_engine interleaved --virtual_stages 2",
    "11 --pp_size 2 --pp_engine interleaved_zb --virtual_stages 2", "12 --dp_size 2 --zero 1",
    "12 --dp_size 3 --zero 1", "12 --dp_size 2 --zero 2", "12 --dp_size 2 --pp_size 2 --zero 1",
    "13 --dp_size 2 --zero 3", "13 --dp_size 2 --tp_size 2 --zero 3", "14 --tp_size 2 --sequence_parallel",
    "14 --tp_size 4 --sequence_parallel", "14 --tp_size 2 --pp_size 2 --sequence_parallel",
    "14 --tp_size 2 --dp_size 2 --sequence_parallel --zero 1", "15 --cp_size 2",
    "15 --cp_size 2 --cp_layout contiguous", "15 --cp_size 4", "15 --cp_size 2 --dp_size 2",
    "15 --cp_size 2 --pp_size 2", "15 --cp_size 2 --tp_size 2 --sequence_parallel",
    "15 --cp_size 2 --dp_size 2 --zero 3", "16 --dp_size 2 --num_experts 4",
    "16 --dp_size 2 --ep_size 2 --num_experts 4", "16 --dp_size 4 --ep_size 2 --num_experts 4 --balance_loss 0.01",
    "16 --dp_size 2 --ep_size 2 --tp_size 2 --num_experts 4",
    "16 --dp_size 2 --ep_size 2 --pp_size 2 --pp_engine 1f1b --num_experts 4",
    *[f"19 --{axis}_size 2 --generators 2 --lag {lag} --group_size 4 --micro_batch_size 2 --seq_len 8"
      for axis, lag in (("dp", 0), ("pp", 1))])

HEALTHY = tuple(each for each in CHECKS if each not in ("bytes", "types"))  # bytes are beside themselves


def healthy_alarms(where: str, names: Sequence[str] = HEALTHY) -> list[str]:
    """What checks say against a step as it is: it should be nothing. (Those of types are on typed.GRIDS.)"""
    program = Program(where.split()[0], [*where.split()[1:], *FEW_MICROBATCHES])
    return [f"{name}: {found.saw}" for name in names if (found := CHECKS[name](program, program)).alarm]
