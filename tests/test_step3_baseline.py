"""The baseline, step 3's train.py, against Hugging Face's Llama, torch's AdamW and its clipping, sample for sample."""

import numpy as np
import pytest
import torch
from lab.huggingface import reference, their_name
from lab.launch import ROOT, metrics
from lab.ranks import processes
from support.recordings import record
from transformers import AutoConfig

SAMPLES, SEQ_LEN, LEARNING_RATE = 8, 16, 3e-3
MAX_GRAD_NORM = 1.0  # the default, and less than the norm of the first steps


def test_baseline_equals_huggingface(tmp_path):
    """The parameters move as far as the logged learning rates say."""
    rates = [LEARNING_RATE / 3, LEARNING_RATE * 2 / 3, LEARNING_RATE, LEARNING_RATE * 3 / 4, LEARNING_RATE / 4]
    flags = ["--dtype", "float64", "--micro_batch_size", 2, "--gradient_accumulation_steps", 4, "--seq_len", SEQ_LEN,
             "--max_tokens", len(rates) * SAMPLES * SEQ_LEN, "--learning_rate", LEARNING_RATE, "--log_dir", tmp_path,
             "--num_hidden_layers", 8, "--warmup_steps", 2, "--lr_decay", "cosine"]
    [recorded] = record(3, flags, processes(1)).ranks
    [tokens] = [np.fromfile(path, dtype=np.int32) for path in (tmp_path / "token_cache").glob("*.bin")]
    tokens = torch.from_numpy(tokens.astype(np.int64))

    model = reference(AutoConfig.from_pretrained(ROOT / "assets" / "tiny_llama"), recorded["initial"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step, row in enumerate(metrics(tmp_path, "run")):
        first = step * SAMPLES * SEQ_LEN
        input_ids = tokens[first : first + SAMPLES * SEQ_LEN].view(SAMPLES, SEQ_LEN)
        target_ids = tokens[first + 1 : first + SAMPLES * SEQ_LEN + 1].view(SAMPLES, SEQ_LEN)
        logits = model(input_ids, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target_ids.flatten())
        assert row["learning_rate"] == pytest.approx(rates[step], rel=1e-12)
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        assert abs(row["grad_norm"] - norm.item()) <= 1e-9, f"step {step + 1}: norms of {row['grad_norm']} and {norm}"
        if step == 0:
            assert norm > 1.5 * MAX_GRAD_NORM, "nothing is clipped"
            gradients = {name: param.grad for name, param in model.named_parameters()}
            for name, gradient in recorded["grads"].items():
                assert (gradient - gradients[their_name(name)]).abs().max() <= 1e-9, name
        optimizer.step()
        assert abs(row["loss"] - expected.item()) <= 1e-9, f"step {step + 1}: {row['loss']} and {expected.item()}"
    assert step == len(rates) - 1
