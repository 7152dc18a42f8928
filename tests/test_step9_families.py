"""Step 9 over Hugging Face's families: unlike pipelines train what the plain model trains; the run_*.py scripts."""

import importlib
import json
import types

import pytest
import torch.distributed as dist
from families import toy
from launch import MODELS, ROOT, STEPS, fork, losses, modules_of, start_fork
from torch.testing._internal.distributed.fake_pg import FakeStore

with modules_of(9):
    import train

SAMPLED = {1: ["gpt2-tied", "mixtral", "bert-tied", "vit", "gpt2-frozen"],  # tp_size -> cases: each kind of model once
           2: ["gpt2-tied", "gpt2-frozen", "qwen3-tied", "gpt-neox", "opt-projected", "llama-classifier",
               "mixtral"]}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_families_equal_the_plain_model(tmp_path, tp_size):
    """Over three ranks, or six with tp 2, in one job: losses and norms of all steps, gradients of the first."""
    script = ROOT / "tests" / "support" / "families_in_pipelines.py"
    fork(9, 3 * tp_size, tmp_path, tp_size, *SAMPLED[tp_size], script=script, modules=MODELS)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(results) == 3 * tp_size and all(result.keys() == set(SAMPLED[tp_size]) for result in results)
    off = {f"{case}, {what}": worst for result in results for case, all_worst in result.items()
           for what, worst in zip(("loss", "gradient", "norm"), all_worst, strict=True) if not worst <= 1e-9}
    assert not off, off


SCRIPTS = {  # name -> steps, dtype
    "gpt2": (8, "bfloat16"), "vit": (8, "float32")}  # test_pages_commands.py has all of them


@pytest.fixture(scope="module")
def script_runs(selected, tmp_path_factory):
    """name -> the future of run_<name>.py on four ranks, and the folder of its records."""
    folder = tmp_path_factory.mktemp("scripts")
    return {name: (start_fork(9, 4, "--steps", steps, "--device", "cpu", "--dtype", dtype, "--log_dir", folder,
                              "--run_name", name, modules=MODELS, script=STEPS["9"] / f"run_{name}.py"), folder)
            for name, (steps, dtype) in SCRIPTS.items() if name in selected("name")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_learn(name, script_runs):
    run, folder = script_runs[name]
    run.result()
    found = losses(folder, name)
    assert len(found) == SCRIPTS[name][0] and found[-1] < found[0]


@pytest.mark.parametrize("name, tp_size, world_size, stages, counts", [
    ("gpt2", 1, 8, [2, 1, 1] * 2, [2, 3, 3] * 2), ("llama", 1, 4, [3, 1], [5, 3]),
    ("qwen", 2, 8, [1, 1] * 2, [5, 3] * 2)])
def test_scripts_repeat_their_pipelines_on_more_processes(name, tp_size, world_size, stages, counts):
    """As on two machines of four GPUs each, unless flags give others. No process but this one runs."""
    with modules_of(9):
        script = importlib.import_module(f"run_{name}")
    args = types.SimpleNamespace(pipelines=None, dp_size=1, pp_size=1, gradient_accumulation_steps=None,
                                 num_microbatches=None, tp_size=tp_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        plugin, model = train.HeterogeneousParallelPlugin(tp_size, device="cpu"), toy("gpt2", n_layer=4)
        plugin.set_pipelines(*train.choose_pipelines(args, model, script.pipelines))
        assert train.pgm.process_group_manager.topology["stages_per_pipeline"] == stages
    finally:
        dist.destroy_process_group()
    assert plugin.num_microbatches == counts
    args.pipelines = [[1, 1]]  # fewer layers than the script's own pipelines need
    assert train.choose_pipelines(args, toy("gpt2", n_layer=2), script.pipelines)[0][0].num_stages == 2


@pytest.mark.parametrize("flags, message", [
    (["--seq_len", 129], "--seq_len 129 is more than the 128 positions of the model: use 128 or less"),
    (["--model_name_or_path", "no/such"], "--model_name_or_path 'no/such': there is no such path"),
])
def test_errors_of_the_scripts(flags, message):
    done = fork(9, 4, *flags, "--device", "cpu", script=STEPS["9"] / "run_gpt2.py", modules=MODELS, check=False)
    assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
