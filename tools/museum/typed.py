"""Types for collectives (lab/watch/types.py) of a step's train.py, and of a trainer of same_numbers: rank 0 runs up to
its first optimizer step. Neither knows of types: what is annotated stands in lab/watch/typed_steps.py, and here in
check_trainer()."""

import contextlib
import pathlib
import re
import sys
from collections.abc import Callable
from unittest import mock

import torch

import same_numbers
from lab.program import Program, StepModules
from lab.rank_alone import EndOfStep, alone
from lab.ranks import run
from museum import trainers
from same_numbers import trainers_base

try:
    from lab.watch.typed_steps import Types
    from lab.watch.types import I, R, TypedRank, V, set_types, spmd
except ImportError as error:
    sys.exit(f"error: {error}")

GRIDS = (  # a step and its flags
    "4 --tp_size 2", "4 --tp_size 8", *[
        f"{step} --dp_size {ranks // 2 // tp} {axis} 2 --tp_size {tp} {sp}".rstrip() for step, axis, sp in (
            ("8", "--pp_size", ""), ("14", "--pp_size", ""), ("14", "--pp_size", "--sequence_parallel"),
            ("15", "--cp_size", ""), ("15", "--cp_size", "--sequence_parallel"))
        for ranks, tp in ((8, 2), (1024, 2), (1024, 8)) if (step, ranks, tp) != ("15", 1024, 2)], *[
        f"16 --dp_size {ranks // tp} --ep_size {ep} --tp_size {tp} {sp}--num_experts 8"
        for sp in ("", "--sequence_parallel ")
        for ranks, tp, ep in ((8, 2, 2), (8, 1, 8), (1024, 2, 8), (1024, 8, 2), (1024, 8, 8)) if tp > 1 or not sp])


def check_step(program: Program, type_on_tp: Callable[[str, bool], str] | None = None) -> str:
    """Runs rank 0 of a step's train.py up to its first optimizer step. Returns what is refused.

    type_on_tp(name, sequence_parallel) may say the weights' types along tp, "R", "I" or "V".
    """
    found = program.sizes
    micro_batches, length = max(2, found.pp_size), 32 if found.cp_size * found.tp_size > 8 else 16
    small = {"seq_len": length, "num_key_value_heads": max(found.tp_size, 4),
             "num_hidden_layers": found.pp_size * found.virtual_stages,
             "gradient_accumulation_steps": micro_batches, "max_tokens": micro_batches * length * found.dp_size}
    flags = (*program.flags, *(word for name, value in small.items() for word in (f"--{name}", str(value))))
    run(program.with_flags(flags), alone(0, program.size), [types := Types(type_on_tp)])
    return types.refused


SUMMANDS = {"tp": "[qk]_norm", "sp": "norm|router|out.bias"}  # whole weights that are R there; elsewhere all are
SAME_SAMPLES = ("tp", "sp", "cp")  # on all ranks


def check_trainer(kind: str, modules: StepModules) -> str:
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

    with contextlib.ExitStack() as stack:
        for each in (alone(0, 2).joined(), rank, mock.patch.object(same_numbers, "Recorder", recorder),
                     mock.patch.object(trainers_base, "own", own)):
            stack.enter_context(each)
        for module in (modules.trainers_model, modules.trainers_data):
            module.own, module.pairs = own, pairs
        return rank.refusal(lambda: trainers.of(kind, modules)(trainers_base.Run("", pathlib.Path(), 1)))
