"""train_distributed.py in an elastic run on three hosts of the test bed: one is lost and comes back.

The hosts share no disk. The whole run's losses are those of one process.
ALL_WAYS=1 tries more; each takes a minute.
"""

import json
import os
import time

import pytest
from bed import NODES, bed, on_disk, testbed
from checkpoint_runs import write_model
from elastic_bed import Training, kill_all, switch_on
from launch import ROOT, fork, metrics

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 60
FLAGS = ["--seq_len", 16, "--dtype", "float64", "--batch_size", 1, "--num_hidden_layers", 4,
         "--learning_rate", 1e-5, "--equal_shares", "--device", "cpu"]
LAYOUTS = {  # name -> flags; whether each host has all of the model
    "shares": (["--batch_size", 2, "--num_microbatches", 3], True),  # on two hosts micro-batches of 2 and 1 samples
    "one pipeline": (["--pipelines", "2,1,1|2,2", "--num_microbatches", "6"], False),
    "two pipelines": (["--pipelines", "4;2,2|4;4", "--num_microbatches", "4,2|3,3"], None),
    "adapters": (["--pipelines", "2,1,1|2,2", "--num_microbatches", "6", "--lora_rank", 4,
                  "--learning_rate", 1e-3, "--validation_split", 0.2, "--eval_every", 10], False),
}
LAYOUTS["adapters in 4 bits"] = ([*LAYOUTS["adapters"][0], "--base_bits", 4, "--dtype", "float32"], False)
CASES = [("shares", "killed"), ("one pipeline", "cut")]
if os.environ.get("ALL_WAYS"):
    CASES += [("one pipeline", "killed"), ("two pipelines", "killed"), ("adapters", "killed"),
              ("adapters in 4 bits", "killed")]


@pytest.fixture(autouse=True)
def all_on(bed):
    yield
    for node in NODES:
        switch_on(node)


@pytest.fixture(scope="module")
def inputs(bed, tmp_path_factory):
    """A folder, of which each host has a copy, with a corpus, and with a model that has weights."""
    folder = tmp_path_factory.mktemp("hosts")
    write_model(folder / "model", "llama", "float32", vocab_size=1024, hidden_size=32, intermediate_size=48,
                num_hidden_layers=4, num_attention_heads=4, initializer_range=0.1)
    (folder / "corpus").mkdir()
    for i in range(4):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    testbed("own", folder)
    return folder


def train(tmp_path, name: str, *words, **options) -> Training:
    return Training(tmp_path, "train_distributed.py", *FLAGS, *words, "--max_steps", 2000, "--save_every", 10,
                    "--run_name", name, "--log_dir", "runs", "--resume", "auto", **options)


@pytest.mark.parametrize("layout, how", CASES)
def test_a_host_is_lost_and_comes_back(inputs, tmp_path, layout, how):
    """Within a minute each, of which 13 to 25 seconds pass where nothing else runs."""
    flags, is_whole = LAYOUTS[layout]
    name = f"{layout}-{how}".replace(" ", "-")
    sources = ["--dataset_name", inputs / "corpus"]
    has_adapters, tolerance = layout.startswith("adapters"), 1e-5 if "float32" in flags else 1e-9
    sources += ["--model_name", inputs / "model"] if has_adapters else []
    run = train(tmp_path, name, *sources, *flags)
    run.went_on(3)
    run.reaches(25)
    mark, lost_at, last = run.mark(), time.monotonic(), run.steps()[-1]
    kill_all("node2") if how == "killed" else testbed("cut", "node2")
    went_on = run.went_on(2, mark, 60)
    without, mark, back_at, last_on_two = time.monotonic() - lost_at, run.mark(), time.monotonic(), run.steps()[-1]
    switch_on("node2")
    assert run.went_on(3, mark, 60) >= last_on_two, "a step was lost, though no host was"
    again = time.monotonic() - back_at
    run.reaches(run.steps()[-1] + 10)
    text = run.stop()
    print(f"{name}: last step seen {last}, on two hosts after step {went_on}, {without:.1f} s later; on three "
          f"{again:.1f} s after its return")
    records = {node: on_disk(node, ROOT / "runs") for node in NODES[:2]}
    longest = max((metrics(records[node], name) for node in records), key=len)
    if is_whole or layout == "two pipelines":
        assert went_on >= last, f"a step was lost, though the hosts that are left have all of the model:\n{text}"
    fork(9, 1, *FLAGS, *sources, *flags[4:], "--num_microbatches", 6, "--max_steps", len(longest), "--run_name", "one",
         "--log_dir", tmp_path, "--checkpoint_dir", tmp_path / "checkpoints",
         script=ROOT / "cluster" / "train_distributed.py", modules=["peft", "bitsandbytes"])
    expected = metrics(tmp_path, "one")
    if has_adapters:
        found, wanted = ([json.loads(line) for line in open(path / "evaluation.jsonl")]
                         for path in (records["node0"] / name, tmp_path / "one"))
        wanted = {row["step"]: row["evaluation_loss"] for row in wanted}
        assert len(found) > 3 and found[-1]["step"] > went_on and found[-1]["evaluation_loss"] < wanted[0]
        assert all(abs(row["evaluation_loss"] - wanted[row["step"]]) <= tolerance for row in found)
        print(f"evaluation loss {wanted[0]:.4f} at first, {found[-1]['evaluation_loss']:.4f} at step "
              f"{found[-1]['step']}, as without the loss of a host")
    assert [row["step"] for row in longest] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert max(abs(a[key] - b[key]) for a, b in zip(longest, expected)) <= tolerance


def test_a_new_host_and_the_loss_of_the_first(inputs, tmp_path):
    """A host that was not there when the run began takes part, and the first one is like any other."""
    words = ["first", "--dataset_name", inputs / "corpus", *LAYOUTS["one pipeline"][0]]
    run = train(tmp_path, *words, nodes=NODES[:2])
    assert run.went_on(2) is None
    mark = run.mark()
    run.list_hosts(NODES)
    run.went_on(3, mark)
    run.reaches(15)
    mark = run.mark()
    kill_all("node0")
    assert run.went_on(2, mark) >= 10
    mark = run.mark()
    switch_on("node0")
    run.went_on(3, mark)
    run.stop()
