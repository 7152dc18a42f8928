"""Every module can be imported, and every script says what its flags are, from any working directory."""

import json

import pytest
from launch import ROOT, fork

ROOMS = {  # name -> its modules
    "steps": "step*/*.py", "cluster": "cluster/**/*.py", "tools": "tools/*.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_modules_and_scripts_from_another_directory(room):
    """In one process that forks another for each, with what is slow to import in it."""
    paths = sorted(ROOT.glob(ROOMS[room]))
    assert len(paths) > 5
    script = ROOT / "tests" / "support" / "imports.py"
    failed = json.loads(fork(1, 1, *paths, script=script, timeout=300).stdout)
    assert not failed, "\n".join(f"{what}:\n{error}" for what, error in failed.items())
