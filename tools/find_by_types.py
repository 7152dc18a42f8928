"""What types for collectives find before a run, in one process: see docs/TYPES.md and lab/watch/types.py.

    python tools/find_by_types.py                # of the museum's faults and of the published ones, in seconds
    python tools/find_by_types.py partial "tp f" # of some of them, with the whole refusal
    python tools/find_by_types.py --right        # our steps as they are, on grids of up to 1,024 ranks

Rank 0 of a step's train.py, or of a trainer of same_numbers, runs up to its first optimizer step. Neither knows of
types: what is annotated stands in lab/watch/typed_steps.py, and here in check_trainer().
"""

import argparse
import pathlib
import re
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

import same_numbers
from lab.program import Program
from lab.rank_alone import EndOfStep, alone
from lab.ranks import run
from museum.faults_beyond import FAULTS
from museum.find_faults import FEW_MICROBATCHES
from same_numbers import trainers_base, trainers_data, trainers_model

try:
    from lab.watch.typed_steps import Types
    from lab.watch.types import I, R, TypedRank, V, set_types, spmd
except ImportError as error:
    sys.exit(f"find_by_types.py: {error}")

GRIDS = (  # a step, its ranks and flags
    ("4", 2, "--tp_size 2"), ("4", 8, "--tp_size 8"),
    *[(step, ranks, f"--dp_size {ranks // 2 // tp} --pp_size 2 --tp_size {tp} {sequence_parallel}")
      for step, choices in (("8", [""]), ("14", ["", "--sequence_parallel"])) for sequence_parallel in choices
      for ranks, tp in ((8, 2), (1024, 2), (1024, 8))],
    *[("15", ranks, f"--dp_size {ranks // 2 // tp} --cp_size 2 --tp_size {tp} {sequence_parallel}")
      for sequence_parallel in ("", "--sequence_parallel") for ranks, tp in ((8, 2), (1024, 8))],
    *[("16", ranks, f"--dp_size {ranks // tp} --ep_size {ep} --tp_size {tp} {sequence_parallel} --num_experts 8")
      for sequence_parallel in ("", "--sequence_parallel")
      for ranks, tp, ep in ((8, 2, 2), (8, 1, 8), (1024, 2, 8), (1024, 8, 2), (1024, 8, 8))
      if tp > 1 or not sequence_parallel],
)
NOT_TYPED = {"pp": "torch.distributed.pipelining sends objects", "ddp": "DDP's hooks are C++",
             "shards": "ZeRO's sums are sends and receives of unlike parts"}


def check_step(program: Program, type_on_tp: Callable[[str, bool], str] | None = None) -> str:
    """Runs rank 0 of a step's train.py up to its first optimizer step. Returns what is refused.

    type_on_tp(name, sequence_parallel) may say the weights' types along tp, "R", "I" or "V".
    """
    found = program.sizes
    micro_batches, length = max(2, found.pp_size), 32 if found.cp_size * found.tp_size > 8 else 16
    small = {"seq_len": length, "num_key_value_heads": max(found.tp_size, 4), "num_hidden_layers": found.pp_size,
             "gradient_accumulation_steps": micro_batches, "max_tokens": micro_batches * length * found.dp_size}
    flags = (*program.flags, *(word for name, value in small.items() for word in (f"--{name}", str(value))))
    run(program.with_flags(flags), alone(0, program.size), [types := Types(type_on_tp)])
    return types.refused


SUMMANDS = {"tp": "[qk]_norm", "sp": "norm|router|out.bias"}  # whole weights that are R there; elsewhere all are
SAME_SAMPLES = ("tp", "sp", "cp")  # on all ranks


def check_trainer(kind: str, fault: str = "") -> str:
    """Runs rank 0 of 2 of a trainer of same_numbers up to its first optimizer step. Returns what is refused."""
    rank, made, cut = TypedRank({"ranks": 2}), trainers_base.pairs, trainers_base.own

    def recorder(model, optimizer, folder, parts=lambda name: None, **options) -> mock.Mock:
        def types_of(name: str) -> dict:
            is_own = kind == "local" or parts(name)
            return {"ranks": V if is_own else R if re.search(SUMMANDS.get(kind, ""), name) else I}

        rank.start(dict(model.named_parameters()), types_of)
        return mock.Mock(step=before_optimizer)

    def before_optimizer(**_) -> None:
        rank.check_gradients()
        raise EndOfStep

    def pairs(*args) -> tuple[torch.Tensor, ...]:
        with spmd.no_typecheck():
            both = made(*args)
        return tuple(rank.annotate(each, {"ranks": R if kind in SAME_SAMPLES else V}) for each in both)

    def own(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        part = cut(x, dim)
        return set_types(part, dict.fromkeys(rank.axes.values(), V)) if spmd.has_local_type(part) else part

    with alone(0, 2).joined(), rank, mock.patch.object(same_numbers, "Recorder", recorder), mock.patch.object(
            trainers_base, "own", own), mock.patch.multiple(
            trainers_model, own=own, pairs=pairs), mock.patch.multiple(trainers_data, own=own, pairs=pairs):
        return rank.refusal(lambda: trainers()[kind](trainers_base.Run(fault, pathlib.Path(), 1)))


def trainers() -> dict[str, Callable]:
    return trainers_model.TRAINERS | trainers_data.TRAINERS


def published() -> list[str]:
    """The faults of same_numbers' trainers, each behind its trainer."""
    return [f"{kind} {fault}" for kind, trainer in trainers().items() for fault in trainers_base.faults(trainer)]


def not_tried(name: str) -> str:
    """Why types are not tried on a fault, "" where they are."""
    return NOT_TYPED.get(name.split()[0], "")


def check(name: str, healthy: bool = False) -> str:
    """What is refused of a fault, or of the same without it."""
    if name in FAULTS:
        return check_step(FAULTS[name].program(*FEW_MICROBATCHES, healthy=healthy))
    return check_trainer(*name.split()[: 1 if healthy else 2])


def print_found(names: list[str]) -> int:
    """Prints what types say of each. Returns 1 where they refuse what is right."""
    tried, found, accused, start = [name for name in names if not not_tried(name)], 0, 0, time.process_time()
    for name in tried:
        saw, alarm = check(name), check(name, healthy=True)
        found, accused = found + bool(saw), accused + bool(alarm)
        print(f"{name:20} {'FALSE ALARM ' + alarm if alarm else ''}"
              f"{(saw if len(names) < 9 else saw.partition(chr(10))[0]) or 'not found'}")
    print(f"{found} of {len(names)} found, {len(names) - len(tried)} not tried, {accused or 'none'} refused without a "
          f"fault, in {time.process_time() - start:.1f} s of processor time")
    return int(accused > 0)


def print_right() -> int:
    """Prints what types say of our steps. Returns 1 where they refuse one."""
    accused = 0
    for step, ranks, flags in GRIDS:
        saw = check_step(Program(step, flags.split()))
        accused += bool(saw)
        print(f"step {step:>2}, {ranks:,} ranks, {' '.join(flags.split())}: {saw or 'nothing is refused'}", flush=True)
    print(f"{accused or 'nothing'} refused on {len(GRIDS)} grids")
    return int(accused > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the museum, or trainer and fault in quotes")
    parser.add_argument("--right", action="store_true", help="our steps as they are")
    args = parser.parse_args(argv)
    known = [*FAULTS, *published()]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no fault {unknown[0]!r}: choose of {', '.join(known)}")
    return print_right() if args.right else print_found(args.names or known)


if __name__ == "__main__":
    sys.exit(main())
