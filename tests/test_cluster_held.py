"""What survivors hold: a step is made by all or by none, and state moves from any layout to any other in memory."""

import itertools
import queue
import random
import threading
import types

import pytest
import torch
from launch import modules_of
from torch import nn

with modules_of(9):
    from run import live_state
    from run.live_state import Commit, LiveState, PeerLoader, in_memory

NORM = 3.0


class Ranks:
    """Threads that are ranks: all that Disks and torch.distributed do for them."""

    def __init__(self, size: int):
        self.size, self.barrier, self.values = size, threading.Barrier(size, timeout=20), [None] * size
        self.sent = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}
        self.local, self.messages = threading.local(), 0

    def gather(self, value) -> list:
        self.values[self.local.rank] = value
        self.barrier.wait()
        everyone = [*self.values]
        self.barrier.wait()
        return everyone

    def isend(self, tensor, to: int, group):
        self.messages += 1
        self.sent[self.local.rank, to].put(tensor.clone())
        return types.SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor, source: int, group):
        """Nothing is there before wait()."""
        arrived = self.sent[source, self.local.rank]
        return types.SimpleNamespace(wait=lambda: tensor.copy_(arrived.get(timeout=20)))

    def run(self, work) -> list:
        """work(rank, disks) of each rank."""
        results = [None] * self.size

        def be(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = work(rank, types.SimpleNamespace(rank=rank, group=None, gather=self.gather))
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=be, args=[rank]) for rank in range(self.size)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return results


@pytest.fixture
def ranks(monkeypatch):
    def ranks(size: int) -> Ranks:
        made = Ranks(size)
        monkeypatch.setattr(live_state, "dist", types.SimpleNamespace(isend=made.isend, irecv=made.irecv))
        manager = types.SimpleNamespace(tp_rank=0)
        monkeypatch.setattr(live_state, "pgm", types.SimpleNamespace(process_group_manager=manager))
        monkeypatch.setattr(live_state, "make_buffers", lambda *_: None)
        return made

    return ranks


class Stage:
    """Layers of a model that has a weight a layer, and a buffer; with `tied` the last one's is the first one's."""

    def __init__(self, layers, tied=None, value=None):
        self.model, self.tied, self.stage_index = nn.Module(), tied, 0
        self.model.layers = nn.ModuleDict()
        for i in layers:
            layer = self.model.layers[str(i)] = nn.Module()
            number = torch.randn(2, 3, dtype=torch.float64)
            if value is not None:
                number.fill_(value + (0 if tied and i == 3 else i))
            layer.weight = nn.Parameter(number) if not tied or i != 3 or 0 not in layers else (
                self.model.layers["0"].weight)
            layer.register_buffer("seen", torch.tensor(float(i if value is not None else -1)))
        self.template = types.SimpleNamespace(modules_per_stage=[[f"layers.{i}" for i in layers]])


def held_by(stage, step: int, everything=None, generation: int = 1) -> LiveState:
    optimizer = torch.optim.AdamW(stage.model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    keeper = types.SimpleNamespace(stage=stage, optimizer=optimizer, scheduler=scheduler, host=[1], written=0,
                                   state=lambda step: {"step": step})
    everything = frozenset(everything or live_state.weights_of(stage, 0))
    return LiveState(types.SimpleNamespace(checkpointer=keeper, step=step, commit=None, everything=everything, tp_rank=0,
                                      args=types.SimpleNamespace(max_grad_norm=1.0),
                                      generation=types.SimpleNamespace(number=generation)))


def after(stage_of, state: str) -> LiveState:
    """A rank that was lost in its second step: its gradients are half there, or it is committed, or it has applied it.
    """
    stage = stage_of()
    it = held_by(stage, 1)
    commit = Commit(2, 0.5, NORM, 0.1)

    def gradients(factor: float) -> None:
        for i, param in enumerate(stage.model.parameters()):
            param.grad = torch.full_like(param, factor * (i + 1))

    gradients(1.0)
    it.optimizer.step()
    it.scheduler.step()
    if state == "incomplete":
        gradients(0.3)
        return it
    gradients(2.0)
    if state != "complete":
        it.clip(NORM)
        it.commit = commit
    if state == "applied":
        it.optimizer.step()
        it.scheduler.step()
        it.step = 2
    return it


STATES = "incomplete", "complete", "committed", "applied"


@pytest.mark.parametrize("states", [states for states in itertools.product(STATES, repeat=3) if not (
    "incomplete" in states and {"committed", "applied"} & {*states})], ids="-".join)
def test_a_step_is_made_by_all_or_by_none(ranks, states):
    """Whoever has passed the norm's all-reduce knows that all gradients are complete; nobody else has applied any."""
    torch.manual_seed(0)
    start = Stage(range(4)).model.state_dict()

    def stage():
        made = Stage(range(4))
        made.model.load_state_dict(start)
        return made

    commits = "committed" in states or "applied" in states
    each = [after(stage, state) for state in states]
    found = ranks(3).run(lambda rank, disks: in_memory(each[rank], disks, 9))
    reference = after(stage, "applied" if commits else "incomplete")
    for it, (specs, commit, state) in zip(each, found):
        assert it.step == state["step"] == (2 if commits else 1) and (commit is not None) == commits
        assert it.scheduler.last_epoch == it.step and len(specs) == 3
        tensors, expected = it.tensors(), reference.tensors()
        assert tensors.keys() == expected.keys() and all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_a_step_that_is_older_is_not_taken(ranks):
    """A rank of a step before, that has no gradients of the one since, holds nothing that counts."""
    each = [held_by(Stage(range(2), value=1), 3), held_by(Stage(range(2), value=2), 1), None]
    found = ranks(3).run(lambda rank, disks: in_memory(each[rank], disks, 9))
    assert [[len(spec) for spec in specs] for specs, _, _ in found] == [[4, 0, 0]] * 3
    assert {state["step"] for _, _, state in found} == {3}


def test_steps_of_a_part_that_was_cut_off(ranks):
    """They are as many as those of the run, or more: the run's were made by others meanwhile."""
    each = [held_by(Stage(range(2), value=i), step, generation=generation)
            for i, (step, generation) in enumerate([(3, 4), (8, 3), (3, 3)])]
    found = ranks(3).run(lambda rank, disks: in_memory(each[rank], disks, 9))
    assert [[len(spec) for spec in specs] for specs, _, _ in found] == [[4, 0, 0]] * 3
    assert {state["step"] for _, _, state in found} == {3} and [it.generation for it in each] == [9, 3, 3]


def test_what_nobody_holds(ranks):
    """Then all go back to a checkpoint; and where nobody holds anything, too."""
    everything = live_state.weights_of(Stage(range(4)), 0)
    each = [held_by(Stage([0, 1]), 5, everything=everything), held_by(Stage([2]), 5, everything=everything), None]
    assert ranks(3).run(lambda rank, disks: in_memory(each[rank], disks, 9)) == [None] * 3
    assert ranks(2).run(lambda rank, disks: in_memory(None, disks, 9)) == [None] * 2


def with_optimizer_state(it: LiveState) -> LiveState:
    for param in it.stage.model.parameters():
        it.optimizer.state[param] = {"step": torch.tensor(7.0), "exp_avg": param.detach() * 10,
                                     "exp_avg_sq": param.detach() * 100}
    return it


@pytest.mark.parametrize("seed", range(12))
def test_from_any_layout_to_any_other(ranks, seed):
    """Layers of old pipelines to those of new ones. What a rank has stays where it is, and is sent by nobody."""
    rng = random.Random(seed)
    size, tied = rng.randint(2, 4), ("layers.0.weight", "layers.3.weight") if seed % 3 == 0 else None

    def layout() -> list[list[int]]:
        """Some ranks hold all, and the others share the layers."""
        cut = sorted(rng.sample(range(1, 4), min(size, 3) - 1)) if rng.random() < 0.7 else []
        stages = [[*range(a, b)] for a, b in zip([0, *cut], [*cut, 4])]
        return [stages[i] if i < len(stages) else [*range(4)] for i in range(size)]

    old, new = layout(), layout()
    everything = live_state.weights_of(Stage(range(4), tied, value=1), 0)
    each = [with_optimizer_state(held_by(Stage(layers, tied, value=1), 5, everything)) for layers in old]
    fresh = rng.randrange(size) if all(0 in layers and 3 in layers for layers in old) else None
    if fresh is not None:
        each[fresh] = None  # a process that has just been started
    targets, world = [Stage(layers, tied) for layers in new], ranks(size)

    def move(rank: int, disks):
        specs, _, _ = in_memory(each[rank], disks, 9)
        moved = PeerLoader(each[rank], specs, disks, torch.device("cpu"))
        moved.weights(targets[rank])
        optimizer = torch.optim.AdamW(targets[rank].model.parameters(), lr=0.1)
        moved.load_optimizer(optimizer, targets[rank])
        return optimizer

    optimizers = world.run(move)
    needed = 0
    for rank, (target, optimizer) in enumerate(zip(targets, optimizers)):
        own = each[rank].tensors() if each[rank] else {}
        for i in new[rank]:
            layer, key = target.model.layers[str(i)], f"layers.{0 if tied and i == 3 else i}.weight"
            assert (layer.weight == (1.0 if tied and i == 3 else 1 + i)).all() and layer.seen == i
            entries = optimizer.state[layer.weight]
            assert entries["step"] == 7 and torch.equal(entries["exp_avg"], layer.weight.detach() * 10)
            assert torch.equal(entries["exp_avg_sq"], layer.weight.detach() * 100)
            if (key, "", 0) in own:
                assert layer.weight.data_ptr() == own[key, "", 0].data_ptr()
                assert entries["exp_avg"].data_ptr() == own[key, "exp_avg", 0].data_ptr()
        wanted = {(f"layers.{0 if tied and i == 3 else i}.weight", entry, 0) for i in new[rank]
                  for entry in ("", "step", "exp_avg", "exp_avg_sq")} | {(f"layers.{i}.seen", "", 0) for i in new[rank]}
        needed += len(wanted - own.keys())
    assert world.messages == needed


def test_tensor_parallel_parts_keep_apart(ranks, monkeypatch):
    """Each tensor-parallel rank has its own part under the same name: a new process gets that of its place."""
    each = [held_by(Stage([0], value=value), 2) for value in (10, 20)] + [None]
    each[1].tp_rank = 1
    for it in each[:2]:
        it.everything = frozenset((f"layers.0.{name}", "", rank) for name in ("weight", "seen") for rank in (0, 1))
    world, target = ranks(3), Stage([0])
    live_state.pgm.process_group_manager.tp_rank = 1

    def move(rank: int, disks):
        specs, _, _ = in_memory(each[rank], disks, 9)
        moved = PeerLoader(each[rank], specs, disks, torch.device("cpu"))
        moved.move({("layers.0.weight", "", 1)} if rank == 2 else set()) if rank < 2 else moved.assign(
            target, {"layers.0.weight": ("layers.0.weight", "", 1)})

    world.run(move)
    assert (target.model.layers["0"].weight == 20).all()


def test_adapters_and_what_they_are_beside():
    """A weight that an adapter has been put beside keeps its key; the adapters have theirs, and move by themselves."""
    stage = types.SimpleNamespace(tied=None)
    assert live_state.key_of(stage, "layers.0.base_layer.weight", "", 0) == ("layers.0.weight", "", 0)
    assert live_state.key_of(stage, "layers.0.lora_a", "exp_avg", 1) == ("layers.0.lora_a", "exp_avg", 1)
