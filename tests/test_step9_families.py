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
