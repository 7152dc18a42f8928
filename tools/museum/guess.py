"""A fault of a step, chosen at random and not named: the reader asks the checks, and says which one it is."""

import pathlib
import random
import shlex
import sys
import tempfile

from lab.launch import ROOT
from lab.thread_ranks import Violation
from museum import checks
from museum.fault import Fault
from museum.faults import FAULTS

AXES = ("dp", "zero", "tp", "pp", "cp", "ep", "generators")
STEPS_OF_LOSS = 5


def losses(fault: Fault) -> str:
    """Those of the first optimizer steps, and beside them those of one process without the fault."""
    right = fault.program(*checks.FEW_MICROBATCHES, healthy=True).one_process()
    rows = zip(*(checks.train(program, STEPS_OF_LOSS).rows for program in (
        right, fault.program(*checks.FEW_MICROBATCHES))), strict=True)
    return "\n".join(f"step {one['step']}: loss {many['loss']:.4f}, and {one['loss']:.4f} in one process"
                     for one, many in rows)


def answer(fault: Fault, word: str, names: list[str]) -> tuple[str, bool]:
    """What is said to a word that the reader types, and whether that ends the search."""
    soonest = next(iter(fault.seen))
    if word in checks.CHECKS:
        found = checks.find(fault, word)
        return f"{'ALARM' if found.alarm else 'no alarm' if found.tried else 'not tried'}: {found.saw}", False
    if word == "loss":
        try:
            return losses(fault), False
        except Violation as error:
            return f"the ranks stop: {error}", False
    if word == "diff":
        return f"{fault.program().diff()}\nIt is {fault.name}: {fault.sentence}", True
    if word == fault.name:
        return (f"Yes: {fault.sentence}\n{soonest} shows it soonest: "
                f"{checks.find(fault).saw}\nReported in {', '.join(fault.reported)}", True)
    if word in names:
        return f"No, it is not {word}. Of the checks, {soonest} would show it soonest.", False
    return f"type a check ({', '.join(checks.CHECKS)}, loss), diff, or one of {', '.join(names)}", False


def guess(axis: str = "", seed: int | None = None) -> int:
    """Asks until the fault is named (exit code 0), or the reader gives up (1). ValueError: there is no such axis."""
    if axis and axis not in AXES:
        raise ValueError(f"there is no axis {axis!r}: choose one of {', '.join(AXES)}")
    names = [name for name, fault in FAULTS.items() if fault.is_step and axis in ("", fault.axis)]
    fault = FAULTS[random.Random(seed).choice(names)]
    with tempfile.TemporaryDirectory() as folder:
        program = fault.program()
        script = program.copy(pathlib.Path(folder))
        print(f"One of these faults is in {script.parent}:\n")
        for name in names:
            print(f"    {name:12} {FAULTS[name].sentence}")
        flags = shlex.join([*fault.flags, "--model_name", str(ROOT / "assets" / "tiny_llama")])
        print(f"\ntorchrun --nproc_per_node {program.size} {script} {flags}\n\n"
              f"Type a check ({', '.join(checks.CHECKS)}, loss), diff to give up, or the fault's name.")
        is_over = False
        while not is_over:
            try:
                word = input("> ").strip()
            except (EOFError, KeyboardInterrupt) as end:
                print(f"\nIt is {fault.name}: {fault.sentence}")
                return 130 if isinstance(end, KeyboardInterrupt) else 1
            if not sys.stdin.isatty():
                print(word)
            said, is_over = answer(fault, word, names)
            print(said, flush=True)
    return int(word == "diff")
