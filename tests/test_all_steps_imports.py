"""Every script says what its flags are, from any working directory; what it imports for that can be imported."""

import re
import subprocess

import pytest
from launch import ROOT, environment

ROOMS = ("step*/*.py", "beyond/*/*.py", "cluster/**/*.py", "tools/**/*.py")
ANYWHERE = """
import os, runpy
sys.path[0] = os.path.dirname(sys.argv[1])
os.chdir(sys.argv.pop())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("room", ROOMS)
def test_scripts_from_another_directory(run_code, tmp_path, room):
    """Nothing is written there, and nothing to stderr."""
    scripts = [path for path in sorted(ROOT.glob(room)) if "__main__" in (text := path.read_text())
               and re.search(r"parse_(known_)?args\(", text)]
    assert scripts
    (tmp_path / "empty").mkdir()
    for script in scripts:
        done = run_code(1, 1, ANYWHERE, script, "--help", tmp_path / "empty")
        assert "usage: " in done.stdout and not done.stderr and not any((tmp_path / "empty").iterdir()), (script, done)
        assert not room.startswith("tools") or "tools/" in done.stdout, f"{script}: --help shows no example"


@pytest.mark.parametrize("script", sorted([*ROOT.glob("cluster/*.sh"), *ROOT.glob("tools/*.sh")]),
                         ids=lambda path: path.name)
def test_shell_scripts_from_another_directory(script, tmp_path):
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
