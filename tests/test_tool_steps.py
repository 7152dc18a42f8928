"""steps.py diff on small made-up steps."""

import pytest
from support.made_up_steps import clean, repo, run  # noqa: F401, fixtures


def test_diff_shows_changed_files_or_those_that_are_named(run):
    code, out = run("diff", 1, 2)
    assert code == 0 and out.startswith("# grid.py: new +1\n--- /dev/null\n+++ step2_two/grid.py\n@@ ")
    assert "# train.py: changed +2 -1\n--- step1_one/train.py\n+++ step2_two/train.py\n@@ " in out
    assert "-    print(model.layer1)\n+    for _ in range(2):\n+        print(model.layer1)\n" in out
    assert "\n+import torch\n" in out and "model.py:" not in out and "README" not in out and "\033" not in out
    assert run("diff", 2, 3, "grid.py") == (0, "# grid.py: removed -1\n")
    assert run("diff", 2, 3, "train.py") == (0, "# train.py: unchanged \n")
    assert "# README.md: changed" in run("diff", 2, 3, "README.md")[1]


@pytest.mark.parametrize("args, message", [
    (("diff", 1, 7), "there is no step 7: choose one of 1, 2, 3"),
    (("diff", 1, 2, "modle.py"), "no file modle.py in step1_one or step2_two: choose one of ['README.md', 'grid.py'"),
])
def test_unknown_step_or_file(run, args, message):
    code, out = run(*args)
    assert code == 2 and message in out, out


def test_without_git(run, monkeypatch):
    """The project may have come as a ZIP, to a machine that has none."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("diff", 1, 2) == (2, "steps.py: git, which compares the steps, is not installed: install it, or use "
                                    "diff -ruN\n")
