"""--compile: the losses of the eager run, with all three axes; what it says without a compiler."""

import re

import pytest

from launch import fork, losses

COMMON = ["--num_hidden_layers", 2, "--seq_len", 32, "--learning_rate", 3e-4, "--max_tokens", 4 * 8 * 32,
          "--micro_batch_size", 2]


def test_compiled_losses_are_those_of_the_eager_run(tmp_path):
    where = ["--log_dir", tmp_path, "--run_name"]
    fork(3, 1, *COMMON, *where, "eager", "--gradient_accumulation_steps", 4)
    grid = ["--tp_size", 2, "--dp_size", 2, "--pp_size", 2, "--gradient_accumulation_steps", 2]
    fork(8, 8, *COMMON, *where, "compiled", *grid, "--compile", timeout=300)
    eager, compiled = losses(tmp_path, "eager"), losses(tmp_path, "compiled")
    assert len(eager) == 4 and compiled == pytest.approx(eager, abs=1e-4)

    grid = ["--pipelines", "1,1;2", "--num_microbatches", "3,1"]
    done = fork(9, 3, *COMMON, *where, "unlike", *grid, "--compile", timeout=300)
    assert losses(tmp_path, "unlike") == pytest.approx(eager, abs=1e-4)
    assert re.search(r"[\d.]+K to [\d.]+K parameters a rank on cpu", done.stdout), done.stdout


@pytest.mark.parametrize("step", [3, 9])
def test_no_compiler(tmp_path, step):
    done = fork(step, 1, "--compile", "--log_dir", tmp_path, check=False, env={"CXX": "no-such-compiler"})
    assert done.returncode != 0
    assert "error: --compile needs a C++ compiler, and 'no-such-compiler' is not found" in done.stderr
