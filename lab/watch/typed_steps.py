"""A step's train.py under types for collectives: what does not fit before its first optimizer step.

    run(Program("14", ["--tp_size", 2, "--sequence_parallel"]), alone(0, 2), [types := Types()])
    types.refused  # "" where nothing is

A step knows nothing of types: what is annotated stands here.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.program import StepModules
from lab.rank_alone import EndOfStep
from lab.watch import Watch
from lab.watch.types import I, R, TypedRank, V, spmd


class Types(Watch):
    """`refused`: what is refused of rank 0, "" where nothing is. Types are those of tensors with numbers.

    type_on_tp(name, sequence_parallel) may say the weights' types along tp, "R", "I" or "V".
    """

    places = ("alone",)
    apart = dict.fromkeys(("messages", "schedule", "numbers", "memory", "waits"),
                          "under types, a rank ends before its optimizer")

    def __init__(self, type_on_tp: Callable[[str, bool], str] | None = None):
        self.type_on_tp = type_on_tp

    def __str__(self) -> str:
        return f"types: {self.refused or 'nothing is refused on rank 0'}"

    @contextlib.contextmanager
    def around(self, ranks) -> Iterator[None]:
        if ranks.rank:
            raise ValueError(f"types are those of rank 0, not {ranks.rank}: all ranks have the same")
        with contextlib.ExitStack() as self.installed:
            yield

    def begin(self, modules: StepModules, rank: int) -> None:
        main, found = modules.train.main, modules._program.sizes  # train.py has imported what it needs as it is
        typed = TypedRank({"dp": found.dp_size // found.ep_size, "ep": found.ep_size, "pp": found.pp_size,
                           "cp": found.cp_size, "tp": found.tp_size})
        self.installed.enter_context(typed)
        annotate_step(modules, typed, lambda model: annotate_model(model, typed, found, self.type_on_tp))

        def before_optimizer(*_) -> None:
            typed.check_gradients()
            raise EndOfStep

        self.installed.callback(register_optimizer_step_pre_hook(before_optimizer).remove)

        def checked_main() -> None:
            self.refused = typed.refusal(main)

        modules.train.main = checked_main


def annotate_step(modules: StepModules, rank: TypedRank, annotate_weights: Callable) -> None:
    """The types of a step's samples and messages, and which of its functions are collectives."""
    for module in (getattr(modules, name, None) for name in ("tensor_parallel", "sequence_parallel")):
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            if hasattr(module, kind):
                rank.replace(module, kind, lambda: modules.process_group_manager.process_group_manager.tp_group)
    loader, clip, train_step = (modules.dataloader.MicroBatchDataLoader, modules.train.clip_grad_norm,
                                modules.train.train_step)

    def next_batch(self, following=loader.__next__) -> dict:
        if hasattr(self, "position_ids"):
            rank.annotate(self.position_ids, {"cp": V})
        with spmd.no_typecheck():
            batch = following(self)
        return {name: rank.annotate(each, {"tp": R}, V) for name, each in batch.items()}

    def typed_train_step(*args) -> torch.Tensor:
        if not rank.weights:
            model = next(each for each in args if isinstance(each, torch.nn.Module))
            annotate_weights(model)
            for each in model.modules():
                if "attend" in vars(each):  # step 15 has bound it before types were checked
                    each.attend = functools.partial(modules.context_parallel.RingAttention.apply, *each.attend.args)
        return train_step(*args)

    def typed_clip(*args) -> torch.Tensor:
        rank.check_gradients()
        return rank.check_norm(clip(*args))

    loader.__next__, modules.train.clip_grad_norm, modules.train.train_step = next_batch, typed_clip, typed_train_step
    if hasattr(modules, "expert_parallel"):
        balance = modules.expert_parallel.ExpertBalance
        balance.after_choice = spmd.no_typecheck(balance.after_choice)  # it counts for the log


def annotate_model(wrapped: torch.nn.Module, rank: TypedRank, flags: argparse.Namespace, type_on_tp) -> None:
    """Weights that tp ranks hold whole are I, as what passes them is; with sequence parallelism they see a part."""
    model = getattr(wrapped, "module", wrapped)
    whole, weights = R if flags.sequence_parallel else I, dict(model.named_parameters())
    split = {getattr(each, name) for each in model.modules() for name in getattr(each, "tp_dims", ())}

    def types_of(name: str) -> dict:
        tied = name == "embedding.weight" and model.config.tie_word_embeddings
        on_tp = ({"R": R, "I": I, "V": V}[type_on_tp(name, flags.sequence_parallel)] if type_on_tp
                 else V if weights[name] in split else whole)
        return {"tp": on_tp, "pp": R if tied else V,
                "ep": V if ".experts." in name else R}

    rank.received = {"tp": V if flags.sequence_parallel else I}
    rank.start(weights, types_of)
    for bucket in getattr(wrapped, "buckets", ()):
        rank.annotate_buffer(bucket.grad_data, bucket.params)
