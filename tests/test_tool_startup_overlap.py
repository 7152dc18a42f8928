"""startup.py and overlap.py: what they find out about a short run."""

import re

import pytest
import startup
from launch import ROOT, STEPS, launch

SHORT = ["--num_hidden_layers", 2, "--seq_len", 32, "--micro_batch_size", 1, "--gradient_accumulation_steps", 2]


def test_phases_add_up_to_the_time_of_the_first_step(tmp_path, capsys):
    found = startup.measure(8, 2, *SHORT, "--pp_size", 2, "--log_dir", tmp_path)
    assert list(found) == [*startup.PHASES, "total"]
    rank_0 = {phase: seconds for phase, (seconds, _) in found.items()}
    assert min(rank_0.values()) >= 0 and sum(rank_0.values()) == pytest.approx(2 * rank_0["total"])
    assert all(slowest >= seconds for seconds, slowest in found.values())
    assert rank_0["imports"] > rank_0["config"], "torch takes longer than a small file"
    startup.print_table({"first run": found})
    assert len(re.findall(r"^\| .* \| [\d.]+ \([\d.]+\) \|$", capsys.readouterr().out, re.MULTILINE)) == len(found)


@pytest.mark.parametrize("step", [3, 9])
def test_every_step_from_3_on_can_be_measured(tmp_path, step):
    found = startup.measure(step, 1, *SHORT, "--log_dir", tmp_path)
    assert list(found) == [*startup.PHASES, "total"] and all(0 < seconds for seconds, _ in found.values())


def test_only_gradients_are_counted(tmp_path):
    """Step 5 sums one parameter at a time: the embedding, 9 a layer, the last norm and the projection."""
    done = launch(5, 2, STEPS["5"] / "train.py", *SHORT, "--dp_size", 2, "--max_tokens", 384, "--log_dir", tmp_path,
                  script=ROOT / "tools" / "overlap.py")
    assert "\n21 all-reduces a step\n" in done.stdout


def test_overlap_of_all_reduces_with_backward(tmp_path):
    done = launch(6, 2, STEPS["6"] / "train.py", *SHORT, "--dp_size", 2, "--max_tokens", 512, "--log_dir", tmp_path,
                  script=ROOT / "tools" / "overlap.py")
    count, length, blocked, hidden, exposed = map(float, re.search(
        r"(\d+) all-reduces a step\n([\d.]+) ms: .* for ([\d.]+) ms\n([\d.]+) ms of .* it, ([\d.]+) ms", done.stdout
    ).groups())
    assert count > 1 and blocked <= length and hidden + exposed > 0, done.stdout
