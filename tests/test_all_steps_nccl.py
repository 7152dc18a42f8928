"""The pipeline's executor over NCCL, without a GPU: for every size no stage waits for another one for ever.

run_schedule itself runs, rank by rank, with stand-ins for torch.distributed, torch.cuda and the model; what it issues
is replayed in the model of NCCL's streams in support/nccl_replay.py.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from lab.program import Program
from lab.ranks import RandomSamples
from support.nccl_replay import Deadlock, Group, Recorder, replay

SHAPE, CPU = (1, 1, 1), torch.device("cpu")
SAMPLED = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8)]
UTILS = Program(7).load().utils
CONFIG = UTILS.load_config(UTILS.TINY_LLAMA, num_attention_heads=None, tie_word_embeddings=True)
EXECUTORS, CHUNKED = {}, (*range(11, 17), 18)  # step -> its modules by their names; steps with virtual stages
for step in range(7, 19):
    names = ["pipeline_parallel", "data_parallel", "process_group_manager", "timeline"]
    modules = Program(step).load()
    EXECUTORS[step] = {name: getattr(modules, name) for name in names + ["virtual_stages"] * (step in CHUNKED)}
every_run = pytest.mark.parametrize("step, engine", [
    (7, "afab"), (8, "afab"), (8, "one_f_one_b"), (9, "afab"), (9, "one_f_one_b"), (10, "zero_bubble"),
    (11, "interleaved"), (11, "interleaved_zero_bubble"), pytest.param(17, "one_f_one_b", marks=pytest.mark.slow),
    *(pytest.param(step, engine, marks=pytest.mark.slow)
      for step in CHUNKED[1:] for engine in ("interleaved", "interleaved_zero_bubble"))])


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
        return None, grad if ctx.needs_input_grad[1] else None, grad[0]


class Stage(torch.nn.Module):
    """What run_schedule and DataParallelBucket look at of a stage. Its first weight is also the tied embedding."""

    dtype, tied, config = torch.float32, None, CONFIG

    def __init__(self, recorder: Recorder, num_chunks: int, number: int):
        super().__init__()
        self.recorder, self.chunks = recorder, num_chunks * [None]
        self.embedding, *others = (torch.nn.Embedding(*SHAPE[1:]) for _ in self.chunks)
        self.model = torch.nn.ModuleDict({f"stage{number}": self.embedding})
        self.weights = torch.nn.ParameterList(each.weight for each in (self.embedding, *others))

    def forward(self, x=None, chunk=0, positions=None, **batch):
        return Work.apply(self.recorder, x, self.weights[chunk])

    def hidden_shape(self, **batch):
        return SHAPE


class Batches:
    position_ids, dataset = None, RandomSamples(1, 1, 1)

    def __init__(self, num_microbatches: int):
        self.gradient_accumulation_steps = num_microbatches

    def __next__(self) -> dict:
        return {"input_ids": torch.zeros(SHAPE), "target_ids": None}


def mean_loss(out: torch.Tensor, *_) -> torch.Tensor:
    return out.mean()


def find_schedule(step: int, engine: str, num_chunks: int):
    if step in CHUNKED:
        return functools.partial(getattr(EXECUTORS[step]["virtual_stages"], engine), num_chunks=num_chunks)
    return getattr(EXECUTORS[step]["pipeline_parallel"], engine)


def run_rank(step: int, engine: str, m: int, recorder: Recorder, grid) -> None:
    """One optimizer step of one rank, from the connections on."""
    pipeline_parallel, wrap = EXECUTORS[step]["pipeline_parallel"], EXECUTORS[step]["data_parallel"].DataParallelBucket
    num_chunks = 2 if step in CHUNKED and grid.pp_world_size > 1 else 1
    schedule, batches = find_schedule(step, engine, num_chunks), Batches(m)
    stage = Stage(recorder, num_chunks, grid.pp_rank)
    if not (grid.pp_is_first_stage or grid.pp_is_last_stage):
        stage.embedding = None
    pipeline_parallel.connect_neighbours(*[num_chunks] * (step in CHUNKED))
    if step in CHUNKED:
        for name in ("is_first", "is_last"):
            setattr(stage, name, functools.partial(getattr(pipeline_parallel.PipelineParallel, name), stage))
    if step == 9:
        stages = [[f"stage{i}"] for i in range(grid.pp_world_size)]
        template = EXECUTORS[9]["data_parallel"].PipelineTemplate("stages", stages)
        model = wrap(stage, [template] * grid.dp_world_size, bucket_cap_mb=1)
        communication = pipeline_parallel.StageCommunication(torch.float32, CPU)
        pipeline_parallel.run_schedule(schedule, model, batches, mean_loss, [m] * grid.dp_world_size, communication)
    else:
        pipeline_parallel.run_schedule(schedule, wrap(stage), batches, SHAPE, CPU)


def record(step: int, engine: str, p: int, m: int, profiled: bool = False, dp: int = 1, one_group: bool = False,
           one_stream: bool = False, one_wrap: bool = False) -> list[list]:
    """What each rank issues. `one_group`: forward and backward in one; `one_stream`: see Recorder. `one_wrap`: forward
    in one, also from the last rank to the first. The second group that a rank makes is pp_group, the third
    pp_backward_group, the fourth pp_wrap_group.
    """
    programs, modules, world = [], EXECUTORS[step], Group("world", tuple(range(dp * p)))
    pipeline_parallel, grids = modules["pipeline_parallel"], modules["process_group_manager"]
    for rank in world.ranks:
        recorder = Recorder(rank, world, one_stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorder.as_cuda())
            for module in modules.values():
                stack.enter_context(mock.patch.object(module, "dist", recorder, create=True))
            grid = grids.ProcessGroupManager(*([[p] * dp, 1] if step == 9 else [dp, p, 1]))
            grid.pp_backward_group = grid.pp_group if one_group else grid.pp_backward_group
            grid.pp_wrap_group = grid.pp_group if one_wrap else getattr(grid, "pp_wrap_group", None)
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
@pytest.mark.parametrize("how", [{}, {"profiled": True}, {"dp": 2}, {"dp": 2, "one_stream": True},
                                 {"one_stream": True}], ids=str)
def test_no_deadlock(step, engine, how):
    """Replicas sum gradients while messages are under way; with one stream, receives and sends of a group share it.

    With one stream, a send of chunks could queue behind a receive whose message depends on it, once around all ranks:
    it needs a communicator for each pair of ranks, which is what torch makes for step 2's init_process_group().
    """
    for p, m in SAMPLED:
        if p * how.get("dp", 1) <= 8 and not (step in CHUNKED and "one_stream" in how and p > 2):
            replay(record(step, engine, p, m, **how))


@every_run
def test_timeline_notes_a_transfers_end_behind_it_and_not_on_the_gpus_own_stream(step, engine):
    """There it would come after all that is computed meanwhile, and nothing would seem to overlap."""
    for operations in record(step, engine, 2, 4, profiled=True, dp=2):
        labels = ("receive", "all-reduce in group")
        transfers = {i for i, each in enumerate(operations) if each.label.startswith(labels)}
        behind = [each.stream[1] for each in operations if each.label == "event" and each.stream != "compute"]
        assert len(behind) >= 4 and transfers.issuperset(behind)  # of four micro-batches


@contextlib.contextmanager
def synchronised_span(self, kind, microbatch=None, chunk=0):
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@every_run
def test_without_what_prevents_it_there_is_a_deadlock(step, engine):
    """One group for both directions: a stage's forward send queues behind the backward receive that it has posted
    early; so do, with two ranks, messages that wrap around. A timeline that synchronises waits for these receives.
    """
    modules = EXECUTORS[step]
    with pytest.raises(Deadlock, match="receive from 1 in group 2;(.|\n)*receive from 0 in group 2;"):
        replay(record(step, engine, 2, 2, one_group=True))
    if step in CHUNKED:
        with pytest.raises(Deadlock, match="in group 2;"):
            replay(record(step, engine, 2, 4, one_wrap=True))
    with (mock.patch.object(modules["pipeline_parallel"], "connect_neighbours"),
          pytest.raises(Deadlock, match="host at connect before")):
        replay(record(step, engine, 2, 2))
    with (mock.patch.object(modules["timeline"].Timeline, "span", synchronised_span),
          pytest.raises(Deadlock, match="rank 0: host at synchronize the device; receive from 1 in group (3|4)")):
        replay(record(step, engine, 2, 2, profiled=True))
