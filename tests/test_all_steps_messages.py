"""How many messages each topology sends in one optimizer step, and their bytes: what the steps' READMEs promise."""

import json
from collections import Counter

import pytest
from launch import ROOT, STEPS, start_fork

SCRIPT = ROOT / "tests" / "support" / "count_messages.py"
LAYERS, D, V, I, KV = 8, 128, 1024, 352, 64  # of the tiny Llama: KV is the width of all key/value heads
B, T, M = 2, 16, 4  # samples, tokens, micro-batches
HIDDEN = B * T * D  # numbers of the hidden states
LAYER = 2 * D + 2 * D * D + 2 * D * KV + 3 * D * I  # parameters
WHOLE = LAYERS * LAYER + D + 2 * V * D
RUNS = {  # name -> step, ranks, flags
    "tp2": (4, 2, ["--tp_size", 2]),
    "dp2-naive": (5, 2, ["--dp_size", 2]),
    "dp2-bucket": (6, 2, ["--dp_size", 2]),
    "dp2-zero1": (12, 2, ["--dp_size", 2, "--zero", 1]),
    "dp3-zero1-shares": (12, 3, ["--dp_size", 3, "--zero", 1, "--zero_shares", "4,2,1"]),
    "dp3-zero2": (12, 3, ["--dp_size", 3, "--zero", 2]),
    "dp3-zero3": (13, 3, ["--dp_size", 3, "--zero", 3]),
    "dp2-zero3-bfloat16": (13, 2, ["--dp_size", 2, "--zero", 3, "--dtype", "bfloat16"]),
    "tp2-sp": (14, 2, ["--tp_size", 2, "--sequence_parallel"]),
    "cp3": (15, 3, ["--cp_size", 3, "--seq_len", 24]),
    "cp2-bfloat16": (15, 2, ["--cp_size", 2, "--cp_layout", "contiguous", "--dtype", "bfloat16"]),
    "dp4-ep2": (16, 4, ["--dp_size", 4, "--ep_size", 2, "--num_experts", 4, "--experts_per_token", 4]),
    "pp4": (7, 4, ["--pp_size", 4]),
    "three-stages": (9, 3, ["--pipelines", "3,2,3", "--wire_dtype", "bfloat16"]),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory, selected):
    """counted(name): of each rank, Counter of (function, group, peer, bytes) in the second optimizer step."""
    folder, futures = tmp_path_factory.mktemp("messages"), {}
    for name in selected("name"):
        step, ranks, flags = RUNS[name]
        if step == 9:
            train = ROOT / "cluster" / "train_distributed.py"
            flags = [*flags, "--batch_size", B, "--gradient_accumulation", M, "--max_steps", 2,
                     "--checkpoint_dir", folder / "checkpoints"]
        else:
            train = STEPS[str(step)] / "train.py"
            flags = [*flags, "--micro_batch_size", B, "--gradient_accumulation_steps", M,
                     "--max_tokens", 2 * ranks * B * T * M]
        futures[name] = start_fork(step, ranks, folder / name, train, "--seq_len", T, *flags, "--log_dir", folder,
                                   "--run_name", name, script=SCRIPT)

    def counted(name: str) -> list[Counter]:
        futures[name].result()
        files = sorted((folder / name).glob("rank*.json"))
        assert len(files) == RUNS[name][1]
        return [Counter({tuple(key): count for *key, count in json.loads(path.read_text())}) for path in files]

    return counted


def pipeline(previous: int | None, following: int | None, itemsize: int) -> Counter:
    """One message a micro-batch in each direction between neighbours."""
    messages = {}
    if previous is not None:
        messages |= {("irecv", "pp_group", previous): M, ("isend", "pp_backward_group", previous): M}
    if following is not None:
        messages |= {("isend", "pp_group", following): M, ("irecv", "pp_backward_group", following): M}
    return Counter({(*key, HIDDEN * itemsize): count for key, count in messages.items()})


def split_by_group(found: Counter) -> tuple[Counter, Counter]:
    """The all-reduces of the dp group, and all other messages."""
    data_parallel = Counter({key: count for key, count in found.items() if key[:2] == ("all_reduce", "dp_group")})
    return data_parallel, found - data_parallel


def total_bytes(messages: Counter) -> int:
    return sum(size * count for (*_, size), count in messages.items())


@pytest.mark.parametrize("name", ["tp2"])
def test_tensor_parallelism_sums_four_times_a_layer(counted, name):
    """Four sums a layer and micro-batch, one for the embedding and one for the projection's input, and the loss's two:
    the largest logits, and two numbers a token.
    """
    for rank, found in enumerate(counted(name)):
        sums = {HIDDEN * 4: M * (4 * LAYERS + 2), B * T * 4: M, 2 * B * T * 4: M}
        assert found == Counter({(function, "tp_group", 1 - rank, size): count for size, count in sums.items()
                                 for function in ("isend", "recv")}), rank


@pytest.mark.parametrize("name", ["tp2-sp"])
def test_sequence_parallelism_sends_as_many_bytes(counted, name):
    """Eight half-collectives a layer and micro-batch, two for the embedding and two for the projection's input: in
    each, a rank sends half of the tokens to the other one. The loss's two sums are those of tensor parallelism, and
    once a step there is one for the norms. Together, as many bytes as tensor parallelism's sums by the ring.
    """
    for rank, found in enumerate(counted(name)):
        norms = (2 * LAYERS + 1) * D * 4
        calls = {(function, "tp_group", 1 - rank, HIDDEN // 2 * 4): M * (8 * LAYERS + 4)
                 for function in ("isend", "irecv")}
        calls |= {(function, "tp_group", 1 - rank, size): count for function in ("isend", "recv")
                  for size, count in {B * T * 4: M, 2 * B * T * 4: M, norms: 1}.items()}
        assert found == Counter(calls), rank
        sent = total_bytes(Counter({key: count for key, count in found.items() if key[0] == "isend"}))
        assert sent == pytest.approx(M * (4 * LAYERS + 2) * HIDDEN * 4, rel=0.02), rank  # without the loss's


@pytest.mark.parametrize("name, size, seq_len, itemsize", [("cp3", 3, 24, 4), ("cp2-bfloat16", 2, T, 2)])
def test_context_parallelism_sends_keys_and_values_around(counted, name, size, seq_len, itemsize):
    """In a layer, P - 1 hops forward and as many backward, and P of the gradients, which are float32."""
    numbers = 2 * B * seq_len // size * KV
    for rank, found in enumerate(counted(name)):
        expected = Counter()
        for function, peer in (("isend", (rank + 1) % size), ("irecv", (rank - 1) % size)):
            expected[function, "cp_group", peer, numbers * itemsize] += LAYERS * M * 2 * (size - 1)
            expected[function, "cp_group", peer, numbers * 4] += LAYERS * M * size
        ring = Counter({key: count for key, count in found.items() if key[1] == "cp_group"})
        assert ring == expected, rank
        gradients = found - ring
        assert {key[:2] for key in gradients} == {("all_reduce", "cp_dp_group")}
        assert total_bytes(gradients) == 4 * WHOLE


@pytest.mark.parametrize("name, number", [("dp2-naive", 75), ("dp2-bucket", 8)])
def test_data_parallelism_sums_each_gradient_once(counted, name, number):
    """Once an optimizer step, not once a micro-batch: one by one, or in eight buckets."""
    for found in counted(name):
        gradients, others = split_by_group(found)
        assert not others and gradients.total() == number and total_bytes(gradients) == 4 * WHOLE


@pytest.mark.parametrize("name, shares, times", [
    ("dp2-zero1", [1, 1], 1), ("dp3-zero1-shares", [4, 2, 1], 1), ("dp3-zero2", [1, 1, 1], M)])
def test_zero_scatters_gradients_and_gathers_weights(counted, name, shares, times):
    """A rank with the share s of N ranks' total of 1 receives its shard's gradients from all others, (N-1) s, once or
    after each micro-batch, and then the weights that it has not updated, 1 - s. What it sends is the other way round.
    """
    for rank, found in enumerate(counted(name)):
        gradients, others = split_by_group(found)
        own, others_too = shares[rank] / sum(shares), len(shares) - 1
        sums, weights = (4 * WHOLE * part for part in (times * others_too * own, 1 - own))
        back, ahead = (4 * WHOLE * part for part in (times * (1 - own), others_too * own))
        for function, expected in (("irecv", sums + weights), ("isend", back + ahead)):
            calls = Counter({key: n for key, n in found.items() if key[:2] == (function, "dp_group")})
            assert total_bytes(calls) == pytest.approx(expected, rel=1e-3), (rank, function)
            found -= calls
        assert not found, "nothing else"


@pytest.mark.parametrize("name, ranks, itemsize", [("dp3-zero3", 3, 4), ("dp2-zero3-bfloat16", 2, 2)])
def test_fsdp_gathers_weights_twice_a_micro_batch(counted, name, ranks, itemsize):
    """The last layer's and the rest's once. Weights of layers travel in the activations' dtype, all else in float32."""
    rest = WHOLE - LAYERS * LAYER
    layers = itemsize * (2 * LAYERS - 1) * LAYER
    expected = M * (ranks - 1) / ranks * (layers + 4 * rest + 4 * WHOLE)
    assert itemsize < 4 or expected < 3 * M * (ranks - 1) / ranks * 4 * WHOLE
    for rank, found in enumerate(counted(name)):
        for function in ("irecv", "isend"):
            calls = Counter({key: n for key, n in found.items() if key[:2] == (function, "dp_group")})
            assert total_bytes(calls) == pytest.approx(expected, rel=1e-3), (rank, function)
            found -= calls
        assert not found, "nothing else"


@pytest.mark.parametrize("name", ["dp4-ep2"])
def test_rows_travel_to_experts_and_back(counted, name):
    """Each token chooses all four experts, so half of its rows leave: there and back, forward and backward.

    Experts are summed over two ranks of four, and the rest over all.
    """
    loads = ("all_reduce", "cp_dp_group", None, 8 * LAYERS * 4)  # how many rows each expert got, in int64
    for rank, found in enumerate(counted(name)):
        travelling = Counter({key: n for key, n in found.items() if key[:2] == ("all_to_all_single", "ep_group")})
        assert total_bytes(travelling) == LAYERS * M * 4 * (2 - 1) / 2 * B * T * 4 * D * 4, rank
        found -= travelling
        mlps = LAYERS * 3 * D * I
        others = WHOLE - mlps + LAYERS * 4 * D  # and the routers
        for group, numbers in (("expert_dp_group", mlps * 4 // 2), ("cp_dp_group", others)):
            sums = Counter({key: n for key, n in found.items() if key[:2] == ("all_reduce", group) and key != loads})
            assert total_bytes(sums) == 4 * numbers, (rank, group)
            found -= sums
        assert found == Counter({loads: 1}), rank


@pytest.mark.parametrize("name, itemsize", [
    ("pp4", 4), pytest.param("three-stages", 2, marks=pytest.mark.slow)])
def test_pipelines_send_hidden_states_and_their_gradients(counted, name, itemsize):
    ranks = counted(name)
    for rank, found in enumerate(ranks):
        following = rank + 1 if rank + 1 < len(ranks) else None
        assert found == pipeline(rank - 1 if rank else None, following, itemsize), rank
