"""The tours of two made-up steps: what steps.py check finds wrong with them, and how tour.py plays them."""

import json
import sys

import pytest
import steps
import tour
from support.made_up_steps import replace, table, write

MODEL = '''import os


def area(a, b):
    """The area of a rectangle."""
    return a * b


def length(a):
    total = 0
    total += a
    return total


def unseen():
    return os.sep
'''  # 8 lines of code
TRAIN = "import model\n\nprint(model.area(2, 3))\nprint(model.length(4))\n"  # 2 lines of code
GRID = "def place():\n    return 1\n"
AREA, LENGTH = "[`model.py::area`](model.py)", "[`model.py::length`](model.py)"
PRINTS = "[`train.py` from `model.area` to `model.length`](train.py)"
PLACE, CALL = "[`grid.py::place`](grid.py)", "[`train.py` at `grid.place`](train.py)"


def tour_of(*places):
    """Eight scenes, which show these places in turn."""
    scenes = [f"## Scene {i}\n\nLook at {places[i % len(places)]}.\n\nWords of scene {i}.\n" for i in range(8)]
    return "\n".join(["# A tour\n", *scenes, '```bash\necho "place 7"\n```\n\nLook for `place 7`.\n'])


@pytest.fixture
def root(tmp_path, capsys):
    """Of step 1's ten lines of code all but the two of `unseen` are lit: 80 %, which is enough."""
    for name, text in {
        "step1_one/model.py": MODEL, "step1_one/train.py": TRAIN,
        "step1_one/README.md": table(("model.py", "new", "+16"), ("train.py", "new", "+4")),
        "step1_one/TOUR.md": tour_of(AREA, LENGTH, PRINTS),
        "step2_two/model.py": MODEL, "step2_two/train.py": TRAIN + "print(grid.place())\n", "step2_two/grid.py": GRID,
        "step2_two/README.md": table(("grid.py", "new", "+2"), ("train.py", "changed", "+1 -0")),
        "step2_two/TOUR.md": tour_of("the diff", PLACE, CALL, "the diff of `train.py`"),
    }.items():
        write(tmp_path, name, text)
    assert steps.main(["check", "--root", str(tmp_path), "--fix-counts"]) == 0, capsys.readouterr().out
    capsys.readouterr()
    return tmp_path


@pytest.fixture
def check(root, capsys):
    return lambda *options: (steps.main(["check", "--root", str(root), *options]), capsys.readouterr().out)


@pytest.fixture
def play(root, capsys, monkeypatch):
    def play(*args):
        monkeypatch.setattr(tour, "ROOT", root)
        monkeypatch.setattr(sys, "argv", ["tour.py", *args])
        return tour.main(), *capsys.readouterr()

    return play


def test_check_is_silent_on_good_tours(root, check):
    code, out = check()
    assert code == 0 and out.endswith("\n2 steps: all changes are declared, all steps are self-contained\n"), out
    assert "(model.py#L9-L12)" in (root / "step1_one/TOUR.md").read_text()
    step = json.loads((root / ".tours/step1.tour").read_text())["steps"][1]
    assert (step["file"], step["selection"]["start"]["line"], step["line"]) == ("step1_one/model.py", 9, 12)


@pytest.mark.parametrize("name, old, new, problem", [
    ("step1_one/model.py", "def length", "def size", "scene 'Scene 1' has lost its place: model.py defines no length"),
    ("step1_one/TOUR.md", "Words of scene 0", "word " * 58 + "of scene 0", "'Scene 0' has 61 words, more than 60"),
    ("step2_two/TOUR.md", "the diff.\n\nWords of scene 0", "nothing.\n\nWords of scene 0", "'Scene 0': its first"),
    ("step2_two/TOUR.md", "the diff of `train.py`.\n\nWords of scene 3", "the diff of `model.py`.\n\nWords",
     "scene 'Scene 3' shows the diff of model.py, but there is none"),
    ("step1_one/TOUR.md", "## Scene 7", "Scene 7", "7 scenes, not 8 to 20"),
    (".tours/step1.tour", '"A tour"', '"Another tour"', ".tours/step1.tour: older than its tour"),
])
def test_check_names_what_is_wrong(root, check, name, old, new, problem):
    replace(root, name, old, new)
    code, out = check()
    assert code == 1 and problem in out, out


def test_stale_lines_are_found_and_mended(root, check):
    replace(root, "step2_two/grid.py", "def place", "# A comment.\ndef place")
    replace(root, "step2_two/README.md", "+2", "+3")
    code, out = check()
    assert code == 1 and "step2_two/TOUR.md: links lead to other lines than they name: run steps.py check --fix" in out
    assert check("--fix-counts")[0] == 0 and check()[0] == 0
    assert "(grid.py#L2-L3)" in (root / "step2_two/TOUR.md").read_text()


def test_the_share_of_lit_lines(root, check):
    replace(root, "step1_one/train.py", "import model\n", "import model\n\nprint('dark')  # in no scene: 8 of 11\n")
    replace(root, "step1_one/README.md", "+4", "+6")
    code, out = check("--fix-counts")
    assert code == 1 and "step1_one: its tour shows 73% of the 11 lines of its idea, less than 80%" in out
    assert "not model.py:15, model.py:16, train.py:3 ..." in out
    write(root, "step1_one/TOUR.md", tour_of(LENGTH, PRINTS))  # 6 of 11: area is dark, too
    assert "its tour shows 55% of the 11 lines" in check("--fix-counts")[1]
    write(root, "step2_two/TOUR.md", tour_of("the diff", CALL))
    assert "step2_two: no scene shows grid.py::place, which is new" in check("--fix-counts")[1]


def test_tour_prints_plainly_without_a_terminal(play):
    code, out, _ = play("2", "7")
    assert code == 0 and "\033" not in out and "6/8" not in out
    assert "7/8  Scene 6\n\nstep2_two/train.py, lines 5 to 5\n" in out and ">   5 + print(grid.place())" in out
    assert "    4   print(model.length(4))" in out and '$ echo "place 7"\n\nLook for: place 7' in out
    assert "$ python tools/steps.py diff 1 2\n" in play("2")[1]
    assert play()[1] == "1             8 scenes  A tour\n2             8 scenes  A tour\n"
