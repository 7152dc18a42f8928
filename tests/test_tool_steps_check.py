"""steps.py check on small made-up steps."""

import pytest
from course.steps_check import BUDGETS, CAPS, MOST_MODULES
from support.made_up_steps import clean, replace, repo, run, snapshot, write  # noqa: F401, three of them are fixtures


def test_check_is_silent_on_declared_changes(run):
    code, out = run("check")
    assert code == 0 and out.endswith("\n3 steps: all changes are declared, all steps are self-contained\n"), out
    assert out.startswith(f"step 2                    3 added lines, at most {BUDGETS[2][0]}\n"), out


@pytest.mark.parametrize("name, old, new, problem", [
    ("step2_two/model.py", "layer3 = 3", "layer3 = 4", "README.md:11: model.py is listed as 'unchanged' but is"),
    ("step3_three/train.py", "range(2)", "range(3)", "train.py is changed since step2_two but not listed"),
    ("step3_three/README.md", "| `model.py` | changed | +1 -0 |", "| `train.py` | changed | +1 -1 |",
     "README.md:10: train.py is listed as 'changed' but is unchanged since step2_two"),
    ("step3_three/README.md", "+1 -0", "+2 -0", "README.md:10: model.py: '+2 -0', but git counts '+1 -0'"),
    ("step1_one/README.md", "new | +18", "changed | +18 -0", "model.py is listed as 'changed' but is new"),
    ("step3_three/README.md", "removed | -1", "removed | -2", "grid.py: '-2', but git counts '-1'"),
    ("step3_three/README.md", "| `grid.py` |", "| `grip.py` |", "grip.py is neither in this step nor"),
    ("step3_three/README.md", "## Files", "## Other", "no heading '## Files'"),
])
def test_check_finds_drift(repo, run, name, old, new, problem):
    replace(repo, name, old, new)
    code, out = run("check")
    assert code == 1 and problem in out, out


@pytest.mark.parametrize("source, problem", [
    ("import step1_one.model", "grid.py:1: imports step1_one.model: neither in step2_two"),
    ("def f():\n    from tests import steps", "grid.py:2: imports tests"),
    ("from . import model", "relative import"),
    ("import sys\nsys.path.insert(0, '..')", "grid.py:2: sys.path"),
    ("import importlib\nimportlib.import_module('step1_one.model')", "importlib.import_module"),
    ("import matplotlib.pyplot", "imports matplotlib.pyplot"),
    ("# TO" + "DO: later", "left-over TO" + "DO"),
    ("x = 1\n" * 301, "301 lines, more than 300"),
    ("def f():\n" + "    pass\n" * 60, "grid.py:1: function f has 61 lines, more than 60"),
    (f"x = '{'y' * 116}'", "grid.py:1: 122 characters, more than 120"),
])
def test_check_finds_a_bad_module(repo, run, source, problem):
    write(repo, "step2_two/grid.py", "import os.path, numpy as np, model\nfrom torch import nn\nos.path.join('a', 'b')")
    run("check", "--fix-counts")
    assert run("check")[0] == 0, "these imports are allowed"
    write(repo, "step2_two/grid.py", source)
    code, out = run("check")
    assert code == 1 and problem in out, out


def test_check_wants_steps_within_their_budgets(repo, run):
    write(repo, "step2_two/grid.py", "x = 1\n" * 260)  # and two lines of train.py
    for name, source in (("other", "x = 1\n" * (BUDGETS[3][0] - 1)), ("another", "x = 1\n")):
        write(repo, f"step3_three/{name}.py", source)  # and one line of model.py
    out = run("check")[1]
    assert "step 2: " not in out and f"step 3: {BUDGETS[3][0] + 1} added lines, more than {BUDGETS[3][0]}" in out
    assert "step3_three: has 2 new modules, more than 1: another.py, other.py" in out and "step2_two: has" not in out


FILES = {"same_numbers/": "same_numbers/a{}.py", "its trainers": "same_numbers/trainers{}.py",
         "what it found": "same_numbers/found/{}.py", "the scoreboard": "tools/maintain/board/{}.py",
         "the site's own files": "tools/site/{}.js",
         "step 8, whole": "step8_eight/{}.py"}  # of the others, the name says it


@pytest.mark.parametrize("what, most", [(what, most) for what, most, *_ in CAPS])
def test_no_room_grows_unseen(repo, run, what, most):
    """One line (of a page, one word) more than there may be is named, and no other room counts it."""
    name = what if what.endswith(".md") else FILES.get(what) or f"{what.removeprefix('pages of ')}room{{}}/a.py"
    is_page, size = what.endswith(".md") or what.startswith("pages"), 250
    pieces = [most + 1] if is_page else [size] * (most // size) + [most % size + 1]
    for i, lines in enumerate(pieces):
        path = repo / name.replace(".py", ".md" if is_page else ".py").format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(repo, path.relative_to(repo), "word " * lines if is_page else "\n" * lines)
    code, out = run("check")
    rooms = tuple(f"{each}: " for each, *_ in CAPS)
    found = [line for line in out.splitlines() if line.startswith(rooms) and "more than" in line]
    unit = "words" if is_page else "lines"
    assert code == 1 and found == [f"{what}: {most + 1} {unit}, more than {most}"], out


@pytest.mark.parametrize("name", ["exercises/mine/a.py", "same_numbers/a.md", "tools/site/a.py"])
def test_what_does_not_count(repo, run, name):
    (repo / name).parent.mkdir(parents=True)
    write(repo, name, "\n" * 299 if name.startswith("tools") else "\n" * 9999)
    assert "more than" not in run("check")[1]


def test_a_folder_of_cluster_has_room_for_so_many_modules(repo, run):
    (repo / "cluster" / "run").mkdir(parents=True)
    for i in range(MOST_MODULES + 1):
        write(repo, f"cluster/run/a{i}.py", "")
    assert f"a folder of cluster/: {MOST_MODULES + 1} modules, more than {MOST_MODULES}" in run("check")[1]


def test_check_measures_modules_outside_of_the_steps_and_wants_flat_steps_without_gaps(repo, run):
    (repo / "cluster" / "planning").mkdir(parents=True)
    write(repo, "cluster/planning/long.py", "import picotron\n" * 301)
    code, out = run("check")
    long = "cluster/planning/long.py:1: 301 lines, more than 300"
    assert code == 1 and out.endswith(f"at most {MOST_MODULES}\n{long}\n"), out
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
    replace(repo, "step3_three/train.py", "range(2)", "range(3)")  # other drift is not hidden
    code, out = run("check", "--fix-counts")
    assert code == 1 and "train.py is changed" in out
