"""The pipeline's executor over NCCL, without a GPU: for every size no stage waits for another one for ever.

run_schedule itself runs, rank by rank, with stand-ins for torch.distributed, torch.cuda and the model; what it issues
is replayed in the model of NCCL's streams in support/nccl_replay.py.
"""

import contextlib
import importlib
import types
from unittest import mock

import pytest
import torch
from launch import modules_of
from nccl_replay import Deadlock, Group, Recorder, replay

SHAPE, CPU = (1, 1, 1), torch.device("cpu")
SAMPLED = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8)]
OTHERS = [(p, m) for p in range(1, 9) for m in range(1, 17) if (p, m) not in SAMPLED]
EXECUTORS = {}  # step -> its modules by their names
for step in (7, 8, 9, 10):
    names = ("pipeline_parallel", "data_parallel", "process_group_manager", "timeline")
    with modules_of(step):
        EXECUTORS[step] = {name: importlib.import_module(name) for name in names}
every_size = pytest.mark.parametrize("sizes", [SAMPLED, pytest.param(OTHERS, marks=pytest.mark.slow)],
                                     ids=["sampled", "others"])
every_run = pytest.mark.parametrize("step, engine", [
    (7, "afab"), (8, "afab"), (8, "one_f_one_b"), (9, "afab"), (9, "one_f_one_b"), (10, "zero_bubble")])


class Work(torch.autograd.Function):
    """A stage's computation: takes a place on the compute stream."""

    @staticmethod
    def forward(ctx, recorder, x, weight):
        ctx.recorder = recorder
        recorder.issue("forward")
        return torch.zeros(SHAPE)

    @staticmethod
    def backward(ctx, grad):
        ctx.recorder.issue("backward")
        return None, grad if ctx.needs_input_grad[1] else None, grad


class Stage(torch.nn.Module):
    """As much of a stage as run_schedule and DataParallelBucket look at. Its weight is also the tied embedding."""

    dtype, tied = torch.float32, None
    config = types.SimpleNamespace(vocab_size=1, tie_word_embeddings=True)

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder, self.weight = recorder, torch.nn.Parameter(torch.zeros(SHAPE))
        self.embedding = types.SimpleNamespace(weight=self.weight)
        self.model = types.SimpleNamespace(named_parameters=lambda: [("stage.weight", self.weight)])

    def forward(self, x=None, **batch):
        return Work.apply(self.recorder, x, self.weight)

    def hidden_shape(self, **batch):
        return SHAPE


class Batches:
    def __init__(self, num_microbatches: int):
        self.gradient_accumulation_steps = num_microbatches

    def __next__(self) -> dict:
        return {"input_ids": torch.zeros(SHAPE), "target_ids": None}


def make_grid(rank: int, dp: int, p: int, one_group: bool) -> types.SimpleNamespace:
    dp_rank, stage = divmod(rank, p)
    columns, same_stage = tuple(range(dp_rank * p, dp_rank * p + p)), tuple(range(stage, dp * p, p))
    first, last, forward = stage == 0, stage == p - 1, Group("pp", columns)
    return types.SimpleNamespace(
        pp_rank=stage, pp_world_size=p, dp_rank=dp_rank, dp_world_size=dp, pp_is_first_stage=first,
        pp_is_last_stage=last, pp_prev_rank=None if first else rank - 1, pp_next_rank=None if last else rank + 1,
        pp_group=forward, pp_backward_group=forward if one_group else Group("pp backward", columns),
        pp_ends_group=Group("ends", tuple(dict.fromkeys((columns[0], columns[-1])))), dp_group=Group("dp", same_stage))


def mean_loss(out: torch.Tensor, *_) -> torch.Tensor:
    return out.mean()


def run_rank(step: int, engine: str, m: int, recorder: Recorder, grid: types.SimpleNamespace) -> None:
    """One optimizer step of one rank, from the connections on."""
    pipeline_parallel, wrap = EXECUTORS[step]["pipeline_parallel"], EXECUTORS[step]["data_parallel"].DataParallelBucket
    schedule, stage, batches = getattr(pipeline_parallel, engine), Stage(recorder), Batches(m)
    if not (grid.pp_is_first_stage or grid.pp_is_last_stage):
        stage.embedding = None
    pipeline_parallel.connect_neighbours()
    if step == 9:
        grid.group_of = lambda places: grid.dp_group if grid.dp_world_size > 1 else None
        model = wrap(stage, [types.SimpleNamespace(modules_per_stage=[["stage"]])], bucket_cap_mb=1)
        communication = pipeline_parallel.StageCommunication(torch.float32, CPU)
        pipeline_parallel.run_schedule(schedule, model, batches, mean_loss, [m] * grid.dp_world_size, communication)
    else:
        pipeline_parallel.run_schedule(schedule, wrap(stage), batches, SHAPE, CPU)


def record(step: int, engine: str, p: int, m: int, profiled: bool = False, dp: int = 1, one_group: bool = False,
           one_stream: bool = False) -> list[list]:
    """What each rank issues. `one_group`: forward and backward in one; `one_stream`: see Recorder."""
    programs, modules, world = [], EXECUTORS[step], Group("world", tuple(range(dp * p)))
    pipeline_parallel, grids = modules["pipeline_parallel"], modules["process_group_manager"]
    for rank in world.ranks:
        recorder, grid = Recorder(rank, world, one_stream), make_grid(rank, dp, p, one_group)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorder.as_cuda())
            for module in modules.values():
                stack.enter_context(mock.patch.object(module, "dist", recorder))
            stack.enter_context(mock.patch.object(grids, "process_group_manager", grid))
            stack.enter_context(mock.patch.object(pipeline_parallel, "cross_entropy", mean_loss, create=True))
            if profiled:
                pipeline_parallel.timeline.start()
            run_rank(step, engine, m, recorder, grid)
        if profiled:
            pipeline_parallel.timeline.__init__()
        programs.append(recorder.operations)
    return programs


@every_run
@every_size
def test_no_deadlock(step, engine, sizes):
    for p, m in sizes:
        replay(record(step, engine, p, m))


@every_run
@pytest.mark.parametrize("dp, one_stream", [(2, False), (2, True), (1, True)])
def test_no_deadlock_with_replicas_or_one_stream_a_group(step, engine, dp, one_stream):
    """Replicas sum gradients while messages are under way; with one stream, receives and sends of a group share it."""
    for p, m in SAMPLED:
        if p * dp <= 8:
            replay(record(step, engine, p, m, dp=dp, one_stream=one_stream))


@every_run
def test_one_group_for_both_directions_is_a_deadlock(step, engine):
    """A stage's forward send queues behind the backward receive that it has posted early."""
    with pytest.raises(Deadlock, match="receive from 1 in pp;(.|\n)*receive from 0 in pp;"):
        replay(record(step, engine, 2, 2, one_group=True))


@every_run
def test_without_connections_made_in_order_a_deadlock(step, engine):
    with mock.patch.object(EXECUTORS[step]["pipeline_parallel"], "connect_neighbours"):
        with pytest.raises(Deadlock, match="host at connect before"):
            replay(record(step, engine, 2, 2))


@every_run
@every_size
def test_no_deadlock_while_the_timeline_records(step, engine, sizes):
    for p, m in sizes:
        replay(record(step, engine, p, m, profiled=True))


def synchronised_span(self, kind, microbatch=None):
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def span_of_events(self, kind, microbatch=None):
    torch.cuda.Event(enable_timing=True).record()
    yield
    torch.cuda.Event(enable_timing=True).record()


@every_run
def test_a_timeline_that_synchronises_is_a_deadlock(step, engine):
    """The host would wait for the receives that are posted early. Events on the compute stream don't stop it."""
    timeline = EXECUTORS[step]["timeline"].Timeline
    with mock.patch.object(timeline, "span", contextlib.contextmanager(span_of_events)):
        replay(record(step, engine, 2, 2, profiled=True))
    with mock.patch.object(timeline, "span", contextlib.contextmanager(synchronised_span)):
        with pytest.raises(Deadlock, match="rank 0: host at synchronize the device; receive from 1 in pp backward"):
            replay(record(step, engine, 2, 2, profiled=True))


def issue_messages(order: str, recorder: Recorder, group: Group) -> None:
    """S sends to the other rank of two, R receives from it."""
    for letter in order:
        (recorder.isend if letter == "S" else recorder.irecv)(torch.zeros(SHAPE), 1 - recorder.rank, group)


@pytest.mark.parametrize("orders, meet", [(("SR", "RS"), True), (("SR", "SR"), False), (("RS", "RS"), False)])
@pytest.mark.parametrize("one_stream", [False, True])
def test_model_of_messages(orders, meet, one_stream):
    """Two ranks that both send first, or both receive first, in one communicator wait for each other."""
    group = Group("pair", (0, 1))
    ranks = [Recorder(rank, group, one_stream) for rank in (0, 1)]
    for recorder, order in zip(ranks, orders):
        issue_messages(order, recorder, group)
    with contextlib.nullcontext() if meet else pytest.raises(Deadlock):
        replay([recorder.operations for recorder in ranks])


@every_run
@pytest.mark.parametrize("backend, early", [("nccl", 1), ("gloo", 2)])
def test_how_early_receives_are_posted(step, engine, backend, early, monkeypatch):
    """Before the last stage's first forward: the receive that this one needs, and those of the actions after it."""
    monkeypatch.setattr(Recorder, "get_backend", lambda self: backend, raising=True)
    _, last_stage = record(step, engine, 2, 8)
    labels = [operation.label for operation in last_stage]
    received = sum(label.startswith("receive from 0") for label in labels[: labels.index("forward")])
    schedule = getattr(EXECUTORS[step]["pipeline_parallel"], engine)
    awaited = [action for action in list(schedule(1, 2, 8))[: 1 + early] if action.kind == "F"]
    assert received == 1 + len(awaited)  # and the one of connect_neighbours
