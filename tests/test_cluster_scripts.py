"""The scripts for a few unlike machines beside train_distributed.py: three_stages_simple_pp.py, train_single_test.py.

Both run on three ranks, and the first one again in one process, in float64.
"""

import argparse
import json
import re

import pytest
import torch
from lab.launch import ROOT, metrics, modules_of, start_fork

with modules_of(9):
    import train_single_test as single_test
    from model import Llama, init_weights

CLUSTER = ROOT / "cluster"
QWEN = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3")]  # seconds to import
SEQ_LEN = 16
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 12


def flags_of(folder, ranks: int) -> dict[str, list]:
    """Script -> flags. One rank recomputes nothing."""
    data = ["--dataset_name", folder / "corpus", "--seq_len", SEQ_LEN, "--dtype", "float64", "--device", "cpu",
            "--log_dir", folder / f"runs{ranks}"]
    schedule = ["--warmup_steps", 2, "--lr_decay", "cosine", "--max_grad_norm", 0.5,
                "--checkpoint_dir", folder / f"checkpoints{ranks}"]
    schedule += ["--recompute"] if ranks > 1 else []
    alone = ["--steps", 3, "--max_batch_size", 4]
    three = ["--train_steps", 8, "--batch_size", 16, "--microbatch_num", 4]
    flags = {"three_stages_simple_pp": data + schedule + three}
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
    jobs = {(name, ranks): start_fork(9, ranks, *flags, modules=QWEN, script=CLUSTER / f"{name}.py")
            for ranks in (3, 1) for name, flags in flags_of(folder, ranks).items()}
    for (_, ranks), job in jobs.items():
        stdout = job.result().stdout  # waits for its end
        printed += stdout if ranks == 3 else ""
    return folder, printed


def test_three_ranks_equal_one_process(trained):
    """Hugging Face's Qwen rounds its norms to float32, which makes 1e-8 of any 1e-16."""
    expected, found = (metrics(trained[0] / f"runs{ranks}", "three_stages") for ranks in (1, 3))
    assert len(expected) == len(found) == 8 and expected[-1]["loss"] < expected[0]["loss"]
    for name in "loss", "grad_norm":
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=0, abs=1e-8)
    assert min(row["grad_norm"] for row in expected) > 0.5, "all were clipped"
    rates = [row["learning_rate"] for row in found]
    assert rates[:3] == pytest.approx([rates[2] / 3, rates[2] * 2 / 3, rates[2]]) and rates[3] < rates[2]


def test_three_stages(trained):
    """Layers by speed, the next epoch without a halt, a table of the stages, a timeline of the first step by default."""
    folder, printed = trained
    layers = re.search(r"decoder layers of the stages: (\d), (\d), (\d)", printed)
    assert sum(map(int, layers.groups())) == 6
    [stages, *_] = re.findall(r"^rank +host +forward.*\n((?:\d .*\n)+)", printed, re.MULTILINE)
    for row in stages.splitlines()[:3]:
        forward, backward, optimizer, idle, step, memory = map(float, row.split()[2:])
        assert min(forward, backward, optimizer) > 0 and 0.05 < memory < 5
        assert abs(forward + backward + optimizer + idle - step) < 0.3
    trace = json.loads((folder / "runs3" / "three_stages" / "timeline_batch0_all.json").read_text())
    computed = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event.get("cat") == "forward"]
    assert sorted(computed) == [(rank, f"forward {i}") for rank in range(3) for i in range(4)]


def test_shares_and_banner_of_a_recorded_run(recorded):
    """By default, train_distributed.py records no timeline."""
    printed = (recorded / "2;1.txt").read_text()
    assert "samples of a step, in micro-batches of up to 1: 5, 3" in printed
    assert "3 ranks over gloo, float64, torch " + torch.__version__ in printed
    assert re.search(r"^2 +\S+ +.*\d cores +lo 127.0.0.1$", printed, re.MULTILINE)
    assert not list((recorded / "runs" / "2;1").glob("timeline*"))


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
