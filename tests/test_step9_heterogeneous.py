"""Step 9: unlike pipelines compute what one process computes, losses and every gradient, in float64, accumulating."""

import json
import re

import pytest
import torch

from launch import MODELS, ROOT, STEPS, fork, losses
from test_all_steps_same_math import SEQ_LEN, TOLERANCE, assemble, folder, record  # noqa: F401, the fixture of its models

NUM_STEPS, SAMPLES = 10, 16
SHAPES = {  # name -> pipelines, micro-batches of a step, tp_size: 8 micro-batches of 2 samples in all
    "2+1": ("5,3;8", "6,2", 1),
    "1+1+2": ("8;8;3,5", "3,2,3", 1),
    "3": ("2,5,1", "8", 1),
    "2+1-tp2": ("2,6;8", "5,3", 2),
}
LIKE = {8: ["--gradient_accumulation_steps", "4"], 9: ["--num_microbatches", "4,4"]}  # dp 2 x pp 2, in two ways


@pytest.fixture(scope="module")
def recorded(folder):  # noqa: F811
    """A function that runs a case, unless it has been run, and returns its folder, beside metrics.jsonl."""
    def recorded(name: str, step: int, variant: str = "plain"):
        out = folder / f"step{step}-{name}-{variant}"
        if out.exists():
            return out
        if name == "2x2":
            ranks, flags = 4, ["--dp_size", 2, "--pp_size", 2, *LIKE[step]]
        elif name == "base":
            ranks, flags = 1, []
        else:
            pipelines, counts, tp = SHAPES[name]
            ranks = tp * len(pipelines.replace(";", ",").split(","))
            flags = ["--pipelines", pipelines, "--num_microbatches", counts, "--tp_size", tp]
        common = ["--micro_batch_size", 2, "--seq_len", SEQ_LEN, "--dtype", "float64", "--log_dir", folder,
                  "--run_name", out.name, "--max_tokens", NUM_STEPS * SAMPLES * SEQ_LEN,
                  "--model_name", folder / f"model_{variant}"]
        record(out, step, ranks, common + flags)
        return out

    return recorded


def load(path) -> list[dict]:
    return [torch.load(rank) for rank in sorted(path.glob("rank*.pt"))]


@pytest.mark.parametrize("variant", ["plain", "tied"])
@pytest.mark.parametrize("name", SHAPES)
def test_unlike_pipelines_equal_one_process(recorded, name, variant):
    one, many = recorded("base", 3, variant), recorded(name, 9, variant)
    expected, found = losses(one.parent, one.name), losses(many.parent, many.name)
    assert len(found) == NUM_STEPS and max(abs(a - b) for a, b in zip(expected, found)) <= TOLERANCE
    [base], ranks = load(one), load(many)
    for what in ("initial", "grads", "final"):
        full = assemble(ranks, what)
        if variant == "tied" and "final_proj.weight" in full:
            assert torch.equal(full["embedding.weight"], full.pop("final_proj.weight")), f"{what}: tied copies differ"
        assert full.keys() == base[what].keys()
        for key, tensor in base[what].items():
            worst = (full[key] - tensor).abs().max().item()
            assert worst <= (1e-8 if what == "final" else TOLERANCE), f"{what} of {key}: {worst:.1e} apart"


def test_config_lists_the_stages_of_each_pipeline(recorded):
    config = json.loads((recorded("1+1+2", 9).parent / "step9-1+1+2-plain" / "config.json").read_text())
    assert config["topology"] == {"dp_size": 3, "stages_per_pipeline": [1, 1, 2], "tp_size": 1, "world_size": 4}


def test_live_activations(recorded):
    for rank in load(recorded("1+1+2", 9)):
        limit = {0: 1, 1: 1, 2: 2 - rank["place"]["pp"]}[rank["place"]["dp"]]
        assert rank["peak"] == limit, rank["place"]


def test_like_pipelines_are_step_8(recorded):
    eight, nine = (losses(path.parent, path.name) for path in (recorded("2x2", step) for step in LIKE))
    assert len(nine) == NUM_STEPS and eight == nine


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_family_equals_the_plain_model(tmp_path, tp_size):
    """Besides, as a 2-stage and a 1-stage pipeline train it: over three ranks, or six with tp 2."""
    script = ROOT / "tests" / "support" / "families_in_pipelines.py"
    fork(9, 3 * tp_size, tmp_path, tp_size, script=script, modules=MODELS, timeout=300)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(results) == 3 * tp_size and len(results[0]) >= 15
    off = {f"{name}, {what}": worst for result in results for name, pair in result.items()
           for what, worst in zip(("loss", "gradient"), pair) if not worst <= 1e-9}
    assert not off, off


@pytest.mark.parametrize("flags, message", [
    (["--pipelines", "8;5,3"], "Number of ranks in pipeline templates does not match world size: stages [1, 2] x "
                               "tp_size=1 need 3 processes, but 2 run"),
    (["--pipelines", "8;8", "--num_microbatches", "6"],
     "All pipelines must have a corresponding number of microbatches: 1 numbers [6] for 2 pipelines"),
    (["--pipelines", "8;7"], "stages of 7 decoder layers have 7 together, but the model has 8"),
    (["--pipelines", "8;x"], "--pipelines 'x': write positive numbers with commas between them, as in 5,3"),
    (["--pipelines", ""], "--pipelines '': write positive numbers with commas between them, as in 5,3"),
    (["--num_microbatches", ""], "--num_microbatches '': write positive numbers with commas between them"),
    (["--pipelines", "8;8", "--dp_size", "2"], "leave out --dp_size and --pp_size"),
])
def test_wrong_pipelines(tmp_path, flags, message):
    done = fork(9, 2, *flags, "--log_dir", tmp_path, check=False, timeout=60)
    assert done.returncode != 0 and message in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1, done.stderr


def test_templates_of_the_wrong_model_are_an_error_on_every_rank(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(f'''
import sys
sys.path[:0] = [{str(STEPS["9"])!r}, {str(ROOT / "tests" / "support")!r}]
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5Model
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
import torch, torch.distributed as dist
plugin = HeterogeneousParallelPlugin(device="cpu")
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
name, modules = PipelineTemplate.get_model_name(model), PipelineTemplate.get_modules(model)
def attempt(model, stages, counts):
    try:
        pipelines = [PipelineTemplate(PipelineTemplate.get_model_name(model), part) for part in stages]
        plugin.set_pipelines(pipelines, counts)
        plugin.configure(model, torch.optim.SGD(model.parameters()))
    except Exception as error:
        print(f"<{{dist.get_rank()}} {{type(error).__name__}}: {{str(error).splitlines()[0][:90]}}>", flush=True)
attempt(model, [[modules], [modules[:-1]]], [1, 1])  # only the second pipeline's is wrong
attempt(model, [[modules[1:4], [modules[0], *modules[4:]]]], [1])
attempt(model, [[modules[:-1], modules[-1:]]], {{}})
attempt(model, [[modules]], [1])
attempt(T5Model(T5Config(num_layers=1, d_model=8, d_kv=4, num_heads=2, d_ff=8, vocab_size=16)), [[["a"], ["b"]]], [1])
one = PipelineTemplate(name, [modules])
plugin.set_pipelines([one, one], [3, 5])
sizes = plugin.dp_size, plugin.pp_size, plugin.global_batch_size, plugin.train_batch_size
print(f"<{{dist.get_rank()}} {{sizes}}>", flush=True)
''')
    out = fork(9, 2, script=script, modules=MODELS, timeout=60).stdout
    assert "<0 (2, 1, 8, 3)>" in out and "<1 (2, 1, 8, 5)>" in out, out
    for rank in (0, 1):
        for error in ("ValueError: Modules in the pipeline template do not match the modules in the model",
                      "ValueError: The first stage must contain the transformer.wte module",
                      "AssertionError: All pipelines must have a corresponding number of microbatches",
                      "AssertionError: Number of ranks in pipeline templates does not match world size",
                      "NotImplementedError: Auto policy for transformers.models.t5.modeling_t5.T5Model is not"):
            assert f"<{rank} {error}" in out, out


@pytest.mark.parametrize("name, steps, precision", [
    ("gpt2", 8, "bf16"), ("llama", 8, "fp64"), ("qwen", 8, "fp32"), ("bert", 25, "fp32"), ("vit", 8, "bf16")])
def test_scripts_learn(name, steps, precision):
    flags = ["--steps", steps, "--device", "cpu", "--precision", precision]
    done = fork(9, 4, *flags, script=STEPS["9"] / f"run_{name}.py", modules=MODELS)
    first, last = map(float, re.search("loss of the first step (.*), of the last (.*)", done.stdout).groups())
    assert last < first


@pytest.mark.parametrize("ranks, flags, message", [
    (3, [], "Number of ranks in pipeline templates does not match world size: stages [2, 1, 1] x tp_size=1 need 4"),
    (4, ["--seq_len", 129], "--seq_len 129 is more than the 128 positions of the model: use 128 or less"),
    (4, ["--model_name_or_path", "no/such"], "--model_name_or_path 'no/such': there is no such path"),
])
def test_errors_of_the_scripts(ranks, flags, message):
    done = fork(9, ranks, *flags, "--device", "cpu", script=STEPS["9"] / "run_gpt2.py", modules=MODELS, check=False)
    assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
