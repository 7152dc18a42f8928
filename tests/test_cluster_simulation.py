"""The simulated step against closed forms, and the simulated order against what is possible."""

import itertools

import pytest
from lab.launch import modules_of
from support.clusters import made_up_cluster

with modules_of(9):
    from planning.machines import Candidate, Cluster, Pipeline, Setting
    from planning.schedules import SCHEDULES, live_microbatches
    from planning.search import lower_bound
    from planning.simulate import peak_memory, simulate

both = pytest.mark.parametrize("schedule", ["afab", "1f1b"])
ONE = 1e-3 + 2e-3  # seconds of a layer, forward and backward, on a machine of speed 1


def simulated(options: dict, *pipelines: tuple, size: int = 1, **setting):
    cluster = Cluster(made_up_cluster(**options))
    return simulate(cluster, Candidate(tuple(Pipeline(*p) for p in pipelines), size), Setting(**setting))


@both
def test_uniform_stages(schedule):
    """(m + p - 1) (forward + backward) where transfers take no time, and the textbook's bubble. With recomputation a
    backward computes its stage's layers once more, and neither the embedding nor the head."""
    def step(p: int, m: int, recompute: bool, ends: float = 0.0):
        cluster = Cluster(made_up_cluster(**{"speeds": [1] * p, "parameters": 0, "ends": ends}))
        candidate = Candidate((Pipeline(tuple(range(p)), (8 // p,) * p, m),), 1)
        setting = Setting(schedule, recompute=recompute)
        result, bound = simulate(cluster, candidate, setting), lower_bound(cluster, candidate, setting)
        assert bound <= result.step_seconds * (1 + 1e-9)
        assert p > 1 or bound == pytest.approx(result.step_seconds)  # then nothing waits
        return result

    for p, m in itertools.product((1, 2, 4, 8), (1, 3, 8, 20)):
        for recompute in False, True:
            result, one = step(p, m, recompute), ONE + 1e-3 * recompute
            assert result.step_seconds == pytest.approx((m + p - 1) * 8 // p * one, rel=1e-6), (p, m)
            assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-6), (p, m)
            assert result.bytes_on_wire == 2 * m * (p - 1) * 4096
    assert step(1, 5, True, ends=4e-3).step_seconds == pytest.approx(5 * (8 * 4e-3 + 2 * 3 * 4e-3))


def test_slow_transfers():
    """Where a message takes far longer than any compute, AFAB's stages wait for the link: 2 m messages of 1 s each.

    1F1B lets one micro-batch into the second of two stages while another is on its way: the link's two directions.
    """
    options = {"speeds": [1e6, 1e6], "bandwidth": 4096.0, "parameters": 0}
    result = simulated(options, ((0, 1), (4, 4), 6), schedule="afab")
    assert result.step_seconds == pytest.approx(12, rel=1e-3)
    starts = [span.start for span in result.spans if span[:2] == (0, "F")]
    assert starts[4] < 0.1 and starts[5] >= 1  # four sends under way at most: the next action waits until one is over
    result = simulated(options, ((0, 1), (4, 4), 6))
    assert result.step_seconds == pytest.approx(7, rel=1e-3)  # F0, F1 with B0, ..., B5


def test_latency():
    """Nothing but latency: a micro-batch alone crosses p - 1 links forward and back, and then the loss is summed.

    Before the first message its sender hears that the receive is posted; the others are posted early enough.
    """
    result = simulated({"speeds": [1e9] * 4, "latency": 0.1, "parameters": 0}, ((0, 1, 2, 3), (2, 2, 2, 2), 1))
    assert result.step_seconds == pytest.approx(0.1 + 6 * 0.1 + 2 * 3 * 0.1, rel=1e-3)


@both
def test_the_order_is_possible(schedule):
    """Every action once; none before its input has arrived, no machine at two things, no message before it is made."""
    options = {"speeds": [4, 1, 3, 2], "ends": 2e-3, "bandwidth": 2e6, "latency": 1e-3, "tied": True}
    result = simulated(options, ((3, 0, 2), (3, 4, 1), 7), ((1,), (8,), 2), schedule=schedule)
    at = {span[:3]: span for span in result.spans}
    assert len(at) == len(result.spans) == 2 * (3 * 7 + 2)
    arrived = {(t.kind, t.microbatch, t.ranks[1]): t for t in result.transfers if t.kind != "all-reduce"}
    assert len(arrived) == 2 * 2 * 7
    chain = (3, 0, 2)
    for (kind, i, rank), transfer in arrived.items():
        assert abs(chain.index(rank) - chain.index(transfer.ranks[0])) == 1
        assert at[transfer.ranks[0], kind, i].end <= transfer.start
        alone = 4096 / 2e6
        assert alone + 1e-3 - 1e-9 <= transfer.end - transfer.start <= 2 * alone + 1e-3 + 1e-9
        assert transfer.end <= at[rank, kind, i].start
        order = list(SCHEDULES[schedule](chain.index(rank), 3, 7))
        if (k := order.index((kind, i))) >= 3:  # its receive is posted two actions before
            assert transfer.start >= at[(rank, *order[k - 3])].end
    for rank in range(4):
        spans = sorted(span[3:] for span in result.spans if span.rank == rank)
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:]))
        for i in range(7 if rank != 1 else 2):
            assert at[rank, "F", i].end <= at[rank, "B", i].start
    for stage, rank in enumerate(chain):
        own = sorted((span for span in result.spans if span.rank == rank), key=lambda span: span.start)
        assert [(span.kind, span.microbatch) for span in own] == list(SCHEDULES[schedule](stage, 3, 7))
    for i in range(7):  # the first stage has no input to wait for, nor the last a gradient
        assert ("F", i, 3) not in arrived and ("B", i, 2) not in arrived


def test_gradients_are_summed_by_their_owners():
    """Two pipelines cut in unlike places: each module's sum among those that hold it, after their last backward."""
    options = {"speeds": [1] * 4, "bandwidth": 1e6, "latency": 1e-3, "parameters": 1000}
    result = simulated(options, ((0, 1), (5, 3), 2), ((2, 3), (3, 5), 2))
    sums = [t for t in result.transfers if t.kind == "all-reduce"]
    assert {t.ranks for t in sums} == {(1, 3), (0, 3), (0, 2)}
    assert sum(t.num_bytes for t in sums) == 2 * 10 * 1000 * 4  # a ring of two sends every number once from each
    assert min(t.start for t in sums) < max(span.end for span in result.spans)  # backward goes on meanwhile
    for rank in range(4):
        own = sorted((t.start, t.end) for t in sums if rank in t.ranks)
        assert all(first[1] <= second[0] + 1e-12 for first, second in zip(own, own[1:]))
    backward = {span.rank: span for span in result.spans}  # the last of each rank
    for t in sums:  # a ring of two: half of the bytes, twice, and two latencies (more for a module of several buckets)
        assert t.start >= max(backward[rank].start + 2e-3 for rank in t.ranks)  # one layer's backward, at least
        assert t.end - t.start >= t.num_bytes / 2 / 1e6 + 2e-3 - 1e-12
    assert result.step_seconds == pytest.approx(max(t.end for t in sums) + 2 * 3 * 1e-3)


def test_the_time_of_gradients():
    """One-stage pipelines that wait for nothing but their sums: 2 (n - 1) / n of all bytes over the slowest link."""
    bandwidth = [[1e6] * 3, [1e6] * 3, [5e5, 1e6, 1e6]]
    options = {"speeds": [1e9] * 3, "bandwidth": bandwidth, "parameters": 25000}
    one_each = [((rank,), (8,), 1) for rank in range(3)]
    full = simulated(options, *one_each)
    num_bytes = 10 * 25000 * 4
    assert full.step_seconds == pytest.approx(4 / 3 * num_bytes / 5e5, rel=1e-4)
    assert full.bytes_on_wire == pytest.approx(4 * num_bytes)
    for dtype, ratio in ("bfloat16", 2), ("int8", 4 / (1 + 4 / 1024)):
        compressed = simulated(options, *one_each, gradient_wire_dtype=dtype)
        assert full.step_seconds / compressed.step_seconds == pytest.approx(ratio, rel=1e-4)


def test_tied_parameters():
    """A copy at each end of a pipeline, summed among them after all else; one copy where both ends are one stage."""
    options = {"speeds": [1] * 3, "bandwidth": 1e6, "tied": True}
    tied = simulated(options, ((0, 1, 2), (3, 3, 2), 2))
    assert [t.ranks for t in tied.transfers if t.kind == "all-reduce"] == [(0, 2)]
    assert not [t for t in simulated(options, ((0,), (8,), 2)).transfers]
    last = [t for t in simulated(options, ((0, 1), (4, 4), 2), ((2,), (8,), 2)).transfers if t.kind == "all-reduce"][-1]
    assert last.ranks == (0, 1, 2) and last.num_bytes == 2 * 2 * 1000 * 4
    cluster = Cluster(made_up_cluster(**options))
    assert [cluster.parameters_of(stage) for stage in cluster.stages((3, 3, 2))] == [4000, 3000, 3000]
    assert cluster.parameters_of(cluster.stages((8,))[0]) == 9000


@both
def test_memory(schedule):
    """16 bytes a parameter in float32, a micro-batch's activations as often as the schedule holds them."""
    cluster = Cluster(made_up_cluster([1] * 4, parameters=1000, saved_bytes=100.0))
    for p, m, layers in ((1, 5, (8,)), (2, 5, (5, 3)), (4, 2, (2, 2, 2, 2)), (4, 9, (1, 1, 1, 5))):
        peaks = peak_memory(cluster, Pipeline(tuple(range(p)), layers, m), 2, Setting(schedule))
        for s in range(p):
            live = m if schedule == "afab" else min(p - s, m)
            held = layers[s] + (s == 0) + (s == p - 1)
            saved = 2 * 100 * (held + (s == p - 1))  # the final norm saves too, and has no parameters here
            assert live_microbatches(schedule, s, p, m) == live
            assert peaks[s] == 16 * 1000 * held + live * saved + (4 * 2 * 4096 if p > 1 else 0), (p, m, s)


def test_memory_with_recomputing():
    """A live micro-batch keeps its layers' inputs and what the ends save; one layer in backward keeps all."""
    cluster = Cluster(made_up_cluster([1] * 2, parameters=1000, saved_bytes=30000.0))
    peaks = peak_memory(cluster, Pipeline((0, 1), (5, 3), 6), 2, Setting(recompute=True))
    state, layer, messages = 16 * 1000, 2 * (30000 - 4096), 4 * 2 * 4096
    assert peaks == [6 * state + 2 * 2 * (5 * 4096 + 30000) + layer + messages,
                     4 * state + 2 * (3 * 4096 + 2 * 30000) + messages]  # the head's are more, and gone before
