"""Machines that can't hold the model plan by themselves: what they choose, what they say, and where ranks are then."""

import argparse
import json
import pathlib

import pytest
from lab.launch import fork, modules_of
from support.checkpoint_runs import write_model
from support.clusters import made_up_cluster

with modules_of(9):
    from planning import plan_file
    from planning.machines import Cluster, Pipeline, Setting
    from planning.simulate import peak_memory
    from run import decide

RANKS = pathlib.Path(__file__).parent / "support" / "auto_plan_ranks.py"
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


def test_nothing_fits():
    with pytest.raises(ValueError, match="not enough memory for any plan: .* micro-batches of 4 samples") as error:
        choose(flags(batch_size=4), sizes=(1, 4), speeds=[1], memory=1e4)
    assert "machine 0 (host0) 0.009: 0.9 of what was free" in str(error.value) and "\n" not in str(error.value)


MODEL = dict(kind="llama", vocab_size=512, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
             architectures=["LlamaForCausalLM"])
LORA = ["--lora_rank", 4, "--seq_len", 32, "--dtype", "float32", "--batch_size", 2, "--gradient_accumulation", 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plans") / "model", **MODEL)


def run(model, memory: str, check: bool = True):
    """One rank for each of these numbers of free bytes, and the lines of JSON that those left have printed."""
    done = fork(9, memory.count(",") + 1, model, memory, *LORA, script=RANKS, check=check, modules=["peft"])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, sorted(lines, key=lambda line: line["rank"])


def test_ranks_get_the_order_of_the_plan(model):
    """Rank 0 has hardly any memory and is left idle: the others are ranks 0 and 1 of the run, and communicate."""
    done, ranks = run(model, "1e4,1.6e6,1.6e6")
    assert [line["rank"] for line in ranks] == [0, 1] and {line["before"] for line in ranks} == {1, 2}
    assert all(line["sum"] == 5 for line in ranks) and ranks[0]["plan"] == ranks[1]["plan"]
    [pipeline] = ranks[0]["plan"]["pipelines"]
    assert sum(pipeline["layers"]) == 6 and pipeline["num_microbatches"] == 6
    assert "measuring 3 ranks" in done.stdout and "tokens/s" in done.stdout and "| idle: " in done.stdout


def test_one_clear_line_where_nothing_fits(model):
    done, _ = run(model, "1e4,2e4", check=False)
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
