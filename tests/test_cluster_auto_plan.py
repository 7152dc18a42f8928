"""Machines that can't hold the model plan by themselves: what they choose, what they say, and where ranks are then."""

import argparse
import json
import re

import pytest
from lab.launch import metrics, modules_of
from support.checkpoint_runs import flags_of, write_corpus, write_model
from support.clusters import made_up_cluster

with modules_of(9):
    from planning import plan_file
    from planning.machines import Cluster, Pipeline, Setting
    from planning.simulate import peak_memory
    from run import decide

OPTIONS = {"speeds": [4, 2, 1], "parameters": 1000, "saved_bytes": 100.0, "hidden_bytes": 64.0, "sizes": (1, 2)}


def flags(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"num_microbatches": None, "gradient_accumulation": 4, "pp_engine": "1f1b",
                                 "wire_dtype": None, "gradient_wire_dtype": None, "recompute": False, "batch_size": 1,
                                 "tp_size": 1,
                                 **changes})


def choose(args=None, **options):
    return decide.choose(args or flags(), made_up_cluster(**{**OPTIONS, **options}))


def test_a_plan_within_memory(capsys):
    """No machine holds all layers; the step has as many micro-batches as with whole models."""
    options = {**OPTIONS, "memory": 9.5e4}
    plan, printed = choose(memory=9.5e4), capsys.readouterr().out
    numbers = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]]
    assert sum(numbers) == 12 and all(sum(pipeline["layers"]) == 8 for pipeline in plan["pipelines"])
    assert sorted(plan_file.machines_of(plan)) == [0, 1, 2] and not plan["recompute"]
    cluster = Cluster(made_up_cluster(**options))
    for pipeline in plan["pipelines"]:
        made = Pipeline(tuple(pipeline["machines"]), tuple(pipeline["layers"]), pipeline["num_microbatches"])
        peaks = peak_memory(cluster, made, 1, Setting(plan["schedule"]))
        assert max(peaks) <= 0.9 * 9.5e4
    assert printed.startswith("plan:\n") and "tokens/s" in printed and "--pipelines " in printed
    told = choose(flags(num_microbatches=[[3, 2]]), memory=9.5e4)
    assert sum(pipeline["num_microbatches"] for pipeline in told["pipelines"]) == 5
    assert choose(flags(pp_engine="afab"), memory=9.5e4)["schedule"] == "afab"
    assert choose(speeds=[2, 1], saved_bytes=1e5, hidden_bytes=256.0, memory=4.1e5)["recompute"], "else it does not fit"


def test_nothing_fits():
    with pytest.raises(ValueError, match="not enough memory for any plan: .* micro-batches of 4 samples") as error:
        choose(flags(batch_size=4), sizes=(1, 4), speeds=[1], memory=1e4)
    assert "machine 0 (host0) 0.009: 0.9 of what was free" in str(error.value) and "\n" not in str(error.value)


# The machines have so many bytes free, MEMORY.
SMALL = """
import json, os
from planning import profiler
from run import decide
room = json.loads(os.environ["MEMORY"])[int(os.environ["RANK"])]
decide.free_memory = profiler.free_memory = lambda device: room
decide.MEASURE_SECONDS, profiler.TRAINING_BYTES = 0.5, 0.0
"""


SIZES = dict(hidden_size=64, num_hidden_layers=6, num_key_value_heads=2, intermediate_size=96)
LORA = dict(lora_rank=4, seq_len=32, batch_size=2, gradient_accumulation=2)


def run(folder, run_code, memory: str, sizes: dict = SIZES, flags: dict = LORA, **options):
    """Adapters that are trained for a step, one rank for each of these numbers of free bytes."""
    model = write_model(folder / "model", "llama", "float32", vocab_size=1024, num_attention_heads=4, **sizes)
    write_corpus(folder)
    words = flags_of(folder, "small", model, dtype="float32", max_steps=1, **flags)
    return run_code("cluster", memory.count(",") + 1, SMALL, *words, then="train_distributed.py",
                    env={"MEMORY": memory}, **{"modules": ["peft"], **options})


def test_ranks_get_the_order_of_the_plan(tmp_path, run_code):
    """Rank 0 has hardly any memory and is left idle: the others are ranks 0 and 1 of the run, and train."""
    printed = run(tmp_path, run_code, "[1e4, 1.9e6, 1.9e6]").stdout
    assert "measuring 3 ranks" in printed and re.search(r"tokens/s.*\n.* machines (1,2|2,1) \| idle: 0\n", printed)
    config = json.loads((tmp_path / "runs" / "small" / "config.json").read_text())
    [[layers]] = config["pipelines"]
    assert len(layers) == 2 and sum(layers) == 6 and config["num_microbatches"] == [[6]]
    assert len(metrics(tmp_path / "runs", "small")) == 1


def test_one_clear_line_where_nothing_fits(tmp_path, run_code):
    done = run(tmp_path, run_code, "[1e4, 2e4]", check=False)
    lines = [line for line in done.stderr.splitlines() if "not enough memory" in line]
    assert done.returncode and lines and "Traceback" not in done.stderr
    assert "The machines may use, in MB" in lines[0] and "add a machine" in lines[0]


def test_shares_of_a_checkpoint(monkeypatch):
    """A run that goes on with other machines: its samples, by the speed of the new plan's pipelines."""
    monkeypatch.setattr(decide.PipelineTemplate, "from_layers_per_stage", lambda model, layers: layers)
    pipelines = [{"layers": [8], "num_microbatches": 6}, {"layers": [8], "num_microbatches": 2}]
    plan = {"pipelines": pipelines, "micro_batch_size": 2, "schedule": "1f1b"}
    found, made = argparse.Namespace(state={"global_batch": 12}, path="there"), argparse.Namespace(model=None)
    args = argparse.Namespace(plan=None)
    assert decide.choose_layout(args, made, plan, found, None, None).samples == [9, 3]
    assert decide.choose_layout(args, made, plan, None, None, None).samples == [12, 4]
    found.state["global_batch"] = 13
    chosen = decide.choose_layout(args, made, plan, found, None, None)
    assert chosen.samples == [10, 3] and chosen.num_microbatches == [5, 2]
