"""The memory model against the largest resident sets of real runs: full training and LoRA, all stages of a pipeline."""

import json
import pathlib

import pytest
from lab.launch import ROOT, launch
from support.checkpoint_runs import write_model

SCRIPT = pathlib.Path(__file__).parent / "support" / "memory_of_stages.py"
MODEL = ROOT / "models" / "smollm2-135m-instruct"
SHAPES = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
              num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True)
CASES = {  # name -> flags
    "LoRA": ["--lora_rank", 16, "--batch_size", 2, "--dtype", "bfloat16"],
    "LoRA, recompute": ["--lora_rank", 16, "--batch_size", 4, "--dtype", "bfloat16", "--recompute"],
    "LoRA, 4 bits": ["--lora_rank", 16, "--batch_size", 2, "--dtype", "bfloat16", "--base_bits", 4],
    "full": ["--batch_size", 1, "--dtype", "float32"],
    "full, recompute": ["--batch_size", 2, "--dtype", "float32", "--recompute"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2-135M or, where tools/get_smollm2.py has not made it, random weights of the same shapes."""
    made = tmp_path_factory.mktemp("models") / "random"
    return MODEL if MODEL.is_dir() else write_model(made, "llama", "bfloat16", **SHAPES)


@pytest.mark.slow(drawn=2)
@pytest.mark.parametrize("case", CASES)
def test_peak_memory_of_stages(tmp_path, model, case):
    """Within 15 %. Three stages of 10 layers, 1F1B with four micro-batches: 3, 2 and 1 of them are live."""
    done = launch(9, 3, "--model_name", model, "--pipelines", "10,10,10", "--num_microbatches", 4, "--max_steps", 2,
                  "--log_dir", tmp_path, "--checkpoint_dir", tmp_path, *CASES[case], script=SCRIPT, timeout=280)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"stage"')]
    assert len(rows) == 3, done.stdout
    print(case, rows)
    for row in rows:
        predicted = row["process"] + row["model"]
        assert predicted == pytest.approx(row["measured"], rel=0.15), rows
        assert row["model"] > 0.2 * row["process"], rows
