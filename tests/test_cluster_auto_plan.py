"""Machines that can't hold the model plan by themselves: what they choose, what they say, and where ranks are then."""

import argparse
import json
import pathlib

import host_facts
import pytest
import torch
from clusters import made_up_cluster
from launch import fork, modules_of

with modules_of(9):
    from planning.machines import Cluster, Pipeline, Setting
    from planning.simulate import peak_memory
    from training import auto_plan, layout

RANKS = pathlib.Path(__file__).parent / "support" / "auto_plan_ranks.py"
OPTIONS = {"speeds": [4, 2, 1], "parameters": 1000, "saved_bytes": 100.0, "hidden_bytes": 64.0, "sizes": (1, 2)}


def flags(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"num_microbatches": None, "gradient_accumulation": 4, "pp_engine": "1f1b",
                                 "wire_dtype": None, "gradient_wire_dtype": None, "recompute": False, "batch_size": 1,
                                 **changes})


def choose(args=None, **options):
    return auto_plan.choose(args or flags(), made_up_cluster(**{**OPTIONS, **options}))


def test_enough_memory():
    assert choose() is None


def test_a_plan_within_memory():
    """No machine holds all layers; the step has as many micro-batches as with whole models."""
    options = {**OPTIONS, "memory": 9.5e4}
    chosen = choose(memory=9.5e4)
    assert sum(chosen.num_microbatches) == 12 and all(sum(layers) == 8 for layers in chosen.layers)
    assert sorted(chosen.order) == [0, 1, 2] and not chosen.recompute
    cluster, places = Cluster(made_up_cluster(**options)), iter(chosen.order)
    for layers, number in zip(chosen.layers, chosen.num_microbatches):
        machines = tuple(next(places) for _ in layers)
        peaks = peak_memory(cluster, Pipeline(machines, tuple(layers), number), 1, Setting(chosen.schedule))
        assert max(peaks) <= 0.9 * 9.5e4
        assert all(f"{peak / 1e9:.2f} of 0.00" in chosen.text for peak in peaks)
    assert chosen.text.startswith("plan: decoder layers ") and "host0" in chosen.text and "tokens/s" in chosen.text
    assert sum(choose(flags(num_microbatches=[[3, 2]]), memory=9.5e4).num_microbatches) == 5
    assert choose(flags(pp_engine="afab"), memory=9.5e4).schedule == "afab"


def test_recomputation_where_it_is_needed():
    options = {"speeds": [2, 1], "saved_bytes": 1e5, "hidden_bytes": 256.0, "memory": 4.1e5}
    chosen = choose(**options)
    assert chosen.recompute and "| --recompute" in chosen.text
    assert not choose(**{**options, "memory": 1.1e6}).recompute


@pytest.mark.parametrize("options, words", [
    ({"speeds": [1], "memory": 1e4}, "host0 0, of which 90% may be used; even --batch_size 1 --recompute needs"),
    ({"speeds": [1], "saved_bytes": 1e5, "hidden_bytes": 9e4, "memory": 1.5e6}, "; --batch_size 1 would fit"),
    ({"speeds": [1], "saved_bytes": 1e5, "memory": 6e5}, "; --batch_size 1 --recompute would fit"),
])
def test_nothing_fits(options, words):
    with pytest.raises(ValueError, match="not enough memory: with micro-batches of 4 samples") as error:
        choose(flags(batch_size=4), sizes=(1, 4), **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def write_model(folder) -> str:
    import transformers

    sizes = dict(vocab_size=512, hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=96, max_position_embeddings=64)
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


LORA = ["--lora_rank", 4, "--seq_len", 32, "--dtype", "float32", "--batch_size", 2, "--gradient_accumulation", 2]


def found(done) -> list[dict]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda line: line["rank"])


def test_ranks_get_the_order_of_the_plan(tmp_path):
    """Rank 0 has hardly any memory and is left idle: the others are ranks 0 and 1 of the run, and communicate."""
    ranks = found(done := fork(9, 3, write_model(tmp_path), "1e4,1.6e6,1.6e6", *LORA, script=RANKS))
    assert [line["rank"] for line in ranks] == [0, 1] and {line["before"] for line in ranks} == {1, 2}
    assert all(line["sum"] == 5 and line["planned"] for line in ranks)
    (layers,), (shares,) = ranks[0]["pipelines"], ranks[0]["shares"]
    assert len(layers) == 1 and sum(layers[0]) == 6 and shares == [6]
    assert ranks[0]["pipelines"] == ranks[1]["pipelines"]
    assert "measuring 3 ranks" in done.stdout and "predicted: " in done.stdout and "| idle: " in done.stdout


def test_where_all_fits_nothing_is_measured(tmp_path):
    ranks = found(done := fork(9, 2, write_model(tmp_path), "1e11,1e11", *LORA, script=RANKS))
    assert [line["planned"] for line in ranks] == [False, False] and ranks[0]["pipelines"] is None
    assert "measuring" not in done.stdout


def test_one_clear_line_where_nothing_fits(tmp_path):
    done = fork(9, 2, write_model(tmp_path), "1e4,2e4", *LORA, script=RANKS, check=False)
    lines = [line for line in done.stderr.splitlines() if "not enough memory" in line]
    assert done.returncode and lines and "Traceback" not in done.stderr
    assert "free are, in MB" in lines[0] and "MB more, or add machines" in lines[0]


def test_shares_by_speed_of_a_model_of_transformers(monkeypatch):
    """Where all machines hold the model, each rank's speed is measured layer by layer, as for our Llama."""
    seconds = iter([1.0, 4.0])
    asked = []

    class Clock:
        def __init__(self, *args):
            asked.append(args[-1])

        def seconds_of_whole(self, size, recompute):
            return [next(seconds), next(seconds)]

    monkeypatch.setattr(layout, "StageClock", Clock)
    monkeypatch.setattr(layout, "gather", lambda value: value)
    monkeypatch.setattr(layout, "measured_speeds", lambda *args: None)
    monkeypatch.setattr(layout.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(layout.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(layout.dist, "barrier", lambda: None)
    model = torch.nn.Module()
    model.config = None
    args = flags(equal_shares=False, gradient_accumulation=5, seq_len=32)
    device = torch.device("cpu")
    assert layout.choose_shares(args, model, ["pipeline"] * 2, 0, device, None, None, "adapters") == [8, 2]
    assert asked == ["adapters"]


def test_shares_of_a_checkpoint():
    """A run that goes on with other machines: its micro-batches, by the speed of the new plan's pipelines."""
    args = flags(num_microbatches=[[6, 2]], pipeline_seconds=[1.0, 1.0])
    assert layout.choose_shares(args, None, ["pipeline"] * 2, 0, None, None, 6) == [3, 3]
    assert layout.choose_shares(args, None, ["pipeline"] * 2, 0, None, None, None) == [6, 2]


@pytest.mark.parametrize("own, files", [
    ("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat":
                 "anon 900\nactive_file 1500\ninactive_file 700\nfile_mapped 200\n"}),
    ("3:memory:/a\n", {"memory/a/memory.limit_in_bytes": "5000", "memory/a/memory.usage_in_bytes": "4000",
                       "memory/a/memory.stat": "mapped_file 1\nactive_file 9\ntotal_active_file 1500\n"
                                               "total_inactive_file 700\ntotal_mapped_file 200\n"}),
])
def test_files_that_a_control_group_keeps_in_memory_are_free(tmp_path, monkeypatch, own, files):
    """But for those that are mapped: the libraries of the processes themselves."""
    for name, text in {"own": own, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_facts, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_facts, "CGROUPS", str(tmp_path))
    assert host_facts.available_memory() == 3000
