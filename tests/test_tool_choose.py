"""choose.py: its formulas against the schedules, the planner and real runs of the steps; the page computes the same."""

import pytest
import torch
from lab.launch import modules_of
from lab.program import Program
from lab.ranks import run, threads
from lab.watch.kept import Kept
from lab.watch.messages import Messages
from test_tool_site_scripts import needs_node, node

with modules_of(9):
    import choose
    import model
    import utils
    from planning.machines import Cluster, Pipeline, Setting
    from planning.module_memory import saved_bytes
    from planning.simulate import peak_memory
    from sizes import split_memory, splits
    from sizes.data_sheets import PRESETS, Shape, kept_by_layer, parse_nodes, synthetic_cluster
    from sizes.splits import Job, Split
SCHEDULES = Program(11).load().virtual_stages.SCHEDULES
TINY = Shape(128, 352, 8, 8, 4, 1024, False, 16)
JOB = Job(TINY, seq_len=16, global_batch=8, micro_batch=2, dtype="float32", ranks=4, per_machine=8, memory=72e9,
          inside=360e9, between=40e9, flops=692e12, is_gpu=False)
LARGE = JOB._replace(shape=PRESETS["llama-70b"], seq_len=4096, global_batch=512, micro_batch=1, dtype="bfloat16",
                     ranks=64, is_gpu=True)


@pytest.mark.parametrize("device, dtype", [("cpu", "float32"), ("cpu", "bfloat16"),
                                           *[("cuda", "bfloat16")] * torch.cuda.is_available()])
def test_what_a_layer_keeps_is_what_torch_keeps(device, dtype):
    """Counted by hooks. Without a GPU, what its kernels need is what the signatures of their backwards say."""
    config = utils.load_config(utils.TINY_LLAMA, num_attention_heads=None)
    layer, dtype = model.DecoderLayer(config).to(device), getattr(torch, dtype)
    x = torch.randn(2, 96, TINY.hidden, dtype=dtype, device=device, requires_grad=True)
    cos, sin = model.get_cos_sin(96, TINY.head_dim, dtype, x.device, rope_theta=1e4)
    with model.cast_weights_once():
        layer(x, cos, sin)  # makes the copies of the weights, which are shared by all micro-batches
        found = saved_bytes(lambda: layer(x, cos, sin), [*layer.parameters(), *model.casts.values()])
    kept = 2 * 96 * sum(kept_by_layer(TINY, 1, dtype.itemsize, device == "cuda").values())
    assert found - 2 * cos.nbytes == pytest.approx(kept, rel=1e-3)
    for call, needed in ((torch.ops.aten._fused_rms_norm_backward, ["input", "rstd", "weight"]),
                         (torch.ops.aten._scaled_dot_product_flash_attention_backward,
                          ["query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "philox_seed",
                           "philox_offset"])):  # the last four are empty, or a few numbers of dropout
        arguments = call.default._schema.arguments[1:]
        assert [each.name for each in arguments if "Tensor" in str(each.type)] == needed
    assert sum(kept_by_layer(PRESETS["llama-2-7b"], 1, 2, True).values()) == 153736
    assert sum(kept_by_layer(PRESETS["llama-2-7b"], 1, 2, False).values()) == 202888


def test_the_number_of_chunks_alive_is_that_of_the_schedules():
    cases = [(engine, p, v, m, rank) for engine in splits.ENGINES for p in range(2, 9) for m in range(p, 25)
             for v in ((2, 3, 4) if engine.startswith("inter") else (1,)) for rank in range(p)]
    for engine, p, v, m, rank in cases:
        actions = list(SCHEDULES[engine](rank, p, m, *([v] if v > 1 else [])))
        last = "W" if any(action.kind == "W" for action in actions) else "B"
        alive, most, before = {"F": 0, "B": 0, "W": 0}, 0, 0
        for action in actions:
            alive[action.kind] += 1
            most, before = max(most, alive["F"] - alive[last]), max(before, alive["F"] - alive["B"])
        for_b, layers, for_w = split_memory.alive(Split(1, 1, p, engine, 0), rank, m, [1] * v)
        assert layers == for_b
        assert (for_b, for_b + for_w) == (before, most), (engine, p, v, m, rank)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_that_of_the_planner(dtype, recompute):
    """Where both know the split. The planner leaves out what a backward needs besides what is kept for it."""
    for name, tp, pp, size in [("llama-1b", 1, 4, 2), ("llama-70b", 8, 8, 1), ("llama-8b", 2, 1, 1)]:
        job = LARGE._replace(shape=PRESETS[name], dtype=dtype, recompute=recompute, micro_batch=size, ranks=tp * pp)
        split, m = Split(1, tp, pp, "1f1b" if pp > 1 else "-", 0), 512 // size
        layers = tuple(splits.layers_of(job, split, rank) for rank in range(pp))
        cluster = Cluster(synthetic_cluster(job.shape, parse_nodes("8xH100:8") * pp, tp, 4096, dtype, [size]))
        expected = peak_memory(cluster, Pipeline(tuple(range(pp)), layers, m), size, Setting(recompute=recompute))
        found = [sum(split_memory.held(job, split, rank, m).values()) for rank in range(pp)]
        assert all(0.89 * ours < theirs < 1.02 * ours for ours, theirs in zip(found, expected, strict=True)), name


def flags_of(job: Job, split: Split, m: int) -> list:
    """Those of a step that has what the split has."""
    numbers = {f"{axis}_size": size for axis in splits.AXES if (size := getattr(split, axis)) > 1}
    numbers |= {"zero": split.zero, "shard_size": job.shard_size, "num_experts": job.experts}
    numbers |= {"pp_engine": split.engine} if split.pp > 1 else {}
    numbers |= {"virtual_stages": job.virtual_stages} if split.engine.startswith("interleaved") else {}
    switches = {"sequence_parallel": split.sp, "recompute": job.recompute, "gather_once": job.gather_once}
    return ["--seq_len", job.seq_len, "--micro_batch_size", job.micro_batch, "--gradient_accumulation_steps", m,
            "--dtype", job.dtype, *(word for name, value in numbers.items() if value for word in (f"--{name}", value)),
            *(f"--{name}" for name, is_on in switches.items() if is_on)]


@pytest.mark.parametrize("step, split", [
    (11, Split(1, 2, 2, "1f1b", 0)), (11, Split(1, 2, 2, "interleaved", 0)), (14, Split(1, 2, 2, "1f1b", 0, sp=True)),
    (16, Split(1, 2, 2, "1f1b", 0))], ids=str)
def test_activations_of_real_runs(step, split):
    """The first stage of two, over two tp ranks: what autograd keeps, within 2 %. No activation is shaped as a weight.
    """
    job = JOB._replace(seq_len=24, experts=4 if step == 16 else 0)
    flags = [*flags_of(job, split, 4), "--max_tokens", 192, "--num_hidden_layers", 8]
    [kept] = run(Program(step, flags), threads(4), [Kept()]).watches
    _, layers, _ = split_memory.alive(split, 0, 4, splits.layers_of_chunks(job, split, 0))
    assert kept.most[0]["others"] == pytest.approx(layers * split_memory.sizes_of(job, split).layer, rel=0.02)


def axis_of(kind: str, group: tuple[int, ...], split: Split) -> str:
    """Collectives are those of dp and of experts. A message's group has all four ranks, or two along one axis."""
    if kind != "send" or len(group) == 4 or group[1] - group[0] >= split.tp * split.cp * split.pp:
        return "ep" if kind == "all_to_all_single" else "dp"
    distance = group[1] - group[0]
    return "tp" if distance < split.tp else "cp" if distance < split.tp * split.cp else "pp"


@pytest.mark.parametrize("step, split, changes", [
    (11, Split(1, 2, 2, "interleaved", 0), {"recompute": True}), (11, Split(2, 1, 2, "zb", 0), {}),
    (15, Split(1, 2, 1, "-", 0, cp=2, sp=True), {"recompute": True}), (15, Split(2, 1, 1, "-", 1, cp=2), {}),
    (16, Split(2, 1, 2, "1f1b", 0, ep=2), {"recompute": True}), (12, Split(2, 1, 2, "zb", 2), {"recompute": True}),
    (13, Split(2, 1, 2, "1f1b", 3), {}), (16, Split(2, 1, 1, "-", 3, cp=2), {}),
    (16, Split(2, 2, 1, "-", 2, sp=True), {}), (16, Split(4, 1, 1, "-", 1, ep=2), {}),
    (16, Split(2, 1, 2, "1f1b", 3, ep=2), {"gather_once": True}),
    (13, Split(4, 1, 1, "-", 3), {"shard_size": 2, "dtype": "bfloat16"}),
    (16, Split(4, 1, 1, "-", 2), {"shard_size": 2}),
    *((12 + zero // 3, Split(4, 1, 1, "-", zero), {"dtype": "bfloat16"}) for zero in (2, 3))], ids=str)
def test_bytes_sent_by_real_runs(step, split, changes):
    """Of two experts a token takes both: as many rows leave as on average."""
    job = JOB._replace(experts=2 if step == 16 else 0, **changes)
    flags = [*flags_of(job, split, 4), "--max_tokens", 256 * split.dp, "--num_hidden_layers", 8]
    [messages] = run(Program(step, flags), threads(4), [Messages()]).watches
    for rank, counted in enumerate(messages.of_a_step()):
        found = dict.fromkeys(splits.AXES, 0)
        for (kind, group, _, size), count in counted.items():
            if kind != "receive":
                found[axis_of(kind, group, split)] += size * count
        expected = splits.sent(job, split, rank // split.tp // split.cp % split.pp, 4)
        assert found == pytest.approx(expected, rel=2e-4), rank  # shards differ by a number


@needs_node
def test_the_page_computes_the_same():
    jobs = [LARGE, LARGE._replace(shape=PRESETS["llama-1b"], ranks=24, global_batch=96, virtual_stages=3),
            LARGE._replace(shape=PRESETS["llama-2-7b"], ranks=8, recompute=True, dtype="float32"),
            JOB._replace(is_gpu=True),
            LARGE._replace(shape=PRESETS["llama-8b"], ranks=48, global_batch=96, experts=6, shard_size=4,
                           gather_once=True)]
    found = node("return input.map((job) => require(`${process.cwd()}/tools/site/choose`).choose(job));",
                 [{**job._asdict(), **job.shape._asdict()} for job in jobs])
    for job, (fitting, others, refused) in zip(jobs, found, strict=True):
        ours, *rest, reasons = choose.choose(job)
        theirs = {tuple(row.pop("split").values()): row for row in fitting + others}
        assert {tuple(row.split) for row in ours + rest[0]} == theirs.keys() and refused == reasons.total()
        assert len(fitting) == len(ours) > 0
        for row in ours + rest[0]:
            expected = {**row._asdict(), "memory": row.memory}
            del expected["split"]
            for name, value in theirs[tuple(row.split)].items():
                assert value == pytest.approx(expected[name], rel=1e-12), (row.split, name)


@pytest.mark.parametrize("split, change, said", [
    (Split(4, 16, 1, "-", 0), {}, "tp 16 does not divide"), (Split(1, 1, 64, "interleaved", 0), {}, "80 layers"),
    (Split(64, 1, 1, "-", 0), {"global_batch": 100}, "whole micro-batches"),
    (Split(8, 1, 8, "1f1b", 0), {"global_batch": 32}, "fewer")])
def test_what_is_refused(split, change, said):
    assert said in splits.refusal(LARGE._replace(**change), split)
    assert splits.refusal(LARGE, split._replace(dp=1, tp=1, pp=1, engine="-", zero=0)) is None


def test_nothing_fits(capsys):
    choose.main(["--cluster", "64xH100:8", "--model_name", "llama-70b", "--shard_size", "8", "--gather_once"])
    assert "groups of 8 do not divide" in capsys.readouterr().out
    choose.main(["--model_name", "llama-2-7b", "--optimizer", "muon"])
    assert "Muon with cp" in capsys.readouterr().out


def test_one_expert():
    """Of which a token then takes one, where the flags do not say how many."""
    assert choose.parse_args(["--num_experts", "1"]).experts_per_token == 1
    assert choose.parse_args(["--num_experts", "8"]).experts_per_token == choose.parse_args([]).experts_per_token == 2
