"""How many messages each topology sends in one optimizer step, and their bytes: what the steps' READMEs promise."""

from collections import Counter

import pytest
from lab.baton import Handle
from lab.program import Program
from lab.ranks import run, threads
from lab.thread_ranks import SendHandle, World
from lab.watch.messages import Messages

LAYERS, D, V, I, KV = 4, 128, 1024, 352, 64  # of the tiny Llama: KV is the width of all key/value heads
B, T, M = 2, 16, 4  # samples, tokens, micro-batches
HIDDEN = B * T * D  # numbers of the hidden states
LAYER = 2 * D + 2 * D * D + 2 * D * KV + 3 * D * I  # parameters
WHOLE = LAYERS * LAYER + D + 2 * V * D


def count(step: int, ranks: int, *flags, seq_len: int = T, dtype: str = "float32") -> list[Counter]:
    """Of each rank. Of a collective, each rank gives as many bytes as it sends where messages go around a ring."""
    pipelines = ["--gradient_accumulation_steps", M] if "--pipelines" not in flags else ["--num_microbatches", M]
    flags = ["--num_hidden_layers", LAYERS, "--micro_batch_size", B, "--seq_len", seq_len, "--dtype", dtype,
             "--max_tokens", 2 * ranks * B * seq_len * M, *pipelines, *flags]
    [messages] = run(Program(step, flags), threads(ranks), [Messages()]).watches
    return messages.of_a_step()


def take(found: Counter, kind: str) -> Counter:
    """Those of a kind, which are no longer in `found`."""
    taken = Counter({key: number for key, number in found.items() if key[0] == kind})
    found -= taken
    return taken


def total_bytes(messages: Counter) -> int:
    return sum(size * number for (*_, size), number in messages.items())


def test_tensor_parallelism_sums_four_times_a_layer():
    """Four sums a layer and micro-batch, one for the embedding and one for the projection's input, and the loss's two:
    the largest logits, and two numbers a token.
    """
    for rank, found in enumerate(count(4, 2, "--tp_size", 2)):
        sums = {HIDDEN * 4: M * (4 * LAYERS + 2), B * T * 4: M, 2 * B * T * 4: M}
        assert found == {(kind, (0, 1), 1 - rank, size): number for size, number in sums.items()
                         for kind in ("send", "receive")}, rank


def test_sequence_parallelism_sends_as_many_bytes():
    """Eight half-collectives a layer and micro-batch, two for the embedding and two for the projection's input: in
    each, a rank sends half of the tokens to the other one. The loss's two sums are those of tensor parallelism, and
    once a step there is one for the norms. Together, as many bytes as tensor parallelism's sums by the ring.
    """
    for rank, found in enumerate(count(14, 2, "--tp_size", 2, "--sequence_parallel")):
        norms = (2 * LAYERS + 1) * D * 4
        calls = {HIDDEN // 2 * 4: M * (8 * LAYERS + 4), B * T * 4: M, 2 * B * T * 4: M, norms: 1}
        assert found == {(kind, (0, 1), 1 - rank, size): number for size, number in calls.items()
                         for kind in ("send", "receive")}, rank
        sent = total_bytes(take(found, "send"))
        assert sent == pytest.approx(M * (4 * LAYERS + 2) * HIDDEN * 4, rel=0.02), rank  # without the loss's


@pytest.mark.parametrize("step, flags", [
    (7, []), (8, ["--pp_engine", "1f1b"]), (9, ["--pipelines", "2,2"]),
    (10, ["--pp_engine", "zb"]), (11, ["--pp_engine", "interleaved", "--virtual_stages", 2])])
def test_what_has_been_sent_is_let_go(monkeypatch, step, flags):
    """The most tensors that a stage keeps behind one of its sends, of 16 micro-batches: not the last 2 p, where handles
    say that they are completed, as NCCL's do."""
    monkeypatch.setattr(SendHandle, "is_completed", Handle.is_completed)

    def prepare(modules, rank: int) -> None:
        communication = modules.pipeline_parallel.StageCommunication
        send = communication.send
        communication.send = lambda self, *args: (send(self, *args), kept.append(len(self.sending)))

    kept, sizes = [], ["--pp_size", 2, "--gradient_accumulation_steps", 16]
    flags = [*(sizes if step != 9 else ["--num_microbatches", 16]), *flags, "--max_tokens", 256]
    run(Program(step, flags), threads(2), prepare=prepare)
    assert len(kept) >= 32 and max(kept) <= 1, kept


@pytest.mark.parametrize("size, seq_len, dtype, itemsize", [(3, 24, "float32", 4), (2, T, "bfloat16", 2)])
def test_context_parallelism_sends_keys_and_values_around(size, seq_len, dtype, itemsize):
    """In a layer, P - 1 hops forward and as many backward, and P of the gradients, which are float32."""
    numbers, everyone = 2 * B * seq_len // size * KV, tuple(range(size))
    for rank, found in enumerate(count(15, size, "--cp_size", size, seq_len=seq_len, dtype=dtype)):
        assert total_bytes(take(found, "all_reduce")) == pytest.approx(4 * WHOLE * 2 * (size - 1) / size)
        expected = Counter()
        for kind, peer in (("send", (rank + 1) % size), ("receive", (rank - 1) % size)):
            expected[kind, everyone, peer, numbers * itemsize] += LAYERS * M * 2 * (size - 1)
            expected[kind, everyone, peer, numbers * 4] += LAYERS * M * size
        assert found == expected, rank


@pytest.mark.parametrize("step, number", [(5, 39), (6, 7)])
def test_data_parallelism_sums_each_gradient_once(step, number):
    """Once an optimizer step, not once a micro-batch: one by one, or in seven buckets."""
    for found in count(step, 2, "--dp_size", 2):
        gradients = take(found, "all_reduce")
        assert not found and gradients.total() == number and total_bytes(gradients) == 4 * WHOLE


@pytest.mark.parametrize("zero, shares, times", [(1, [1, 1], 1), (1, [4, 2, 1], 1), (2, [1, 1, 1], M)])
def test_zero_scatters_gradients_and_gathers_weights(zero, shares, times):
    """A rank with the share s of N ranks' total of 1 receives its shard's gradients from all others, (N-1) s, once or
    after each micro-batch, and then the weights that it has not updated, 1 - s. What it sends is the other way round.
    """
    flags = ["--zero_shares", ",".join(map(str, shares))] if zero == 1 else []
    for rank, found in enumerate(count(12, len(shares), "--dp_size", len(shares), "--zero", zero, *flags)):
        own, others = shares[rank] / sum(shares), len(shares) - 1
        for kind, gradients, weights in (("receive", others * own, 1 - own), ("send", 1 - own, others * own)):
            expected = 4 * WHOLE * (times * gradients + weights)
            assert total_bytes(take(found, kind)) == pytest.approx(expected, rel=1e-3), (rank, kind)
        assert not found, "nothing else"


@pytest.mark.parametrize("ranks, dtype, itemsize, flags", [
    (3, "float32", 4, []), (2, "bfloat16", 2, []), (2, "bfloat16", 2, ["--gather_once"]),
    (4, "float32", 4, ["--shard_size", 2])])
def test_fsdp_gathers_weights_twice_a_micro_batch(ranks, dtype, itemsize, flags):
    """The last layer's once, and the rest's once a step. Weights of layers travel in the activations' dtype, all else
    in float32. --gather_once gathers all of them once a step, and scatters once. Of groups of ranks with the same
    shards, each sends as much as if it were alone, and the sum of its shard's gradient once a step.
    """
    rest, once = WHOLE - LAYERS * LAYER, "--gather_once" in flags
    size = 2 if "--shard_size" in flags else ranks
    layers = itemsize * (LAYERS if once else M * (2 * LAYERS - 1)) * LAYER
    expected = (size - 1) / size * (layers + 4 * rest + (1 if once else M) * 4 * WHOLE)
    for rank, found in enumerate(count(13, ranks, "--dp_size", ranks, "--zero", 3, *flags, dtype=dtype)):
        for kind in ("receive", "send"):
            assert total_bytes(take(found, kind)) == pytest.approx(expected, rel=1e-3), (rank, kind)
        copies = total_bytes(take(found, "all_reduce"))
        assert copies == pytest.approx(4 * WHOLE / size if size < ranks else 0, rel=1e-3), rank
        assert not found, "nothing else"


@pytest.mark.parametrize("step, zero", [(12, 1), (13, 3), (14, 2), (15, 3), (16, 1)])
def test_connections_between_replicas_are_open_before_the_first_message(step, zero):
    """In the middle of a step, NCCL would let both sides wait for each other, and one may wait for its pipeline."""
    flags = ["--dp_size", 2, "--pp_size", 2, "--zero", zero, "--num_hidden_layers", 2, "--micro_batch_size", 1,
             "--seq_len", T, "--max_tokens", 4 * T, "--gradient_accumulation_steps", 2]
    world = run(Program(step, flags), threads(4)).world
    for rank in range(4):
        kinds = [event[1] for event in world.events if event.rank == rank and event[2] == (rank % 2, rank % 2 + 2)]
        kinds = [kind for kind in kinds if kind != "receive"]
        assert "all_to_all_single" in kinds[: kinds.index("send")], rank


def test_rows_travel_to_experts_and_back():
    """Each token chooses all four experts, so half of its rows leave: there and back, forward and backward.

    Experts are summed over two ranks of four, and the rest over all.
    """
    mlps, loads = LAYERS * 3 * D * I, 8 * LAYERS * 4  # loads: how many rows each expert got, in int64
    others = WHOLE - mlps + LAYERS * 4 * D  # and the routers
    flags = ["--dp_size", 4, "--ep_size", 2, "--num_experts", 4, "--experts_per_token", 4]
    for rank, found in enumerate(count(16, 4, *flags)):
        travelling = total_bytes(take(found, "all_to_all_single"))
        assert travelling == LAYERS * M * 4 * (2 - 1) / 2 * B * T * 4 * D * 4, rank
        for group, expected in (((rank % 2, rank % 2 + 2), 4 * mlps * 4 // 2), ((0, 1, 2, 3), 4 * others + loads)):
            sums = Counter({key: number for key, number in found.items() if key[:2] == ("all_reduce", group)})
            assert total_bytes(sums) == expected * 2 * (len(group) - 1) / len(group), (rank, group)
            found -= sums
        assert not found, rank


@pytest.mark.parametrize("step, flags", [(7, ["--pp_size", 4]), (9, ["--pipelines", "1,2,1"])])
def test_pipelines_send_hidden_states_and_their_gradients(step, flags):
    """One message a micro-batch in each direction between neighbours."""
    ranks = count(step, 4 if step == 7 else 3, *flags)
    everyone = tuple(range(len(ranks)))
    for rank, found in enumerate(ranks):
        assert found == {(kind, everyone, peer, HIDDEN * 4): M for peer in (rank - 1, rank + 1) if peer in everyone
                         for kind in ("send", "receive")}, rank
