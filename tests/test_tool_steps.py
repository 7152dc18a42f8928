"""Tests of steps.py on three small made-up steps, and the proof that the real steps have not drifted."""

import shutil
import subprocess
from pathlib import Path

import pytest
import steps

MODEL = "".join(f"layer{i} = {i}\n\n\n" for i in range(6))
TRAIN = "import os\nimport model\n\n\ndef main():\n    print(model.layer1)\n\n\nmain()\n"
LOOP = TRAIN.replace("    print", "    for _ in range(2):\n        print")


def table(*rows):
    lines = ["# A step", "", "Why.", "", "## Files", "", "| file | what | lines | why |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {what} | {counts} | a reason |" for name, what, counts in rows), "",
                      "## Next", "", "| `model.py` | gone | +99 | not in the section |", ""])


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """Three committed steps without drift: step 2 adds a module, step 3 changes model.py and drops a module."""
    root = tmp_path_factory.mktemp("clean")
    files = {
        "step1_one/model.py": MODEL, "step1_one/train.py": TRAIN,
        "step1_one/README.md": table(("model.py", "new", "+18"), ("train.py", "new", "+9")),
        "step2_two/model.py": MODEL, "step2_two/train.py": LOOP, "step2_two/grid.py": "import torch\n",
        "step2_two/README.md": table(("grid.py", "new", "+1"), ("train.py", "changed", "+2 -1"),
                                     ("model.py", "unchanged", "")),
        "step3_three/model.py": MODEL + "size = 6\n", "step3_three/train.py": LOOP,
        "step3_three/README.md": table(("grid.py", "removed", "-1"), ("model.py", "changed", "+1 -0")),
    }
    for name, text in files.items():
        write(root, name, text)
    git(root, "init", "-q", "--template=")
    commit(root)
    return root


@pytest.fixture
def repo(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "repo")


def git(root, *args):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args], cwd=root, check=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-qm", "steps")


def write(root, name, text):
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)


def replace(root, name, old, new):
    text = (root / name).read_text()
    assert text.count(old) == 1, (old, text)
    (root / name).write_text(text.replace(old, new))


def snapshot(root):
    return {path: path.read_bytes() for path in root.glob("step*/*")}


@pytest.fixture
def run(repo, capsys):
    def run(command, *args, root=repo):
        code = steps.main([command, "--root", str(root), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_real_steps_have_not_drifted(run):
    code, out = run("check", root=Path(__file__).parents[1])
    assert code == 0, out


def test_check_is_silent_on_declared_changes(run):
    assert run("check") == (0, "3 steps: all changes are declared, all steps are self-contained\n")


def long_function(lines):
    return "def f():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize("name, old, new, problem", [
    ("step2_two/model.py", "layer3 = 3", "layer3 = 4", "README.md:11: model.py is listed as 'unchanged' but is"),
    ("step3_three/train.py", "range(2)", "range(3)", "train.py is changed since step2_two but not listed"),
    ("step3_three/README.md", "| `model.py` | changed | +1 -0 |", "| `train.py` | changed | +1 -1 |",
     "README.md:10: train.py is listed as 'changed' but is unchanged since step2_two"),
    ("step3_three/README.md", "+1 -0", "+2 -0", "README.md:10: model.py: '+2 -0', but git counts '+1 -0'"),
    ("step1_one/README.md", "+18", "+17", "model.py: '+17', but git counts '+18'"),
    ("step1_one/README.md", "new | +18", "changed | +18 -0", "model.py is listed as 'changed' but is new"),
    ("step3_three/README.md", "removed | -1", "removed | -2", "grid.py: '-2', but git counts '-1'"),
    ("step2_two/README.md", "`grid.py`", "grid.py", "grid.py is new since step1_one but not listed"),
    ("step3_three/README.md", "| `grid.py` |", "| `grip.py` |", "grip.py is neither in this step nor"),
    ("step3_three/README.md", "| `grid.py` |", "| |", "grid.py is removed since step2_two but not listed"),
    ("step3_three/README.md", "## Files", "## Other", "no heading '## Files'"),
])
def test_check_finds_drift(repo, run, name, old, new, problem):
    replace(repo, name, old, new)
    code, out = run("check")
    assert code == 1 and problem in out, out


@pytest.mark.parametrize("source, problem", [
    ("import step1_one.model", "grid.py:1: imports step1_one.model: neither in step2_two"),
    ("def f():\n    from tests import steps", "grid.py:2: imports tests"),
    ("import picotron", "imports picotron"),
    ("from . import model", "relative import"),
    ("import sys\nsys.path.insert(0, '..')", "grid.py:2: sys.path"),
    ("from sys import path", "sys.path"),
    ("import importlib\nimportlib.import_module('step1_one.model')", "importlib.import_module"),
    ("import matplotlib.pyplot", "imports matplotlib.pyplot"),
    ("def f(:", "grid.py:1: syntax error"),
    ("# TO" + "DO: later", "left-over TO" + "DO"),
    ("x = 1\n" * 301, "301 lines, more than 300"),
    (long_function(61), "grid.py:1: function f has 61 lines, more than 60"),
    (f"x = '{'y' * 116}'", "grid.py:1: 122 characters, more than 120"),
])
def test_check_finds_a_bad_module(repo, run, source, problem):
    write(repo, "step2_two/grid.py", source)
    code, out = run("check")
    assert code == 1 and problem in out, out


@pytest.mark.parametrize("source", [
    "import os.path, numpy as np, model\nfrom torch import nn\nos.path.join('a', 'b')",
    "x = 1\n" * 300,
    long_function(60),
])
def test_check_accepts_what_is_just_allowed(repo, run, source):
    write(repo, "step2_two/grid.py", source)
    run("check", "--fix-counts")
    assert run("check")[0] == 0, run("check")[1]


def test_check_wants_flat_steps_without_gaps(repo, run):
    write(repo, "step2_two/package/other.py", "")
    (repo / "step1_one").rename(repo / "step4_four")
    out = run("check")[1]
    assert "step1: missing" in out and "step2_two/package/other.py: a step is flat" in out


def test_fix_counts_rewrites_only_the_counts(repo, run):
    replace(repo, "step2_two/grid.py", "import torch\n", "import torch\nimport os\n")
    before = snapshot(repo)
    code, out = run("check", "--fix-counts")
    assert code == 0, out
    after = snapshot(repo)
    readme = repo / "step2_two/README.md"
    assert {path for path in before if before[path] != after[path]} == {readme, repo / "step3_three/README.md"}
    assert after[readme] == before[readme].replace(b"| new | +1 |", b"| new | +2 |")


def test_fix_counts_does_not_hide_other_drift(repo, run):
    replace(repo, "step3_three/train.py", "range(2)", "range(3)")
    code, out = run("check", "--fix-counts")
    assert code == 1 and "train.py is changed" in out


def test_diff_shows_only_changed_files(run):
    code, out = run("diff", 1, 2)
    assert code == 0 and out.startswith("# grid.py: new +1\n--- /dev/null\n+++ step2_two/grid.py\n@@ ")
    assert "# train.py: changed +2 -1\n--- step1_one/train.py\n+++ step2_two/train.py\n@@ " in out
    assert "-    print(model.layer1)\n+    for _ in range(2):\n+        print(model.layer1)\n" in out
    assert "\n+import torch\n" in out and "model.py:" not in out and "README" not in out and "\033" not in out


def test_diff_names_removed_files_and_takes_file_names(run):
    assert run("diff", 2, 3, "grid.py") == (0, "# grid.py: removed -1\n")
    assert run("diff", 2, 3, "train.py") == (0, "# train.py: unchanged \n")
    assert "# README.md: changed" in run("diff", 2, 3, "--readme")[1]


@pytest.mark.parametrize("no_color, coloured", [("", True), ("1", False)])
def test_diff_is_coloured_on_a_terminal(run, monkeypatch, no_color, coloured):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert ("\033[32m+" in run("diff", 1, 2)[1]) == coloured


def test_table(run):
    assert run("table")[1].splitlines() == [
        "| step | new modules | changed files | total | lines |",
        "| --- | --- | --- | --- | --- |",
        "| `step1_one` | `model.py` +18, `train.py` +9 |  | +27 -0 | 27 |",
        "| `step2_two` | `grid.py` +1 | `train.py` +2 -1 | +3 -1 | 29 |",
        "| `step3_three` |  | `grid.py` removed -1, `model.py` +1 -0 | +1 -1 | 29 |",
    ]


def test_identical_file_takes_the_change_and_a_changed_one_is_merged(repo, run):
    replace(repo, "step1_one/model.py", "layer2 = 2", "layer2 = 22")
    code, out = run("propagate", 1, "model.py")
    assert (code, out) == (0, "step2_two/model.py: the same as step1_one\nstep3_three/model.py: merged\n")
    fixed = MODEL.replace("layer2 = 2", "layer2 = 22")
    assert (repo / "step2_two/model.py").read_text() == fixed
    assert (repo / "step3_three/model.py").read_text() == fixed + "size = 6\n"
    assert run("check")[0] == 0
    assert "has the change already" in run("propagate", 1, "model.py")[1]  # a second run changes nothing
    assert (repo / "step3_three/model.py").read_text() == fixed + "size = 6\n"


def test_chain_resumes_where_a_later_step_lacks_the_change(repo, run):
    for step in ("step1_one", "step2_two"):
        replace(repo, f"{step}/model.py", "layer2 = 2", "layer2 = 22")
    assert run("propagate", 1, "model.py")[0] == 0
    assert "layer2 = 22" in (repo / "step3_three/model.py").read_text()


def test_dry_run_writes_nothing(repo, run):
    replace(repo, "step1_one/model.py", "layer2 = 2", "layer2 = 22")
    before = snapshot(repo)
    code, out = run("propagate", 1, "model.py", "--dry-run")
    assert code == 0 and "step3_three/model.py: would be merged" in out
    assert snapshot(repo) == before


def test_conflict_stops_and_leaves_later_steps_untouched(repo, run):
    write(repo, "step3_three/model.py", "first = 0\n" + MODEL.replace("layer4 = 4", "layer4 = 40"))
    write(repo, "step4_four/model.py", MODEL)
    commit(repo)
    replace(repo, "step1_one/model.py", "layer1 = 1\n", "")  # merges cleanly, and must not shift the line numbers
    replace(repo, "step1_one/model.py", "layer4 = 4", "layer4 = 44")
    before = snapshot(repo)
    code, out = run("propagate", 1, "model.py", "train.py")
    lines = (repo / "step3_three/model.py").read_text().splitlines()
    line = int(out.split("step3_three/model.py: conflict at lines ")[1].split("-")[0])
    assert "layer4 = 40" in lines[line - 1] and code == 1, (line, out)
    assert "<<<<<<< step3_three/model.py\nlayer4 = 40\n" in out and "layer4 = 44\n>>>>>>> step2_two/model.py\n" in out
    after = snapshot(repo)
    assert {path for path in after if after[path] != before[path]} == {repo / "step2_two/model.py"}


def test_propagate_ends_where_the_file_was_removed(repo, run):
    replace(repo, "step2_two/grid.py", "torch", "numpy")
    code, out = run("propagate", 2, "grid.py")
    assert (code, out) == (0, "step3_three/grid.py: no such file, so the change ends at step2_two\n")


def test_propagate_without_a_change(run):
    code, out = run("propagate", 1, "model.py")
    assert code == 0 and "the same as in HEAD, nothing to carry" in out


def test_base_names_another_revision(repo, run):
    replace(repo, "step1_one/model.py", "layer2 = 2", "layer2 = 22")
    commit(repo)
    assert "nothing to carry" in run("propagate", 1, "model.py")[1]
    assert run("propagate", 1, "model.py", "--base", "HEAD~1")[0] == 0
    assert "layer2 = 22" in (repo / "step3_three/model.py").read_text()


def test_propagate_without_commits_asks_for_a_base(repo, run, tmp_path_factory):
    bare = tmp_path_factory.mktemp("no_commits")
    for step in ("step1_one", "step2_two"):
        write(bare, f"{step}/model.py", MODEL)
    git(bare, "init", "-q")
    git(bare, "add", "-A")
    replace(bare, "step1_one/model.py", "layer2 = 2", "layer2 = 22")
    code, out = run("propagate", 1, "model.py", root=bare)
    assert code == 2 and "--base" in out, out
    assert run("propagate", 1, "model.py", "--base", ":0", root=bare)[0] == 0
    assert "layer2 = 22" in (bare / "step2_two/model.py").read_text()


def test_propagate_of_a_file_not_yet_committed_writes_nothing(repo, run):
    replace(repo, "step1_one/model.py", "layer2 = 2", "layer2 = 22")
    write(repo, "step1_one/extra.py", "")
    before = snapshot(repo)
    code, out = run("propagate", 1, "model.py", "extra.py")
    assert code == 2 and "step1_one/extra.py" in out and "--base" in out
    assert snapshot(repo) == before


@pytest.mark.parametrize("args, message", [
    (("diff", 1, 7), "there is no step 7: choose one of 1, 2, 3"),
    (("diff", 1, 2, "modle.py"), "no file modle.py in step1_one or step2_two: choose one of ['README.md', 'grid.py'"),
    (("propagate", 9, "model.py"), "there is no step 9"),
    (("propagate", 1, "grid.py"), "no file grid.py in step1_one"),
])
def test_unknown_step_or_file(run, args, message):
    code, out = run(*args)
    assert code == 2 and message in out, out


def test_a_root_without_steps_or_with_two_of_one_number(repo, run):
    code, out = run("check", root=repo / "step1_one")
    assert code == 2 and "--root" in out
    (repo / "step3_again").mkdir()
    code, out = run("table")
    assert code == 2 and "step3_again" in out and "step3_three" in out
