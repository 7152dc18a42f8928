"""Where memory runs out: one line that says what to do about it, with flags that the script has."""

import re

import pytest
from launch import STEPS, fork

RAISED = 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nGPU 0 has a total of 8 GiB")'
FAILURES = {  # what the script does -> what the line begins with
    "of a GPU": (f"raise {RAISED}", "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.): "),
    "of the CPU": ("torch.empty(1 << 50, dtype=torch.uint8)", "out of memory ("),  # a true one: a thousand TB
}
SCRIPTS = sorted([*(step / "train.py" for step in STEPS.values()),
                  *(STEPS["9"] / f"run_{name}.py" for name in ("causal_lm", "common", "gpt2"))])


@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize("what", FAILURES)
def test_out_of_memory_is_one_line(tmp_path, step, what):
    script = tmp_path / "script.py"
    action, beginning = FAILURES[what]
    script.write_text(f"""
import sys
sys.path.insert(0, {str(STEPS[str(step)])!r})
import torch
from utils import one_clear_error
with one_clear_error(out_of_memory="lower --this or --that"):
    {action}
""")
    done = fork(step, 1, script=script, check=False, timeout=60)
    errors = [line for line in done.stderr.splitlines() if "memory" in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and errors[0].startswith(f"error: {beginning}"), done.stderr
    assert errors[0].endswith("): lower --this or --that")


def flags_of(path) -> set[str]:
    return set(re.findall(r'add_argument\("(--\w+)"', path.read_text()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name.split('_')[0]}-{path.stem}")
def test_the_remedy_is_made_of_the_scripts_own_flags(script):
    [remedy] = re.findall(r'with one_clear_error\(out_of_memory="(.+)"\):', script.read_text())
    own = flags_of(script.with_name("train.py"))
    named = set(re.findall(r"--\w+", remedy))
    assert len(own) > 10 and named and named <= own, f"{script} has no {named - own}"
