"""The scripts for a few unlike machines: three_stages_simple_pp.py, train_distributed.py, train_single_test.py.

All three run one after the other on three ranks, and again in one process, in float64.
"""

import argparse
import itertools
import json
import os
import re
import sys

import pytest
import torch

from huggingface import ExactRMSNorm, their_name
from launch import MODELS, ROOT, STEPS, fork, losses, modules_of

with modules_of(9):
    from training import cluster_common
    from training import hf_checkpoint
    import three_stages_simple_pp as three_stages
    import train_distributed
    import train_single_test as single_test
    from model import Llama, cross_entropy, init_weights

SEQ_LEN = 16
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 12
SPEEDS = {"machines": [{"forward": {"1": [9.0, *[seconds] * 8, 9.0, 9.0]}, "backward": {"1": [0.0] * 11}}
                       for seconds in (1.0, 2.5, 1.0)]}
SHARES = [8, 5, 8]  # of 21 micro-batches: a whole model takes 35, 47 and 35


def flags_of(folder, ranks: int) -> dict[str, list]:
    """Script -> flags. One rank takes as many micro-batches a step as three do together."""
    data = ["--dataset_name", folder / "corpus", "--seq_len", SEQ_LEN, "--dtype", "fp64", "--device", "cpu",
            "--log_dir", folder / f"runs{ranks}"]
    speeds = ["--cluster_json", folder / "cluster.json"] if ranks > 1 else []
    three = ["--train_steps", 16, "--batch_size", 16, "--microbatch_num", 4, "--profile_batch", 3, *speeds]
    data_parallel = ["--epochs", 2, "--max_steps_per_epoch", 4, "--batch_size", 1, "--run_name", "uneven",
                     "--gradient_accumulation", 21 // ranks, "--checkpoint_dir",
                     folder / f"checkpoints{ranks}", *speeds]
    alone = ["--steps", 3, "--max_batch_size", 4]
    flags = {"three_stages_simple_pp": data + three, "train_distributed": data + data_parallel}
    if ranks > 1:
        flags["train_single_test"] = data[:-2] + alone
    return flags


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder, and what was printed on 3 ranks."""
    folder, printed = tmp_path_factory.mktemp("cluster"), ""
    (folder / "corpus").mkdir()
    for i in range(8):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    (folder / "cluster.json").write_text(json.dumps(SPEEDS))
    for ranks in (3, 1):
        for name, flags in flags_of(folder, ranks).items():
            done = fork(9, ranks, folder / f"{name}{ranks}", STEPS["9"] / f"{name}.py", *flags,
                        script=ROOT / "tests" / "support" / "record.py", modules=MODELS)
            printed += done.stdout if ranks == 3 else ""
    return folder, printed


@pytest.mark.parametrize("run, steps", [("three_stages", 16), ("uneven", 8)])
def test_three_ranks_equal_one_process(trained, run, steps):
    folder, _ = trained
    expected, found = losses(folder / "runs1", run), losses(folder / "runs3", run)
    assert len(expected) == len(found) == steps and expected[-1] < expected[0]
    assert max(abs(a - b) for a, b in zip(expected, found)) <= 1e-9


def test_three_stages(trained):
    """Layers by speed, the next epoch without a halt, a table of the stages, a timeline."""
    folder, printed = trained
    assert "decoder layers of the stages: 3, 1, 2" in printed  # 6 layers: a stage takes 3, 2.5 and 2
    assert "epoch 2: the data holds" in printed
    [stages, *_] = re.findall(r"^rank +host +layers +forward.*\n((?:\d .*\n)+)", printed, re.MULTILINE)
    rows = [line.split() for line in stages.splitlines()[:3]]
    assert [row[2] for row in rows] == ["3", "1", "2"]
    for row in rows:
        forward, backward, optimizer, idle, step, memory = map(float, row[3:])
        assert min(forward, backward, optimizer) > 0 and 0.05 < memory < 5
        assert abs(forward + backward + optimizer + idle - step) < 0.3
    trace = json.loads((folder / "runs3" / "three_stages" / "timeline_batch3_all.json").read_text())
    computed = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event.get("cat") == "forward"]
    assert sorted(computed) == [(rank, f"forward {i}") for rank in range(3) for i in range(4)]
    if (STEPS["9"] / "timeline_picture.py").exists():
        assert (folder / "runs3" / "three_stages" / "timeline_batch3.png").stat().st_size > 5000


def test_shares_by_speed_and_banner(trained):
    _, printed = trained
    assert f"micro-batches of a step, of 1 samples each: {', '.join(map(str, SHARES))}" in printed
    assert "3 ranks over gloo, fp64, torch " + torch.__version__ in printed
    assert re.search(r"^2 +\S+ +.*\d cores +lo 127.0.0.1$", printed, re.MULTILINE)


def test_checkpoint_is_hugging_faces(trained):
    """The last epoch's, in transformers: the loss of our model with the weights that training ended with."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder, _ = trained
    saved = folder / "checkpoints3" / "uneven"
    assert sorted(os.listdir(saved)) == ["epoch_1", "epoch_2"]
    theirs = LlamaForCausalLM.from_pretrained(saved / "epoch_2", dtype=torch.float64, attn_implementation="sdpa")
    final = torch.load(folder / "train_distributed3" / "rank0.pt")["final"]
    assert all(torch.equal(param, final[name]) for name, param in
               ((name, theirs.get_parameter(their_name(name))) for name in final))
    for layer in theirs.model.layers:  # theirs rounds to float32
        layer.input_layernorm = ExactRMSNorm(layer.input_layernorm)
        layer.post_attention_layernorm = ExactRMSNorm(layer.post_attention_layernorm)
    theirs.model.norm = ExactRMSNorm(theirs.model.norm)
    ours = Llama(theirs.config, torch.float64).double()
    ours.load_state_dict(final)
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    assert abs(cross_entropy(ours(ids), ids) - cross_entropy(theirs(ids).logits, ids)) <= 1e-9
    assert AutoTokenizer.from_pretrained(saved / "epoch_2")("times")["input_ids"]


def test_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = trained
    board = EventAccumulator(str(folder / "runs3" / "uneven"))
    board.Reload()
    for name in ("step_seconds", "compute_seconds", "cpu_memory_gb", "cpu_percent"):
        for rank in range(3):
            assert len(board.Scalars(f"{name}/rank{rank}")) == 8, (name, rank)
            assert all(event.value > 0 for event in board.Scalars(f"{name}/rank{rank}"))
    assert not any(tag.startswith("gpu") for tag in board.Tags()["scalars"])
    computed, step = (board.Scalars(f"{name}_seconds/rank1") for name in ("compute", "step"))
    assert all(a.value <= b.value for a, b in zip(computed, step))
    found = [event.value for event in board.Scalars("loss")]
    assert found == pytest.approx(losses(folder / "runs3", "uneven"), rel=1e-6)
    assert all(event.value > 0 for event in board.Scalars("tokens_per_second"))


def test_single_test_prints_a_table_of_machines(trained):
    _, printed = trained
    [rows] = re.findall(r"^rank +host +device.*\n((?:\d .*\n)+)all losses are equal", printed, re.MULTILINE)
    rows = [re.split(r"  +", line) for line in rows.splitlines()]
    assert [(row[0], row[2]) for row in rows] == [("0", "cpu"), ("1", "cpu"), ("2", "cpu")]
    assert len({tuple(row[6:8]) for row in rows}) == 1 and float(rows[0][7]) < float(rows[0][6])  # losses
    assert all(float(row[5]) > 0 and row[8:] == ["4", "--max_batch_size 4"] for row in rows)


def test_unlike_losses_are_an_error():
    everyone = [{"host": "pi0", "losses": [2.0, 1.0]}, {"host": "pi1", "losses": [2.0, 1.01]}]
    with pytest.raises(ValueError, match=r"0.01 apart \(rank 0 on pi0: 1.000000, rank 1 on pi1: 1.010000\)"):
        single_test.compare(argparse.Namespace(dtype="fp32", steps=2), everyone)
    everyone[1]["losses"][1] = float("nan")
    with pytest.raises(ValueError, match="nan apart"):
        single_test.compare(argparse.Namespace(dtype="bf16", steps=2), everyone)


@pytest.fixture(scope="module")
def tiny():
    sizes = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
    with torch.device("meta"):
        model = Llama(argparse.Namespace(**{**sizes, "num_hidden_layers": 1}))
    init_weights(model, 0, torch.device("cpu"), lambda full, dim: full)
    return model


def test_a_batch_too_large_for_the_memory_is_not_tried(tiny, monkeypatch):
    tried, ask = [], single_test.kept_for_backward
    monkeypatch.setattr(single_test, "kept_for_backward", lambda model, ids: tried.append(len(ids)) or ask(model, ids))
    args = argparse.Namespace(max_batch_size=64, memory_gb=None, seq_len=8)
    one, four = (ask(tiny, torch.zeros(size, 8, dtype=torch.int64)) for size in (1, 4))  # twice as many take 3 times it
    for memory, expected in ((2.99 * one, 1), (2.99 * four, 4), (1e15, 64)):
        tried.clear()
        monkeypatch.setattr(single_test, "free_memory", lambda device, memory=memory: memory)
        assert single_test.largest_batch(args, tiny, torch.device("cpu"))[0] == expected == tried[-1]
    args.memory_gb = 2.99 * four / 1e9
    assert single_test.largest_batch(args, tiny, torch.device("cpu"))[0] == 4


def test_a_checkpoint_is_whole_or_not_there(tiny, tmp_path, monkeypatch):
    where = tmp_path / "run" / "epoch_1"
    hf_checkpoint.save_hugging_face(tiny, "a/hub-id", str(where))
    before = {path.name: path.read_bytes() for path in where.iterdir()}
    assert before.keys() == {"config.json", "model.safetensors"}
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk"):
        broken.setattr(hf_checkpoint.json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        hf_checkpoint.save_hugging_face(tiny, "a/hub-id", str(where))
    assert {path.name: path.read_bytes() for path in where.iterdir()} == before
    hf_checkpoint.save_hugging_face(tiny, "a/hub-id", str(where))  # a rerun replaces it, and clears up
    assert os.listdir(tmp_path / "run") == ["epoch_1"]


@pytest.mark.parametrize("total, seconds", [(7, [1, 2, 4]), (6, [1.0, 1.0, 1.0]), (3, [1, 9, 1]), (11, [3.0, 1.7, 2])])
def test_shares_have_the_smallest_largest_time(total, seconds):
    shares = cluster_common.shares_by_speed(total, seconds)
    every = [split for split in itertools.product(range(1, total), repeat=3) if sum(split) == total]
    best = min(max(n * t for n, t in zip(split, seconds)) for split in every)
    assert sum(shares) == total and min(shares) > 0
    assert max(n * t for n, t in zip(shares, seconds)) == best


def test_4_2_1():
    assert cluster_common.shares_by_speed(7, [1.0, 2.0, 4.0]) == [4, 2, 1]
    with pytest.raises(ValueError, match="2 layers or micro-batches for 3 ranks"):
        cluster_common.shares_by_speed(2, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("content, expected", [
    (None, "No such file"), ("{", "holds no speeds"), ("[]", "holds no speeds"),
    ('{"machines": [{}, {}, {}]}', "forward"),
    (json.dumps({"machines": SPEEDS["machines"][:2]}), "speeds of 2 machines .* 3 ranks run"),
])
def test_bad_cluster_json(tmp_path, monkeypatch, content, expected):
    monkeypatch.setattr(cluster_common, "from_rank_0", lambda make: make())
    monkeypatch.setattr(cluster_common.dist, "get_world_size", lambda: 3)
    if content is not None:
        (tmp_path / "cluster.json").write_text(content)
    args = argparse.Namespace(cluster_json=str(tmp_path / "cluster.json"), even=False)
    with pytest.raises(ValueError, match=f"cluster.json.*{expected}.*plan.py --measure, or use --even"):
        cluster_common.measured_seconds(args, 1, "layer")
    args.even = True
    assert cluster_common.measured_seconds(args, 1, "layer") is None


@pytest.fixture
def parse(monkeypatch):
    for name in ("BATCH_SIZE", "MICROBATCH_NUM", "PROFILE_BATCH", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def parse(*flags, module=three_stages, **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
        return module.parse_args()

    return parse


def test_flags_then_environment_then_defaults(parse):
    def found(args):
        return args.batch_size, args.microbatch_num, args.profile_batch, args.train_steps

    assert found(parse()) == (16, 4, 0, None)
    assert found(parse(BATCH_SIZE="6", MICROBATCH_NUM="3", PROFILE_BATCH="2")) == (6, 3, 2, None)
    assert found(parse("--batch_size", 9, "--profile_batch", 0, "--train_steps", 5)) == (9, 3, 0, 5)
    assert found(parse(BATCH_SIZE="", MICROBATCH_NUM=" ", PROFILE_BATCH="0")) == (16, 4, 0, None)
    assert not any("sudo" in name for name in vars(parse()))
    assert [parse("--precision", name).dtype for name in ("fp64", "float64", "bf16")] == ["fp64", "fp64", "bf16"]


@pytest.mark.parametrize("flags, env, expected", [
    (["--batch_size", 10], {}, "--batch_size 10 is not a multiple of --microbatch_num 4"),
    ([], {"MICROBATCH_NUM": "5"}, "--batch_size 16 is not a multiple of --microbatch_num 5"),
    ([], {"BATCH_SIZE": "abc"}, "BATCH_SIZE='abc' is no whole number from 1 on"),
    ([], {"MICROBATCH_NUM": "0"}, "MICROBATCH_NUM='0' is no whole number from 1 on"),
    ([], {"PROFILE_BATCH": "-1"}, "PROFILE_BATCH='-1' is no whole number from 0 on"),
    (["--train_steps", 0], {}, "--train_steps: must be at least 1, got 0"),
    (["--dtype", "fp16"], {}, "'fp16' is none of fp32, bf16, fp64"),
    ([], {"WORLD_SIZE": "2"}, "three stages need three processes, but 2 run"),
])
def test_three_stages_errors(parse, flags, env, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse(*flags, **env)


@pytest.mark.parametrize("counts", ["4,2", "4,0,1", "a,b,c", "4,2,1,1"])
def test_numbers_of_micro_batches(parse, monkeypatch, counts):
    monkeypatch.setattr(train_distributed.dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match=f"--num_microbatches '{counts}': write 3 positive numbers"):
        train_distributed.choose_shares(parse("--num_microbatches", counts, module=train_distributed), None, None)
    args = parse("--num_microbatches", "4,2,1", module=train_distributed)
    assert train_distributed.choose_shares(args, None, None) == [4, 2, 1]
