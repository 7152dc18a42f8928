"""--compile: the losses of the eager run, from compiled layers; what it says without a compiler."""

import os
import re
import shutil

import pytest
from lab.launch import fork, losses

COMMON = ["--num_hidden_layers", 2, "--seq_len", 32, "--learning_rate", 3e-4, "--micro_batch_size", 2]
COUNT = """
import atexit, functools, torch
from torch._dynamo.utils import counters
torch.compile = functools.partial(torch.compile, backend={!r})
atexit.register(lambda: print("compiled", counters["frames"]["ok"], flush=True))
"""
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                    reason="there is no C++ compiler: apt-get install g++")


@needs_compiler
@pytest.mark.parametrize("backend, dtype, tolerance", [
    ("aot_eager", "float32", 2e-4), *(pytest.param("inductor", *each, marks=pytest.mark.slow)
                                      for each in [("float32", 2e-4), ("bfloat16", 2e-2)])])
def test_compiled_losses_are_those_of_the_eager_run(run_code, backend, dtype, tolerance):
    """By default, of layers that are only traced: inductor compiles for half a minute, in the first run of all."""
    flags = [*COMMON, "--max_tokens", 4 * 2 * 32, "--dtype", dtype]
    eager, compiled = (run_code(1, 1, COUNT.format(backend), *flags, *more, then="train.py", timeout=600).stdout
                       for more in ([], ["--compile"]))
    expected, found = (list(map(float, re.findall(r"loss (\S+)", printed))) for printed in (eager, compiled))
    assert len(expected) == 4 and found == pytest.approx(expected, abs=tolerance)
    assert "compiled 0\n" in eager
    assert "compiled 1\n" in compiled, "the two layers are alike, and share the code"


@needs_compiler
@pytest.mark.slow(drawn=1)
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
