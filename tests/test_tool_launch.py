"""launch.py: what forked jobs are given, and that none of them can hang a test."""

import uuid

import pytest
from launch import environment, fork
from processes import processes


@pytest.fixture
def script(tmp_path):
    def script(text: str):
        path = tmp_path / f"{uuid.uuid4().hex}.py"
        path.write_text(f"import os, pathlib, sys, time\nrank = int(os.environ['RANK'])\n{text}")
        return path

    return script


def test_the_environment_has_no_way_out(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    found = environment(A="b")
    assert found["HF_HUB_OFFLINE"] == found["OMP_NUM_THREADS"] == "1" and found["A"] == "b" and "PATH" in found
    assert not [name for name in found if name.lower().endswith("_proxy")]


def test_the_first_failure_ends_the_other_ranks(script):
    marker = uuid.uuid4().hex
    path = script("sys.exit(7) if rank == 1 else time.sleep(1000)")
    done = fork(1, 3, script=path, check=False, env={"MARKER": marker})
    assert done.returncode == 7 and not processes(marker)
    with pytest.raises(AssertionError, match="exit code 7"):
        fork(1, 3, script=path)


def test_a_rank_that_hangs_shows_where(script):
    done = fork(1, 2, script=script("def waits():\n    time.sleep(1000)\nwaits()"), check=False, timeout=2)
    assert done.returncode != 0 and "Timeout" in done.stderr and "in waits" in done.stderr
