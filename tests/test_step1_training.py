"""Steps 1 and 2 trained to the end, as they stand: one batch is memorised, and what a run leaves is there."""

import json
import math
import re

from lab.launch import fork, losses, metrics

SHORT = ["--num_hidden_layers", 2, "--seq_len", 16, "--micro_batch_size", 2, "--max_tokens", 12 * 32]  # 12 steps


def shown_losses(output: str) -> list[str]:
    rows = re.findall(r"^step (\d+)/12 \| loss (\d+\.\d{4})\b", output, re.MULTILINE)
    assert [int(step) for step, _ in rows] == list(range(1, 13)), output
    return [loss for _, loss in rows]


def test_step_1_memorises_its_batch():
    done = fork(1, 1, *SHORT)
    shown = shown_losses(done.stdout)
    found = [float(loss) for loss in shown]
    assert abs(found[0] - math.log(1024)) < 1.5, "before training all tokens are about equally likely"
    assert all(after < before for before, after in zip(found, found[1:])) and found[-1] < found[0] - 3, found
    assert re.search(r"^[\d.]+K parameters on cpu, activations in torch.float32\b", done.stdout, re.MULTILINE)
    assert shown_losses(fork(1, 1, *SHORT).stdout) == shown, "the same run again"


def test_step_2_trains_on_each_rank_by_itself(tmp_path):
    """The logging rank is the last stage's; its losses are those of step 1, whose batch it trains on."""
    done = fork(2, 2, *SHORT, "--pp_size", 2, "--log_dir", tmp_path)
    found = losses(tmp_path)
    assert [f"{loss:.4f}" for loss in found] == shown_losses(fork(1, 1, *SHORT).stdout)
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 13))
    assert sorted(path.name for path in (tmp_path / "default_run").iterdir()) == ["config.json", "metrics.jsonl"]
    config = json.loads((tmp_path / "default_run" / "config.json").read_text())
    assert config["topology"] == {"dp_size": 1, "pp_size": 2, "tp_size": 1, "world_size": 2}
    assert done.stdout.count("step 12/12 | loss") == 1 and "rank 1: dp 0 pp 1 tp 0" in done.stdout
