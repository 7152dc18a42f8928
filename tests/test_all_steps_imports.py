"""Every module can be imported, and every script says what its flags are, from any working directory."""

import json
import subprocess

import pytest
from launch import ROOT, environment, fork

ROOMS = {  # name -> its modules
    "step9": "step9*/*.py", "cluster": "cluster/**/*.py", "steps": "step[1-8]*/*.py", "beyond": "beyond/*/*.py",
    "tools": "tools/**/*.py"}
SLOW = ("steps", "tools")  # whose own tests import most of them


@pytest.mark.parametrize("room", [pytest.param(room, marks=pytest.mark.slow if room in SLOW else ()) for room in ROOMS])
def test_modules_and_scripts_from_another_directory(room):
    """In one process that forks another for each, with what is slow to import in it."""
    paths = sorted(ROOT.glob(ROOMS[room]))
    assert len(paths) > 5
    script = ROOT / "tests" / "support" / "imports.py"
    failed = json.loads(fork(1, 1, *paths, script=script, timeout=300).stdout)
    assert not failed, "\n".join(f"{what}:\n{error}" for what, error in failed.items())


@pytest.mark.parametrize("script", sorted([*ROOT.glob("cluster/*.sh"), *ROOT.glob("tools/*.sh")]),
                         ids=lambda path: path.name)
def test_shell_scripts_from_another_directory(script, tmp_path):
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
