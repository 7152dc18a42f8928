"""Where memory runs out: one line that says what to do about it, with flags that the script has."""

import re

import pytest
from lab.launch import ROOT, STEPS

RAISED = 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nGPU 0 has a total of 8 GiB")'
FAILURES = {  # what the script does -> what the line begins with
    "of a GPU": (f"raise {RAISED}", "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.): "),
    "of the CPU": ("torch.empty(1 << 50, dtype=torch.uint8)", "out of memory ("),  # a true one: a thousand TB
}
SCRIPTS = {  # script -> where its flags are
    **{path: [path.with_name("train.py")] for path in sorted([
        *(step / "train.py" for step in STEPS.values()),
        *(STEPS["9"] / f"run_{name}.py" for name in ("causal_lm", "gpt2"))])},
    **{ROOT / "cluster" / f"{name}.py": [ROOT / "cluster" / path for path in (
        f"{name}.py", "run/flags.py", "run/layout.py")]
       for name in ("train_distributed", "three_stages_simple_pp", "train_single_test", "plan")}}


@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize("what", FAILURES)
def test_out_of_memory_is_one_line(run_code, step, what):
    action, beginning = FAILURES[what]
    done = run_code(step, 1, f"""
import torch
from utils import one_clear_error
with one_clear_error(out_of_memory="lower --this or --that"):
    {action}
""", check=False, timeout=60)
    errors = [line for line in done.stderr.splitlines() if "memory" in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and errors[0].startswith(f"error: {beginning}"), done.stderr
    assert errors[0].endswith("): lower --this or --that")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name.split('_')[0]}-{path.stem}")
def test_the_remedy_is_made_of_the_scripts_own_flags(script):
    [remedy] = re.findall(r'with one_(?:clear_error|error_of_all)\(out_of_memory="(.+?)"\)', script.read_text())
    own = {flag for path in SCRIPTS[script] for flag in re.findall(r'"(--\w+)"', path.read_text())}
    named = set(re.findall(r"--\w+", remedy))
    assert len(own) > 10 and named and named <= own, f"{script} has no {named - own}"
