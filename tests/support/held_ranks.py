"""Three ranks that hold unlike parts of a training, as after the loss of a host, and check what each has afterwards."""

import itertools
import json
import pathlib
import random
import sys
import types

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

import process_group_manager as pgm  # noqa: E402
from ranks.collectives import gather  # noqa: E402
from run import live_state  # noqa: E402
from run.live_state import Commit, LiveState, PeerLoader, find_in_memory  # noqa: E402

NORM, CPU, TIED = 3.0, torch.device("cpu"), ("layers.0.weight", "layers.3.weight")
ROW = '{"step": 2, "loss": 0.5, "grad_norm": 3.0, "memory_gb": 1.5}\n'
STATES = "incomplete", "complete", "committed", "applied"  # of the second step, in which the host was lost


class Stage:
    """Layers of a model that has a weight a layer, and a buffer; with `tied` the last one's is the first one's."""

    def __init__(self, layers, tied=None, value=1.0):
        self.model, self.tied, self.stage_index = nn.Module(), tied, 0
        self.model.layers = nn.ModuleDict({str(i): nn.Module() for i in layers})
        for i in layers:
            layer, source = self.model.layers[str(i)], 0 if tied and i == 3 else i
            layer.weight = nn.Parameter(torch.full((2, 3), value + source, dtype=torch.float64))
            if source != i and 0 in layers:
                layer.weight = self.model.layers["0"].weight
            layer.register_buffer("seen", torch.tensor(value * i))
        self.template = types.SimpleNamespace(modules_per_stage=[[f"layers.{i}" for i in layers]])


def in_memory(held, disks, number: int):
    """What the ranks hold, as generation `number` finds it."""
    return find_in_memory(types.SimpleNamespace(held=held, number=number, forget=lambda: None), disks)


def held_by(stage, step: int, everything=None, generation: int = 1, tp_rank: int = 0) -> LiveState:
    optimizer = torch.optim.AdamW(stage.model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    checkpointer = types.SimpleNamespace(stage=stage, optimizer=optimizer, scheduler=scheduler, host=[1], written=0,
                                         state=lambda step: {"step": step, "tokens": 9 * step, "records": ""})
    everything = frozenset(everything or live_state.weights_of(stage, 0))
    return LiveState(types.SimpleNamespace(
        trained=types.SimpleNamespace(plugin=types.SimpleNamespace(unfinished=None)),
        checkpointer=checkpointer, step=step, commit=None, everything=everything,
        tp_rank=tp_rank, args=types.SimpleNamespace(max_grad_norm=1.0, local_steps=None),
        generation=types.SimpleNamespace(number=generation)))


def after(state: str) -> LiveState:
    """A rank that was lost in its second step: its gradients are half there, or it is committed, or it has applied it.
    """
    it = held_by(stage := Stage(range(4)), 1)

    def gradients(factor: float) -> None:
        for i, param in enumerate(stage.model.parameters()):
            param.grad = torch.full_like(param, factor * (i + 1))

    gradients(1.0)
    it.optimizer.step()
    it.scheduler.step()
    gradients(0.3 if state == "incomplete" else 2.0)
    if state in ("committed", "applied"):
        it.clip(NORM)
        it.commit = Commit(2, 0.5, NORM, 0.1)
    if state == "applied":
        it.optimizer.step()
        it.scheduler.step()
        it.step = 2
        it.checkpointer.state = lambda step: {"step": step, "tokens": 9 * step, "records": ROW}
    return it


def a_step_is_made_by_all_or_by_none(rank: int, disks) -> None:
    """Whoever has passed the norm's all-reduce knows that all gradients are complete; nobody else has applied any."""
    for states in itertools.product(STATES, repeat=3):
        commits = bool({"committed", "applied"} & {*states})
        if commits and "incomplete" in states:
            continue
        it, expected = after(states[rank]), after("applied" if commits else "incomplete").tensors()
        specs, commit, state, _ = in_memory(it, disks, 9)
        assert it.step == state["step"] == (2 if commits else 1) and (commit is not None) == commits, states
        made = json.dumps({**commit._asdict(), "trained_tokens": 18}) + "\n" if commits else ""
        assert state["records"] == (ROW if "applied" in states else made), states
        assert it.scheduler.last_epoch == it.step and len(specs) == 3
        tensors = it.tensors()
        assert tensors.keys() == expected.keys() and all(torch.equal(tensors[key], expected[key]) for key in expected)


def only_what_is_of_the_run_counts(rank: int, disks) -> None:
    """Not a step before the run's, nor steps that a part made which was cut off, be they more."""
    for each in ([held_by(Stage(range(2)), 3), held_by(Stage(range(2)), 1), None],
                 [held_by(Stage(range(2)), step, generation=number) for step, number in ((3, 4), (8, 3), (3, 3))]):
        specs, _, state, _ = in_memory(each[rank], disks, 9)
        assert [len(spec) for spec in specs] == [4, 0, 0] and state["step"] == 3
    everything = live_state.weights_of(Stage(range(4)), 0)
    for each in [held_by(Stage([0, 1]), 5, everything), held_by(Stage([2]), 5, everything), None], [None] * 3:
        assert in_memory(each[rank], disks, 9) is None, "a part is held by nobody: back to a checkpoint"


def with_optimizer_state(it: LiveState) -> LiveState:
    for param in it.stage.model.parameters():
        it.optimizer.state[param] = {"step": torch.tensor(7.0), "exp_avg": param.detach() * 10}
    return it


def from_any_layout_to_any_other(rank: int, disks) -> None:
    """Layers of old pipelines to those of new ones. What a rank has stays where it is."""
    for seed in range(12):
        chance, tied = random.Random(seed), TIED if seed % 3 == 0 else None

        def layout() -> list[list[int]]:
            """Some ranks hold all, and the others share the layers."""
            cut = sorted(chance.sample(range(1, 4), chance.choice([0, 1, 2])))
            stages = [[*range(a, b)] for a, b in zip([0, *cut], [*cut, 4])]
            return (stages + [[*range(4)]] * 3)[:3]

        old, new = layout(), layout()
        it = with_optimizer_state(held_by(Stage(old[rank], tied), 5, live_state.weights_of(Stage(range(4), tied), 0)))
        if all(len(layers) == 4 for layers in old) and rank == chance.randrange(3):
            it = None  # a process that has just been started
        specs, *_ = in_memory(it, disks, 9)
        moved, stage = PeerLoader(it, specs, disks, CPU), Stage(new[rank], tied, value=-1.0)
        moved.weights(stage)
        optimizer = torch.optim.AdamW(stage.model.parameters(), lr=0.1)
        moved.load_optimizer(optimizer, stage)
        own = it.tensors() if it else {}
        for i in new[rank]:
            layer, source = stage.model.layers[str(i)], 0 if tied and i == 3 else i
            entries, key = optimizer.state[layer.weight], f"layers.{source}.weight"
            assert (layer.weight == 1 + source).all() and layer.seen == i, (seed, i)
            assert entries["step"] == 7 and torch.equal(entries["exp_avg"], layer.weight.detach() * 10)
            if (key, "", 0) in own:
                assert layer.weight.data_ptr() == own[key, "", 0].data_ptr()
                assert entries["exp_avg"].data_ptr() == own[key, "exp_avg", 0].data_ptr()


def tensor_parallel_parts_keep_apart(rank: int, disks) -> None:
    """Each tensor-parallel rank has its own part under the same name: a new process gets that of its place."""
    everything = {(f"layers.0.{name}", "", part) for name in ("weight", "seen") for part in (0, 1)}
    it = held_by(Stage([0], value=10.0 * (rank + 1)), 2, everything, tp_rank=rank) if rank < 2 else None
    specs, *_ = in_memory(it, disks, 9)
    moved, key = PeerLoader(it, specs, disks, CPU), ("layers.0.weight", "", 1)
    assert rank < 2 and not moved.move(set()) or (moved.move({key})[key] == 20).all()


def main() -> None:
    pgm.init_process_group("gloo")
    pgm.process_group_manager = types.SimpleNamespace(tp_rank=0)
    rank = dist.get_rank()
    disks = types.SimpleNamespace(rank=rank, group=None, gather=gather)
    for check in (a_step_is_made_by_all_or_by_none, only_what_is_of_the_run_counts, from_any_layout_to_any_other,
                  tensor_parallel_parts_keep_apart):
        check(rank, disks)
        print(f"rank {rank}: {check.__name__}")
    dist.barrier()


main()
