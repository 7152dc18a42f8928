"""`--help` of every script, from a directory of its own: what it imports is found there, and nothing is written."""

import subprocess
import sys

import pytest

from launch import ROOT, environment

pytestmark = pytest.mark.tools
NOT_SCRIPTS = {"course.py", "launch.py", "run_common.py", "steps_check.py", "steps_compare.py"}
SCRIPTS = sorted(path for pattern in ("step*/train.py", "step9*/run_*.py", "cluster/*.py", "cluster/*.sh", "tools/*.py",
                                      "tools/*.sh") for path in ROOT.glob(pattern) if path.name not in NOT_SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help_from_anywhere(script, tmp_path):
    command = [script] if script.suffix == ".sh" else [sys.executable, script]
    run = subprocess.run([*command, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                         timeout=120)
    assert run.returncode == 0 and run.stdout and not run.stderr, run.stderr
    assert not list(tmp_path.iterdir())
