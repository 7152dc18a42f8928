"""Step 9 over Hugging Face's families: unlike pipelines train what the plain model trains; a script with pipelines of its own."""

import json

import pytest
from lab.launch import MODELS, ROOT, STEPS, fork, losses

SAMPLED = ["gpt2-tied", "mixtral", "bert-tied", "vit", "gpt2-frozen"]  # each kind of model once
OVER_TP = [["gpt2-tied", "gpt2-frozen", "qwen3-tied", "gpt-neox"], ["opt-projected", "llama-classifier", "mixtral", "phi"],
           ["cohere", "glm4-moe", "apertus"]]
WIDE = ["phi", "cohere", "glm4-moe", "apertus"]  # over four tp ranks as well


@pytest.mark.parametrize("tp_size, cases", [
    (1, SAMPLED), *(pytest.param(2, each, marks=pytest.mark.drawn(1)) for each in OVER_TP),
    *(pytest.param(4, [each], marks=pytest.mark.slow(drawn=1)) for each in WIDE)], ids=str)
def test_families_equal_the_plain_model(tmp_path, tp_size, cases):
    """Over three ranks, or so many times tp_size, in one job: losses and norms of all steps, gradients of the first."""
    script = ROOT / "tests" / "support" / "families_in_pipelines.py"
    fork(9, 3 * tp_size, tmp_path, tp_size, *cases, script=script, modules=MODELS)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(results) == 3 * tp_size and all(result.keys() == set(cases) for result in results)
    off = {f"{case}, {what}": worst for result in results for case, all_worst in result.items()
           for what, worst in zip(("loss", "gradient", "norm"), all_worst, strict=True) if not worst <= 1e-9}
    assert not off, off


def test_script_with_pipelines_of_its_own_learns(tmp_path):
    fork(9, 4, "--steps", 8, "--device", "cpu", "--dtype", "bfloat16", "--log_dir", tmp_path, "--run_name", "gpt2",
         modules=MODELS, script=STEPS["9"] / "run_gpt2.py")
    found = losses(tmp_path, "gpt2")
    assert len(found) == 8 and found[-1] < found[0]


@pytest.mark.parametrize("flags, message", [
    (["--seq_len", 129], "--seq_len 129 is more than the 128 positions of the model: use 128 or less"),
    (["--model_name_or_path", "no/such"], "--model_name_or_path 'no/such': there is no such path"),
])
def test_errors_of_the_scripts(flags, message):
    done = fork(9, 4, *flags, "--device", "cpu", script=STEPS["9"] / "run_gpt2.py", modules=MODELS, check=False)
    assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
