"""--compile: the losses of the eager run, from compiled layers; what it says without a compiler.

The first run of these compiles for half a minute, beside other tests; torch keeps what it has compiled for later ones.
"""

import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import tempfile

import pytest
from launch import STEPS, fork, losses, start_fork

COMMON = ["--num_hidden_layers", 2, "--seq_len", 32, "--learning_rate", 3e-4, "--micro_batch_size", 2]
COUNT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
from torch._dynamo.utils import counters
print("compiled", counters["frames"]["ok"])
"""


HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler: apt-get install g++")


@functools.cache
def start(dtype: str) -> list[concurrent.futures.Future]:
    """The eager run and the compiled one."""
    script = pathlib.Path(tempfile.mkdtemp(prefix="compile"), "count.py")
    script.write_text(COUNT)
    flags = [STEPS["1"] / "train.py", *COMMON, "--max_tokens", 4 * 2 * 32, "--dtype", dtype]
    return [start_fork(1, 1, *flags, *more, script=script, timeout=600) for more in ([], ["--compile"])]


@needs_compiler
@pytest.mark.parametrize("dtype, tolerance", [
    ("float32", 2e-4), pytest.param("bfloat16", 2e-2, marks=pytest.mark.slow)])
def test_compiled_losses_are_those_of_the_eager_run(dtype, tolerance):
    eager, compiled = start(dtype)
    expected, found = (list(map(float, re.findall(r"loss (\S+)", run.result().stdout))) for run in (eager, compiled))
    assert len(expected) == 4 and found == pytest.approx(expected, abs=tolerance)
    assert "compiled 0\n" in eager.result().stdout
    assert "compiled 1\n" in compiled.result().stdout, "the two layers are alike, and share the code"


test_compiled_losses_are_those_of_the_eager_run.start_early = (  # see conftest.py
    lambda item: HAS_COMPILER and start(item.callspec.params["dtype"]))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("step, ranks, grid", [
    (8, 8, ["--tp_size", 2, "--dp_size", 2, "--pp_size", 2, "--gradient_accumulation_steps", 2]),
    (9, 3, ["--pipelines", "1,1;2", "--num_microbatches", "3,1"]),
    (15, 4, ["--tp_size", 2, "--cp_size", 2, "--sequence_parallel", "--gradient_accumulation_steps", 4]),
], ids=["step8-3d", "step9-unlike", "step15"])
def test_compiled_layers_in_every_topology(step, ranks, grid, tmp_path):
    common = [*COMMON, "--max_tokens", 4 * 8 * 32, "--log_dir", tmp_path, "--run_name"]
    fork(3, 1, *common, "eager", "--gradient_accumulation_steps", 4)
    fork(step, ranks, *common, "compiled", *grid, "--compile", timeout=500)
    eager = losses(tmp_path, "eager")
    assert len(eager) == 4 and losses(tmp_path, "compiled") == pytest.approx(eager, abs=1e-4)


@pytest.mark.parametrize("step", [1, 9])
def test_no_compiler(tmp_path, step):
    logs = ["--log_dir", tmp_path] if step > 1 else []
    done = fork(step, 1, "--compile", *logs, check=False, env={"CXX": "no-such-compiler"})
    assert done.returncode != 0
    assert "error: --compile needs a C++ compiler, and 'no-such-compiler' is not found" in done.stderr
