"""Smaller messages: what travels as bfloat16 or int8 is rounded no more than it says, and training stays as it was."""

import json
import math
import shutil

import pytest
import torch
from lab.launch import ROOT, modules_of, start
from lab.ranks import processes
from support.recordings import record

SCRIPT = ROOT / "cluster" / "train_distributed.py"
SHAPES = [(2, 3, 7), (3, 1024), (5, 1)]
STEPS_TRAINED, SEQ_LEN = 6, 16
COMMON = ["--num_hidden_layers", 4, "--seq_len", SEQ_LEN, "--batch_size", 2, "--max_steps", STEPS_TRAINED]
UNLIKE = ["--pipelines", "4;3,1", "--num_microbatches", "6,2"]
RUNS = {  # name -> ranks, flags
    "unlike": (3, UNLIKE),
    "unlike-int8": (3, [*UNLIKE, "--wire_dtype", "int8", "--gradient_wire_dtype", "int8"]),
    "gradients-int8": (3, [*UNLIKE, "--gradient_wire_dtype", "int8"]),
}


@pytest.fixture(scope="module")
def wire():
    with modules_of(9):
        from run import compression
        yield compression


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """recorded(name): the Run. All runs are started together."""
    folder = tmp_path_factory.mktemp("wire")
    shutil.copytree(ROOT / "assets" / "tiny_llama", folder / "model_tied")
    config = json.loads((folder / "model_tied" / "config.json").read_text())
    (folder / "model_tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    futures, model = {}, ["--model_name", folder / "model_tied"]
    for name, (ranks, flags) in RUNS.items():
        more = [*model, "--checkpoint_dir", folder / name]
        futures[name] = start(record, SCRIPT, [*COMMON, *flags, *more], processes(ranks))
    return lambda name: futures[name].result()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding(wire, shape, source):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(1e3).to(source)
    x.view(-1, shape[-1])[0] = 0  # a row of zeros has no scale to divide by
    for name, dtype in wire.WIRE_DTYPES.items():
        message = wire.encode(x, dtype)
        assert message.is_contiguous() and message.shape == (wire.message_bytes(shape, dtype),)
        assert message.dtype == torch.uint8
        size, rows = x.numel(), math.prod(shape[:-1])
        assert message.nbytes == {"float32": 4 * size, "bfloat16": 2 * size, "int8": size + 4 * rows}[name]
        back = wire.decode(message, shape, dtype, source)
        largest = x.double().abs().amax(-1, keepdim=True)
        allowed = {"float32": 2**-24 * x.double().abs(), "bfloat16": 2**-8 * x.double().abs(),
                   "int8": largest / 254 * (1 + 1e-5)}[name]
        if source == torch.bfloat16:  # the result is rounded once more
            allowed = allowed + 2**-8 * largest
        assert back.dtype == source and back.shape == x.shape
        assert ((back.double() - x.double()).abs() <= allowed).all()
        assert back.view(-1, shape[-1])[0].eq(0).all()
        if dtype == source:
            assert message.data_ptr() == x.data_ptr(), "a copy, where nothing has to change"


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e300])
def test_what_is_not_finite_stays_so(wire, bad):
    """In float32 1e300 is none either."""
    x = torch.ones(3, 5, dtype=torch.float64)
    x[1, 2] = bad
    for dtype in wire.WIRE_DTYPES.values():
        back = wire.decode(wire.encode(x, dtype), x.shape, dtype, torch.float32)
        assert not back[1, 2].isfinite() and back[[0, 2]].eq(1).all(), (bad, dtype)


def test_losses_stay_near_those_in_full_precision(recorded):
    """At least so far apart as well: else nothing was rounded."""
    full, rounded = ([row["loss"] for row in recorded(name).rows] for name in ("unlike", "unlike-int8"))
    off = max(abs(a - b) for a, b in zip(full, rounded))
    assert len(rounded) == STEPS_TRAINED and 1e-4 < off < 0.03, off
    assert rounded[-1] < rounded[0] - 0.3


def test_gradients_alone_are_rounded(recorded):
    """The first loss has the same bits. Each gradient is off by a part of the largest number of its row."""
    full, rounded = recorded("unlike"), recorded("gradients-int8")
    assert full.rows[0]["loss"] == rounded.rows[0]["loss"]
    for expected, found in zip(full.ranks, rounded.ranks, strict=True):
        for key, exact in expected["grads"].items():
            off = (found["grads"][key] - exact).abs().max() / exact.abs().max()
            assert 1e-3 < off < 0.1, (key, off)


def test_copies_of_a_parameter_keep_the_same_bits(recorded):
    """Those in the two pipelines, and at both ends of one: what all have summed is what all have decoded."""
    copies: dict = {}
    for rank in recorded("unlike-int8").ranks:
        for key, tensor in rank["final"].items():
            copies.setdefault(key.replace("final_proj", "embedding"), []).append((tensor, rank["grads"][key]))
    assert len(copies) > 30
    for key, found in copies.items():
        assert len(found) == (3 if key == "embedding.weight" else 2), key
        assert all(torch.equal(one, found[0][i]) for pair in found for i, one in enumerate(pair)), key


def test_gradients_that_are_not_finite_reach_all(run_code):
    """A NaN of one rank ends up in everyone's sum; buffers shorter than one row a rank, and odd, sum up right."""
    run_code("cluster", 3, """
import torch, torch.distributed as dist
from run.compression import ROW, CompressedAllReduce
dist.init_process_group("gloo")
rank = dist.get_rank()
for size in (1, 5, 3 * ROW, 7 * ROW + 3):
    for dtype, allowed in ((torch.int8, 2 / 127), (torch.bfloat16, 2 / 256), (torch.float32, 1e-6)):
        exact = torch.stack([torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(3)])
        both = []
        for poison in (False, True):
            buffer = exact[rank].clone()
            if poison and rank == 1:
                buffer[size // 2] = float("nan")
            both.append((buffer, CompressedAllReduce(buffer, dist.group.WORLD, dtype)))  # two under way at once
        for _, handle in both:
            handle.gather()
        for _, handle in both:
            handle.wait()
        off = (both[0][0] - exact.sum(0)).abs().max() / exact.abs().max()
        assert off <= 2 * allowed, (size, dtype, off)
        assert both[1][0][size // 2].isnan() and (size <= ROW or both[1][0][-1].isfinite()), (size, dtype)
        everyone = [torch.empty_like(both[0][0]) for _ in range(3)]
        dist.all_gather(everyone, both[0][0])
        assert all(torch.equal(one, everyone[0]) for one in everyone)
dist.destroy_process_group()
""")


def test_int8_and_the_sums_of_a_routers_loss(wire, world_of_one):
    from transformers import MixtralConfig

    plugin, config = wire.HeterogeneousParallelPlugin(), MixtralConfig(output_router_logits=True)
    wire.compress(plugin, config, "bfloat16")
    with pytest.raises(ValueError, match="int8 is too coarse for the sums of a router's loss"):
        wire.compress(plugin, config, "int8")
