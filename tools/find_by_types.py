"""What types find of the museum's faults and of the published ones, in one process: see typed_rank.py."""

import argparse
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from break_beyond import FAULTS
from break_flags import sizes
from find_faults import Case, case_of, source
from step_modules import train
from typed_rank import I, P, R, TypedRank, TypeRefused, V, spmd


class Done(Exception):
    """An optimizer step is through."""


class Ranks:
    """In place of a World: runs rank 0 alone, under types."""

    def __init__(self, axes):
        self.axes = axes

    def run(self, program, timeout=None):
        with TypedRank(self.axes) as self.rank:
            program(0)


def check_step(case: Case) -> str:
    """Runs an optimizer step of a step's train.py. Returns what is refused."""
    flags = sizes(case.flags)
    axes = {"dp": flags.dp_size // flags.ep_size, "ep": flags.ep_size, "pp": flags.pp_size, "cp": flags.cp_size,
            "tp": flags.tp_size}
    world = Ranks(axes)
    tokens = 16 * flags.dp_size * flags.gradient_accumulation_steps

    def prepare(modules, _):
        annotate_step(modules, world.rank, flags)

    def done(*_):
        world.rank.check_gradients()
        raise Done

    hook = register_optimizer_step_pre_hook(done)
    try:
        train(source(case), case.size, (*without_tokens(case.flags), "--max_tokens", str(tokens)), prepare, world)
    except TypeRefused as refusal:
        if "TB" in __import__("os").environ: raise
        return str(refusal)
    except Done:
        return ""
    finally:
        hook.remove()


def without_tokens(flags):
    from break_flags import without
    return without(flags, ("--max_tokens",))


def annotate_step(modules, rank: TypedRank, flags) -> None:
    grid = lambda: modules.process_group_manager.process_group_manager
    for name in ("tensor_parallel", "sequence_parallel"):
        for function, kind in (("all_reduce", "all_reduce"), ("all_gather", "all_gather"),
                               ("reduce_scatter", "reduce_scatter")):
            if hasattr(getattr(modules, name, None), function):
                rank.replace(getattr(modules, name), function, kind, lambda args: grid().tp_group)
    loader = modules.dataloader.MicroBatchDataLoader
    following = loader.__next__

    def next_batch(self):
        if hasattr(self, "position_ids"):
            rank.annotate(self.position_ids, {"cp": V})
        with spmd.no_typecheck():
            batch = following(self)
        for each in batch.values():
            if isinstance(each, torch.Tensor):
                rank.annotate(each, {"tp": R}, V)
        return batch

    loader.__next__ = next_batch
    if hasattr(modules, "expert_parallel"):
        balance = modules.expert_parallel.ExpertBalance
        balance.after_choice = spmd.no_typecheck(balance.after_choice)
    train_step, clip = modules.train.train_step, modules.train.clip_grad_norm

    def typed_train_step(*args):
        if not rank.weights:
            (wrapped,) = [each for each in args if isinstance(each, torch.nn.Module)]
            model = getattr(wrapped, "module", wrapped)
            split = {getattr(each, name) for each in model.modules() for name in getattr(each, "tp_dims", ())}
            whole = R if flags.sequence_parallel else I
            weights = dict(model.named_parameters())

            def types_of(name):
                tied = name == "embedding.weight" and model.config.tie_word_embeddings
                return {"tp": V if weights[name] in split else whole, "pp": R if tied else V,
                        "ep": V if ".experts." in name else R}

            rank.received = {"tp": V if flags.sequence_parallel else I}
            rank.start(weights, types_of)
            for bucket in getattr(wrapped, "buckets", ()):
                kinds = [rank.gradient_types(param) for param in bucket.params]
                for buffer in [bucket.grad_data] if hasattr(bucket, "grad_data") else []:
                    rank.annotate(buffer, {name: kinds[0][axis] if len({each[axis] for each in kinds}) == 1 else V
                                           for name, axis in rank.axes.items()})
        return train_step(*args)

    def typed_clip(*args):
        norm = clip(*args)
        for axis, kind in spmd.get_local_type(norm).items():
            if kind in (V, P):
                rank.refuse(f"the gradient norm is {kind} on axis {axis}")
        return norm

    modules.train.train_step, modules.train.clip_grad_norm = typed_train_step, typed_clip


SUMMANDS = {"tp": "[qk]_norm", "sp": "norm|router|out.bias"}  # whole weights of type R; in others all are
SAME_SAMPLES = ("tp", "sp", "cp")


def check_trainer(kind: str, fault: str) -> str:
    import pathlib, re
    from unittest import mock
    import same_numbers
    from same_numbers import trainers_base, trainers_data, trainers_model
    trainers = trainers_model.TRAINERS | trainers_data.TRAINERS
    state = {}

    def recorder(model, optimizer, folder, parts=None, **options):
        def types_of(name):
            if kind == "local" or parts and parts(name):
                return {"rank": V}
            return {"rank": R if re.search(SUMMANDS.get(kind, ""), name) else I}
        state["rank"].start(dict(model.named_parameters()), types_of)
        return mock.Mock(step=done)

    def done(**_):
        state["rank"].check_gradients()
        raise Done

    def pairs(*args):
        with spmd.no_typecheck():
            both = made(*args)
        return tuple(state["rank"].annotate(each, {"rank": R if kind in SAME_SAMPLES else V}) for each in both)

    def own(x, dim=1):
        y = parted(x, dim)
        return typed_rank.set_types(y, {axis: V for axis in state["rank"].axes.values()}) if spmd.has_local_type(y) else y

    import typed_rank
    made, parted = trainers_base.pairs, trainers_base.own
    try:
        with TypedRank({"rank": 2}) as state["rank"], mock.patch.object(same_numbers, "Recorder", recorder):
            with mock.patch.multiple(trainers_base, own=own), mock.patch.multiple(
                    trainers_model, pairs=pairs, own=own), mock.patch.multiple(trainers_data, pairs=pairs, own=own):
                trainers[kind](trainers_base.Run(fault, pathlib.Path("nowhere"), 1))
    except TypeRefused as refusal:
        if "TB" in __import__("os").environ: raise
        return str(refusal)
    except Done:
        return ""


def main_published():
    sys.path.append("tests/support")
    from published_faults import CASES
    for kind, fault in CASES:
            start = time.time()
            if len(sys.argv) > 2 and kind not in sys.argv:
                continue
            try:
                found = check_trainer(kind, fault)
            except Exception as error:
                import traceback
                if len(sys.argv) > 2:
                    traceback.print_exc()
                found = f"!!! {type(error).__name__}: {error}"
            print(f"{kind:10} {fault:10} {time.time() - start:.2f} s {found[:300]}", flush=True)


def main():
    if "published" in sys.argv:
        return main_published()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    for name, fault in FAULTS.items():
        if args.names and name not in args.names:
            continue
        for edits in ((), fault.edits):
            start = time.time()
            try:
                found = check_step(case_of(fault, edits))
            except Exception as error:
                import traceback
                if args.names:
                    traceback.print_exc()
                found = f"!!! {type(error).__name__}: {error}"
            print(f"{name:10} {bool(edits)!s:5} {time.time() - start:.2f} s {found[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
