"""The scripts for a few unlike machines: three_stages_simple_pp.py, train_distributed.py, train_single_test.py.

All three run one after the other on three ranks, and again in one process, in float64.
"""

import argparse
import json
import os
import re
import socket
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

from clusters import made_up_cluster
from huggingface import ExactRMSNorm, their_name
from launch import ROOT, losses, modules_of, start_fork

with modules_of(9):
    import three_stages_simple_pp as three_stages
    import train_distributed
    import train_single_test as single_test
    from model import Llama, cross_entropy, init_weights
    from training import hf_checkpoint, loop, speeds
    from utils import TINY_LLAMA, load_config

CLUSTER = ROOT / "cluster"
QWEN = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3")]  # seconds to import
SEQ_LEN = 16
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 12
TINY_SIZES = [131072, *[184576] * 8, 128, 131072]  # parameters of the tiny Llama's modules


def measured(*layer_seconds: float, embedding: float = 0.0, head: float = 0.0) -> dict:
    """cluster.json of machines with these seconds for a decoder layer of the tiny Llama."""
    found = made_up_cluster([1] * len(layer_seconds))
    for module, size in zip(found["modules"], TINY_SIZES):
        module["parameters"] = size
    for machine, seconds in zip(found["machines"], layer_seconds):
        machine.update(forward={"1": [embedding, *[seconds] * 8, 0.0, head]}, backward={"1": [0.0] * 11})
    found["model"].update(hidden_size=128, intermediate_size=352)
    return {**found, "dtype": "float64", "hosts": [socket.gethostname()] * len(layer_seconds)}


MEASURED = measured(1.0, 2.5, 1.0, head=3.0)
SHARES = [9, 4, 8]  # of 21 micro-batches: a whole model takes 11, 23 and 11 seconds


def flags_of(folder, ranks: int) -> dict[str, list]:
    """Script -> flags. One rank takes as many micro-batches a step as three do together."""
    data = ["--dataset_name", folder / "corpus", "--seq_len", SEQ_LEN, "--dtype", "fp64", "--device", "cpu",
            "--log_dir", folder / f"runs{ranks}"]
    speeds = ["--cluster_json", folder / "cluster.json"] if ranks > 1 else []
    three = ["--train_steps", 8, "--batch_size", 16, "--microbatch_num", 4, *speeds]
    data_parallel = ["--epochs", 2, "--max_steps_per_epoch", 2, "--batch_size", 1, "--run_name", "uneven",
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
    for i in range(4):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    (folder / "cluster.json").write_text(json.dumps(MEASURED))
    jobs = {(name, ranks): start_fork(9, ranks, folder / f"{name}{ranks}", CLUSTER / f"{name}.py", *flags, modules=QWEN,
                                      script=ROOT / "tests" / "support" / "record.py")
            for ranks in (3, 1) for name, flags in flags_of(folder, ranks).items()}
    for (_, ranks), job in jobs.items():
        stdout = job.result().stdout  # waits for its end
        printed += stdout if ranks == 3 else ""
    return folder, printed


@pytest.mark.parametrize("run, steps", [("three_stages", 8), ("uneven", 4)])
def test_three_ranks_equal_one_process(trained, run, steps):
    folder, _ = trained
    expected, found = losses(folder / "runs1", run), losses(folder / "runs3", run)
    assert len(expected) == len(found) == steps and expected[-1] < expected[0]
    assert max(abs(a - b) for a, b in zip(expected, found)) <= 1e-9


def test_three_stages(trained):
    """Layers by speed, the next epoch without a halt, a table of the stages, a timeline of batch 0 by default."""
    folder, printed = trained
    assert "decoder layers of the stages: 4, 1, 1" in printed  # the stages take 4, 2.5 and, with the head, 4 seconds
    assert re.search(r"the data holds \d+ steps and starts again", printed)
    [stages, *_] = re.findall(r"^rank +host +forward.*\n((?:\d .*\n)+)", printed, re.MULTILINE)
    for row in stages.splitlines()[:3]:
        forward, backward, optimizer, idle, step, memory = map(float, row.split()[2:])
        assert min(forward, backward, optimizer) > 0 and 0.05 < memory < 5
        assert abs(forward + backward + optimizer + idle - step) < 0.3
    trace = json.loads((folder / "runs3" / "three_stages" / "timeline_batch0_all.json").read_text())
    computed = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event.get("cat") == "forward"]
    assert sorted(computed) == [(rank, f"forward {i}") for rank in range(3) for i in range(4)]
    assert (folder / "runs3" / "three_stages" / "timeline_batch0.png").stat().st_size > 5000
    assert not list((folder / "runs3" / "uneven").glob("timeline*"))  # train_distributed.py records none by default


def test_shares_by_speed_and_banner(trained):
    _, printed = trained
    assert f"micro-batches of a step, of 1 samples each: {', '.join(map(str, SHARES))}" in printed
    assert "3 ranks over gloo, float64, torch " + torch.__version__ in printed
    assert re.search(r"^2 +\S+ +.*\d cores +lo 127.0.0.1$", printed, re.MULTILINE)


def test_loss_of_an_epoch(trained):
    folder, printed = trained
    found = [float(text) for text in re.findall(r"^epoch \d: loss (\S+), checkpoint ", printed, re.MULTILINE)]
    expected = losses(folder / "runs3", "uneven")
    assert found == pytest.approx([sum(expected[:2]) / 2, sum(expected[2:]) / 2], abs=1e-4)


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
            assert len(board.Scalars(f"{name}/rank{rank}")) == 4, (name, rank)
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
        single_test.compare(everyone, tolerance=1e-3)
    everyone[1]["losses"][1] = float("nan")
    with pytest.raises(ValueError, match="nan apart"):
        single_test.compare(everyone, tolerance=0.1)


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
    for leftover in ("epoch_1.old", "epoch_1.unfinished"):  # of a run that was killed while it saved
        (tmp_path / "run" / leftover).mkdir()
        (tmp_path / "run" / leftover / "model.safetensors").write_text("cut")
    hf_checkpoint.save_hugging_face(tiny, "a/hub-id", str(where))
    assert os.listdir(tmp_path / "run") == ["epoch_1"]


@pytest.fixture
def three_ranks(monkeypatch):
    monkeypatch.setattr(speeds, "from_rank_0", lambda make: make())
    monkeypatch.setattr(speeds, "gather", lambda value: [value] * 3)


def speeds_in(path, content, **flags) -> list | None:
    if content is not None:
        path.write_text(json.dumps(content) if isinstance(content, dict) else content)
    args = argparse.Namespace(**{"cluster_json": str(path), "equal_shares": False, **flags})
    return speeds.measured_speeds(args, 1, torch.float64, load_config(TINY_LLAMA, num_attention_heads=None))


@pytest.mark.parametrize("content, expected", [
    (None, "No such file"), ("{", "can't be read as JSON"), ("[]", "'model_name' is missing"),
    ({**MEASURED, "machines": [{}, {}, {}]}, "machine 0: 'free_memory' is missing"),
    ({**MEASURED, "modules": []}, "no row of numbered layers"),
    (measured(1.0, 1.0), r"was measured with hosts \['(\S+)', '\1'\], but this run has \['\1', '\1', '\1'\]"),
    ({**MEASURED, "hosts": ["a", "b", "c"]}, r"was measured with hosts \['a', 'b', 'c'\], but this run has"),
    ({**MEASURED, "dtype": "float32"}, "was measured with dtype float32, but this run has float64"),
    ({**MEASURED, "model": {**MEASURED["model"], "hidden_size": 256}}, "with hidden_size 256, but this run has 128"),
])
def test_bad_cluster_json(tmp_path, three_ranks, content, expected):
    path = tmp_path / "cluster.json"
    with pytest.raises(ValueError, match=f"cluster.json.*{expected}.*plan.py --measure, or use --equal_shares"):
        speeds_in(path, content)
    assert speeds_in(path, content, equal_shares=True) is None


def test_one_process_takes_no_notice_of_cluster_json(tmp_path, three_ranks, monkeypatch):
    monkeypatch.setattr(speeds, "gather", lambda value: [value])
    assert speeds_in(tmp_path / "cluster.json", "{") is None


def test_ends_of_a_model_weigh_as_much_as_measured(tmp_path, three_ranks):
    """Layers of the toy Qwen: the head's seconds count at the last stage, the embedding's at the first."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def layers(num_layers, **seconds) -> list[int]:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(Qwen3Config(**{**three_stages.TOY, "num_hidden_layers": num_layers}))
        found = speeds_in(tmp_path / "cluster.json", measured(1.0, 1.0, 1.0, **seconds))
        return speeds.layers_by_speed(model, found, 3)

    assert layers(9) == [3, 3, 3]
    assert layers(10, head=2.0) == [4, 4, 2] and layers(10, embedding=2.0) == [2, 4, 4]
    assert layers(9, embedding=3.0, head=3.0) == [2, 5, 2]
    with pytest.raises(ValueError, match="3 stages for a model of 2 decoder layers.* at most 2 processes"):
        layers(2)


def test_without_speeds_the_head_counts_by_its_parameters():
    """A vocabulary of 60 layers' parameters: the last stage gets one layer, as many as a stage has at least."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        toy = Qwen3ForCausalLM(Qwen3Config(**three_stages.TOY))
        large = Qwen3ForCausalLM(Qwen3Config(**{**three_stages.TOY, "vocab_size": 90_000}))
    assert speeds.layers_by_speed(toy, None, 3) == [2, 2, 2]
    assert speeds.layers_by_speed(toy, None, 1) == [6]
    assert speeds.layers_by_speed(large, None, 3) == [3, 2, 1]


@pytest.fixture
def parse(monkeypatch):
    for name in ("BATCH_SIZE", "MICROBATCH_NUM", "PROFILE_BATCH"):
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
    assert found(parse("--profile_batch", -1)) == (16, 4, -1, None)
    assert found(parse(BATCH_SIZE="6", MICROBATCH_NUM="3", PROFILE_BATCH="2")) == (6, 3, 2, None)
    assert found(parse("--batch_size", 9, "--profile_batch", 0, "--train_steps", 5)) == (9, 3, 0, 5)
    assert found(parse(BATCH_SIZE="", MICROBATCH_NUM=" ", PROFILE_BATCH="0")) == (16, 4, 0, None)
    for module in (three_stages, train_distributed, single_test):
        assert [parse(flag, name, module=module).dtype for flag, name in (
            ("--dtype", "auto"), ("--precision", "fp64"), ("--dtype", "float64"), ("--dtype", "bf16"))] == [
            "auto", "float64", "float64", "bfloat16"]


@pytest.mark.parametrize("flags, env, expected", [
    (["--batch_size", 10], {}, "--batch_size 10 is not a multiple of --microbatch_num 4"),
    ([], {"MICROBATCH_NUM": "5"}, "--batch_size 16 is not a multiple of --microbatch_num 5"),
    ([], {"BATCH_SIZE": "abc"}, "BATCH_SIZE='abc' is no number that --batch_size takes"),
    ([], {"MICROBATCH_NUM": "0"}, "MICROBATCH_NUM='0' is no number that --microbatch_num takes"),
    ([], {"PROFILE_BATCH": "all"}, "PROFILE_BATCH='all' is no number that --profile_batch takes"),
    (["--train_steps", 0], {}, "--train_steps: must be at least 1, got 0"),
    (["--dtype", "fp16"], {}, "--dtype/--precision: invalid choice: 'fp16'"),
])
def test_three_stages_errors(parse, flags, env, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse(*flags, **env)


@pytest.mark.parametrize("batch", [-2, 20])
def test_a_timeline_of_no_step(batch):
    steps = loop.train(argparse.Namespace(profile_batch=batch), None, None, None, None, None, num_steps=20)
    with pytest.raises(ValueError, match=f"--profile_batch {batch} is not among the steps 0 to 19.* -1 for none"):
        next(steps)


def test_numbers_of_micro_batches(parse, monkeypatch):
    monkeypatch.setattr(train_distributed.dist, "get_world_size", lambda: 3)
    for counts in ("4,0,1", "a,b,c", "4,,1"):
        with pytest.raises(ValueError, match="--num_microbatches: "):
            parse("--num_microbatches", counts, module=train_distributed)
    for counts in ("4,2", "4,2,1,1"):
        args = parse("--num_microbatches", counts, module=train_distributed)
        with pytest.raises(ValueError, match=r"--num_microbatches \[4, 2.*\]: write 3 numbers"):
            train_distributed.choose_shares(args, *[None] * 3)
    args = parse("--num_microbatches", "4,2,1", module=train_distributed)
    assert train_distributed.choose_shares(args, *[None] * 3) == [4, 2, 1]
    args = parse("--equal_shares", module=train_distributed)
    assert train_distributed.choose_shares(args, *[None] * 3) == [8, 8, 8]


def test_no_flag_is_an_ambiguous_prefix_of_torchruns():
    """torchrun's parser looks at all words, the script's too, and ends with an error where it could mean several."""
    sources = [path.read_text() for folder in (".", "training", "planning") for path in (CLUSTER / folder).glob("*.py")]
    flags = set(re.findall(r'"(--[a-z_]+)"', "".join(sources)))
    assert {"--measure", "--train_steps", "--equal_shares", "--epochs", "--memory_gb"} <= flags
    for flag in flags:
        args = get_args_parser().parse_args(["script.py", flag, "value"])
        assert args.training_script_args == [flag, "value"]
    with pytest.raises(SystemExit):  # what the older name of --equal_shares did
        get_args_parser().parse_args(["script.py", "--even"])
