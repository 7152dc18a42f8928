"""steps.py diff, table and propagate on small made-up steps."""

import pytest
from made_up_steps import MODEL, clean, commit, git, replace, repo, run, snapshot, write  # noqa: F401, with fixtures


def test_diff_shows_changed_files_or_those_that_are_named(run):
    code, out = run("diff", 1, 2)
    assert code == 0 and out.startswith("# grid.py: new +1\n--- /dev/null\n+++ step2_two/grid.py\n@@ ")
    assert "# train.py: changed +2 -1\n--- step1_one/train.py\n+++ step2_two/train.py\n@@ " in out
    assert "-    print(model.layer1)\n+    for _ in range(2):\n+        print(model.layer1)\n" in out
    assert "\n+import torch\n" in out and "model.py:" not in out and "README" not in out and "\033" not in out
    assert run("diff", 2, 3, "grid.py") == (0, "# grid.py: removed -1\n")
    assert run("diff", 2, 3, "train.py") == (0, "# train.py: unchanged \n")
    assert "# README.md: changed" in run("diff", 2, 3, "--readme")[1]


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


def test_conflict_stops_and_leaves_later_steps_untouched(repo, run):
    write(repo, "step3_three/model.py", "first = 0\n" + MODEL.replace("layer4 = 4", "layer4 = 40"))
    write(repo, "step4_four/model.py", MODEL)
    commit(repo)
    replace(repo, "step1_one/model.py", "layer1 = 1\n", "")  # merges cleanly
    replace(repo, "step1_one/model.py", "layer4 = 4", "layer4 = 44")
    before = snapshot(repo)
    code, out = run("propagate", 1, "model.py", "train.py")
    assert code == 1 and "step3_three/model.py: conflict:\n<<<<<<< step3_three/model.py\nlayer4 = 40\n" in out
    assert "layer4 = 44\n>>>>>>> step2_two/model.py\n" in out
    after = snapshot(repo)
    assert {path for path in after if after[path] != before[path]} == {repo / "step2_two/model.py"}


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
