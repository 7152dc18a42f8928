"""The checks that find a fault of a step without starting a process: a few optimizer steps on ranks in this one.

    same        same_numbers: samples, gradients, norm and weights beside those of one process, in float64
    bytes       what a rank sends in a step beside the formulas of splits.py
    replay      the messages: a deadlock, collectives that do not match, a tensor changed while it is sent
                (lab/thread_ranks.py)
    simulation  the schedules, without ranks: do all micro-batches get through, and once each?

break_it.py NAME --find runs the check that a fault names, and --find --healthy all four on TOPOLOGIES.
"""

import functools
import math
import tempfile
import textwrap
from typing import NamedTuple

import same_numbers
from lab.program import Edit, Program
from lab.ranks import run as run_program
from lab.ranks import threads
from lab.thread_ranks import Violation
from lab.watch.numbers import SameNumbers
from lab.watch.schedule import check_schedules
from museum.faults import Fault

STEPS_RUN, STEPS_RECORDED, FEW_MICROBATCHES = 2, 3, ("--gradient_accumulation_steps", "4")
BYTES_TOLERANCE = 0.1  # relative; of tokens that travel to experts, the formulas know the average
LOGGED = 64  # bytes a step of numbers for the log: the loss, the norm, the balance of experts
ROW = "{:10} {:>4}  {:10}  {:10}  {}"


class Finding(NamedTuple):
    alarm: bool
    saw: str


def train(program: Program, steps: int, watches=(), dtype: str = "float64") -> list[int]:
    """Trains for a few steps. Returns the bytes that each rank has sent. Raises what a rank raises."""
    tokens = 16 * program.sizes.dp_size * program.sizes.gradient_accumulation_steps
    flags = [*program.flags, "--dtype", dtype, "--max_tokens", steps * tokens]
    world = run_program(program.with_flags(flags), threads(program.size), watches).world
    return [world.num_bytes(rank) for rank in range(program.size)]


run = functools.cache(train)


def record(program: Program, folder: str) -> None:
    train(program, STEPS_RECORDED, [SameNumbers(folder, STEPS_RECORDED)])


@functools.cache
def trusted(step: str, flags: tuple[str, ...], edits: tuple[Edit, ...]) -> tempfile.TemporaryDirectory:
    """What one process records, once for all faults that share its flags."""
    folder = tempfile.TemporaryDirectory()
    record(Program(step, flags, edits), folder.name)
    return folder


def same(program: Program, right: Program) -> Finding:
    """Compares with the same steps without the fault, in one process."""
    one = trusted(right.step, (*right.one_process().flags,), (*right.edits,))
    with tempfile.TemporaryDirectory() as many:
        record(program, many)
        found = same_numbers.compare(one.name, many).found
    lines = [each.line for each in found] or [f"{STEPS_RECORDED} steps are those of one process"]
    return Finding(bool(found), "\n".join(lines))


def num_bytes(program: Program, _) -> Finding:
    """Compares the bytes of a step, without those of the start and of numbers for the log, with splits.sent()."""
    from sizes.data_sheets import Shape  # it knows more about models than the other checks need
    from sizes.splits import Job, Split, sent

    found, ranks = program.sizes, program.size
    m, engine = found.gradient_accumulation_steps, found.pp_engine if found.pp_size > 1 else "-"
    split = Split(found.dp_size, found.tp_size, found.pp_size, engine, found.zero, found.cp_size, found.ep_size,
                  found.sequence_parallel)
    tied = any("tie_word_embeddings" in edit.new for edit in program.edits)
    shape = Shape(hidden=128, width=352, layers=4, heads=8, kv_heads=4, vocab=1024, tied=tied, head_dim=16)  # of SMALL
    job = Job(shape, 16, m * found.dp_size, 1, "float32", ranks, ranks, *[0] * 4,
              recompute="--recompute" in program.flags, experts=found.num_experts)
    long, short = (run(program, steps, dtype="float32") for steps in (2, 1))
    saw = []
    for rank, (all_bytes, before) in enumerate(zip(long, short)):
        pp_rank = rank // found.tp_size // found.cp_size % found.pp_size
        by_axis = sent(job, split, pp_rank, m)
        if not found.sequence_parallel:  # short all-reduces of tp ranks take log2(tp) messages, not 2 (tp - 1) / tp
            by_axis["tp"] *= math.log2(found.tp_size) * found.tp_size / (2 * (found.tp_size - 1) or 1)
        expected, sent_bytes = sum(by_axis.values()), all_bytes - before
        saw.append(f"rank {rank} sends {sent_bytes:,} bytes a step, and the formulas say {expected:,.0f}")
        if abs(sent_bytes - expected) > BYTES_TOLERANCE * expected + LOGGED:
            return Finding(True, f"{saw[-1]}: {sent_bytes / max(expected, 1):.3g} times as many")
    return Finding(False, saw[0])


def replay(program: Program, _) -> Finding:
    try:
        done = run(program, STEPS_RUN)
    except Violation as violation:
        return Finding(True, str(violation))
    return Finding(False, f"{sum(done):,} bytes in {STEPS_RUN} steps, all received, none changed on the way")


def simulation(program: Program, _) -> Finding:
    lines = check_schedules(program.load())
    wrong = [line for line in lines if "legal" not in line]
    return Finding(bool(wrong), "; ".join(wrong or lines))


TOPOLOGIES = (  # healthy ones: a step, its ranks and flags
    ("3", 1, ""), ("4", 2, "--tp_size 2"), ("4", 4, "--tp_size 4"),
    ("5", 2, "--dp_size 2"), ("5", 4, "--dp_size 2 --tp_size 2"), ("6", 2, "--dp_size 2"), ("6", 3, "--dp_size 3"),
    ("7", 2, "--pp_size 2"), ("7", 4, "--pp_size 2 --dp_size 2"), ("8", 4, "--pp_size 4"),
    ("8", 2, "--pp_size 2 --recompute"), ("8", 4, "--pp_size 2 --tp_size 2 --pp_engine afab"),
    ("8", 8, "--dp_size 2 --pp_size 2 --tp_size 2"), ("9", 2, "--pp_size 2"), ("9", 4, "--dp_size 2 --tp_size 2"),
    ("10", 2, "--pp_size 2 --pp_engine zb"), ("10", 4, "--pp_size 4 --pp_engine zb"),
    ("11", 2, "--pp_size 2 --pp_engine interleaved --virtual_stages 2"),
    ("11", 2, "--pp_size 2 --pp_engine interleaved_zb --virtual_stages 2"),
    ("12", 2, "--dp_size 2 --zero 1"), ("12", 3, "--dp_size 3 --zero 1"), ("12", 2, "--dp_size 2 --zero 2"),
    ("12", 4, "--dp_size 2 --pp_size 2 --zero 1"), ("13", 2, "--dp_size 2 --zero 3"),
    ("13", 4, "--dp_size 2 --tp_size 2 --zero 3"), ("14", 2, "--tp_size 2 --sequence_parallel"),
    ("14", 4, "--tp_size 4 --sequence_parallel"), ("14", 4, "--tp_size 2 --pp_size 2 --sequence_parallel"),
    ("14", 4, "--tp_size 2 --dp_size 2 --sequence_parallel --zero 1"), ("15", 2, "--cp_size 2"),
    ("15", 2, "--cp_size 2 --cp_layout contiguous"), ("15", 4, "--cp_size 4"), ("15", 4, "--cp_size 2 --dp_size 2"),
    ("15", 4, "--cp_size 2 --pp_size 2"), ("15", 4, "--cp_size 2 --tp_size 2 --sequence_parallel"),
    ("15", 4, "--cp_size 2 --dp_size 2 --zero 3"), ("16", 2, "--dp_size 2 --num_experts 4"),
    ("16", 2, "--dp_size 2 --ep_size 2 --num_experts 4"),
    ("16", 4, "--dp_size 4 --ep_size 2 --num_experts 4 --balance_loss 0.01"),
    ("16", 4, "--dp_size 2 --ep_size 2 --tp_size 2 --num_experts 4"),
    ("16", 4, "--dp_size 2 --ep_size 2 --pp_size 2 --pp_engine 1f1b --num_experts 4"),
)
CHECKS = {  # a name -> what it says of a program, and of the right one beside it
    "same": same, "bytes": num_bytes, "replay": replay, "simulation": simulation}


def find(fault: Fault, healthy: bool = False, check: str = "") -> Finding:
    """What the fault's own check, or another one, says of the step with the fault, or without it."""
    right, wrong = (fault.program(*FEW_MICROBATCHES, healthy=each) for each in (True, False))
    return CHECKS[check or fault.check](right if healthy else wrong, right)


def find_one(name: str, fault: Fault, only_healthy: bool) -> int:
    """Prints what the check says without the fault and with it. Returns 1 for an alarm, with the fault if it is on."""
    for healthy in (True,) if only_healthy else (True, False):
        found = find(fault, healthy)
        print(f"{'without' if healthy else 'with'} {name}: {fault.check}: {'ALARM' if found.alarm else 'no alarm'}: "
              f"{found.saw}", flush=True)
    return int(found.alarm)


def find_all(faults: dict[str, Fault]) -> int:
    """Prints a table of what each fault's check says. Returns 1 where one is not caught, or there is a false alarm."""
    caught = false_alarms = 0
    print(ROW.format("fault", "step", "check", "without it", "with it"))
    for name, fault in faults.items():
        healthy, broken = find(fault, healthy=True), find(fault)
        caught, false_alarms = caught + broken.alarm, false_alarms + healthy.alarm
        saw = " ".join([line for i, line in enumerate(broken.saw.split("\n")) if i == 0 or line.startswith("  rank")])
        print(ROW.format(name, fault.step, fault.check, "ALARM" if healthy.alarm else "no alarm",
                         textwrap.shorten(saw, 120) if broken.alarm else "NO ALARM"), flush=True)
    print(f"{caught} of {len(faults)} caught, {false_alarms or 'no'} alarms without a fault")
    return int(caught < len(faults) or false_alarms > 0)


def find_healthy() -> int:
    """Runs all checks on all TOPOLOGIES, prints a line for each of these, and returns 1 for an alarm."""
    alarms = 0
    for step, ranks, flags in TOPOLOGIES:
        saw = healthy_alarms(step, flags)
        alarms += len(saw)
        topology = f"step {step:>2}, {ranks} rank{'s' * (ranks > 1)}, {flags or 'no flags'}"
        print(f"{topology}: {'; '.join(saw) or 'no alarm'}", flush=True)
    print(f"{alarms or 'no'} alarms: {len(CHECKS)} checks, {len(TOPOLOGIES)} healthy topologies")
    return int(alarms > 0)


def healthy_alarms(step: str, flags: str) -> list[str]:
    """What the checks say against a step as it is: it should be nothing."""
    program = Program(step, [*flags.split(), *FEW_MICROBATCHES])
    found = {name: check(program, program) for name, check in CHECKS.items()}
    return [f"{name}: {finding.saw}" for name, finding in found.items() if finding.alarm]
